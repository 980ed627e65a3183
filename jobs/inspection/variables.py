"""A variable of a trained run: its shape, its range, its first rows; and the row of one key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError, did_you_mean
from conf.schema import OOV_ID
from jobs.support.trained_run import restore_run

if TYPE_CHECKING:
    from training.embedding.key_rules import RuledIndex

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
    model = restore_run(run).model
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


def summarize_key(run: Path, name: str, key: int) -> dict[str, Any]:
    """Returns what a table of a run's best checkpoint holds of a key, as JSON values.

    Args:
        run: Directory of the run.
        name: A table.
        key: As the dataset holds it; of a static table, an id.

    Returns:
        `row` None where the key has none; `occurrences` and, in steps or as a value of the
        feature, `last_seen` where the table has rules.

    Raises:
        ConfigError: The model has no such table.
        UpstreamNotReadyError: The run has no checkpoint yet.
        InputDataError: The checkpoint or the dataset version is damaged or gone.
    """
    tables = restore_run(run).model.tables
    from training.embedding.dynamic_table import DynamicTable
    from training.embedding.key_rules import RuledIndex

    if name not in tables:
        raise ConfigError(
            "the model has no such table",
            received=name,
            allowed=", ".join(tables),
            fix=did_you_mean(name, tables),
        )
    table, known = tables[name], {}
    row = key if 0 <= key < table.vocabulary_size else None
    if isinstance(table, DynamicTable):
        position = int(table.keys.find_on_host(np.array([key]))[0])
        row = None if position == OOV_ID else position
        if isinstance(table.keys.index, RuledIndex):
            known = describe_occurrences(table.keys.index, key)
    values = None if row is None else np.asarray(table.lookup(np.array([key])))[0]
    return {
        "kind": "key",
        "path": str(run),
        "table": name,
        "key": key,
        "row": row,
        **known,
        "norm": None if values is None else float(np.linalg.norm(values)),
        "values": None if values is None else values.tolist(),
    }


def describe_occurrences(index: RuledIndex, key: int) -> dict[str, Any]:
    """Returns how often a table with rules has seen a key, when last, and what now is."""
    found, counters = index.read_key(key), index.counters
    if found is None:
        return {"occurrences": 0}
    now = counters.now if counters.is_timed else None
    if index.timestamp is None:
        now = counters.batches
    return {
        "occurrences": found[1],
        "last_seen": found[2],
        "now": now,
        "clock": index.timestamp or "step",
        "unused": None if now is None else now - found[2],
    }
