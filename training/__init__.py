"""The training side: shards in, checkpoints, metrics and SavedModels out. Never imports Spark.

The public API, imported when it is first asked for, so that `import training` loads no TensorFlow:

    load_run    the model of a run, with its config, manifest and dataset version
    Trainer     trains the model of a config in a run directory

    >>> import training
    >>> trained = training.load_run("work/runs/demo")
    >>> trained.model.embed_users(batch)  # float32 [rows, dim]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.checkpoint.restore import load_run
    from training.loop.trainer import Trainer

_MODULES = {
    "load_run": "training.checkpoint.restore",
    "Trainer": "training.loop.trainer",
}

__all__ = ["Trainer", "load_run"]


def __getattr__(name: str) -> Any:
    """Imports a name of the public API."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Returns the names of the public API too, for completion."""
    return sorted({*globals(), *__all__})
