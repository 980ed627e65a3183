"""The training side: shards in, checkpoints, metrics and SavedModels out. Never imports Spark.

The public API, imported when it is first asked for, so that `import training` loads no TensorFlow:

    open_batches    a dataset version as NumPy arrays, for PyTorch, JAX and others
    open_dataset    a dataset version as a `tf.data.Dataset`, for any Keras model
    load_run        the model of a run, with its config and manifest
    Trainer         trains a model of a config in a run directory
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Else TensorFlow takes a whole card, wherever it starts.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

if TYPE_CHECKING:
    from training.checkpoint.restore import load_run
    from training.input.batches import open_dataset
    from training.loop.trainer import Trainer
    from training.reader.batch_reader import open_batches

_MODULES = {
    "load_run": "training.checkpoint.restore",
    "open_batches": "training.reader.batch_reader",
    "open_dataset": "training.input.batches",
    "Trainer": "training.loop.trainer",
}

__all__ = ["Trainer", "load_run", "open_batches", "open_dataset"]


def __getattr__(name: str) -> Any:
    """Imports a name of the public API."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Returns the names of the public API too, for completion."""
    return sorted({*globals(), *__all__})
