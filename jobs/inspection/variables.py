"""A variable of a trained run: its shape, its range, its first rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError, did_you_mean

SHOWN_ROWS = 10


def summarize_variable(run: Path, name: str, head: int | None = None) -> dict[str, Any]:
    """Returns what a variable of a run's best checkpoint holds, as JSON values.

    Args:
        run: Directory of the run.
        name: A table, or a weight as `sluice inspect` lists it.
        head: How many of its first rows are shown; None: ten.

    Raises:
        ConfigError: The model has no such variable.
        UpstreamNotReadyError: The run has no checkpoint yet.
        InputDataError: The checkpoint or the dataset version is damaged or gone.
    """
    values = _read_variable(run, name)
    shown = np.atleast_1d(values)[: head or SHOWN_ROWS]
    return {
        "kind": "variable",
        "path": str(run),
        "name": name,
        "dimensions": list(values.shape),
        "dtype": str(values.dtype),
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "norm": float(np.linalg.norm(values)),
        "first": [{"row": row, "values": value.tolist()} for row, value in enumerate(shown)],
    }


def _read_variable(run: Path, name: str) -> NDArray[Any]:
    from training.checkpoint.restore import load_run  # Loads TensorFlow, which takes seconds.

    model = load_run(run).model
    if name in model.tables:
        return np.asarray(model.tables[name].rows.read_value())
    tables = {id(variable) for variable in model.table_variables}
    weights = {n: v for n, v in model.named_variables.items() if id(v) not in tables}
    if name not in weights:
        known = [*model.tables, *weights]
        raise ConfigError(
            "the model has no such variable",
            received=name,
            allowed=", ".join(known),
            fix=did_you_mean(name, known) or "`sluice inspect RUN` lists them",
        )
    return np.asarray(weights[name])
