"""Weights of an earlier run as the first weights of a new one, embeddings by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from conf.dataset import PassesOver, local_path
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.run import CHECKPOINTS_DIR, resolve_run
from conf.training import TrainConfig, WarmStartConfig
from training.checkpoint.checkpoints import BEST_DIR, LAST_DIR, describe_layout
from training.checkpoint.files import SEAL_FILE, STATE_PREFIX, Layout, read_checkpoint
from training.checkpoint.restore import read_dataset_reference, read_run_manifest
from training.checkpoint.shelf import list_entries
from training.checkpoint.state import MODEL, OPTIMIZERS, State, collect_state
from training.chunks import TrainingData
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_space import KeySpace
from training.models.base import RetrievalModel
from training.optimizer_slots import SlotMap, map_slots
from training.optimizers import Optimizers
from training.row_matching import NO_ROW, EncodedVersion, match_rows, read_encoded_version
from training.warm_keys import match_dynamic_table, set_keys


@dataclass(frozen=True)
class WarmTarget:
    """What is set.

    Attributes:
        model: The new model.
        optimizers: Its optimizers.
        data: What it trains on.
    """

    model: RetrievalModel
    optimizers: Optimizers
    data: TrainingData


@dataclass(frozen=True)
class WarmStartReport:
    """What came over.

    Attributes:
        source: The checkpoint.
        rows: Per table: its rows, and those that came over.
        dense: Dense weights that came over.
        fresh: Weights that start as in a new run, with the reason.
        moments: Tensors of the optimizers that came over.
    """

    source: str
    rows: Mapping[str, Mapping[str, int]]
    dense: tuple[str, ...]
    fresh: Mapping[str, str]
    moments: tuple[str, ...]

    def render(self) -> str:
        """Returns the report in words."""
        tables = ", ".join(
            f"{name} {found['transferred']:,} of {found['rows']:,} rows"
            for name, found in self.rows.items()
        )
        fresh = "".join(f"; fresh: {name} ({why})" for name, why in self.fresh.items())
        moments = f"; {len(self.moments)} tensors of the optimizers" if self.moments else ""
        return (
            f"warm start from {self.source}: {tables}; "
            f"{len(self.dense)} dense weights{moments}{fresh}"
        )


@dataclass(frozen=True)
class _Source:
    """The checkpoint to take weights from."""

    directory: Path
    layout: Layout
    version: EncodedVersion
    reader: Any
    shapes: Mapping[str, list[int]]

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self.reader.get_tensor(name))


def take_over(config: TrainConfig, target: WarmTarget) -> WarmStartReport:
    """Sets a new model to the weights of an earlier run.

    Args:
        config: The resolved config, with `fit.warm_start`.
        target: What is set; nothing is, where the weights are refused.

    Raises:
        ConfigError: Weights do not fit, or moments would meet a schedule of the learning rate.
        InputDataError: The checkpoint or its dataset version is damaged or gone.
        UpstreamNotReadyError: There is no such run or checkpoint.
    """
    warm = config.fit.warm_start
    if warm is None:
        raise ValueError("fit.warm_start is not set")
    _check_moments(config, warm)
    source = _open_source(warm.path, config.input.passes_over)
    state = collect_state(**{MODEL: target.model, OPTIMIZERS: target.optimizers})
    layout = describe_layout(state, target.model)
    fresh: dict[str, str] = {}
    rows, keys = _match_tables(target, layout, source, fresh)
    dense = _match_dense(state, layout, source, fresh)
    slots: list[SlotMap] = []
    if warm.moments == "transfer":
        slots = map_slots((state, layout), (source.shapes, source.layout), fresh)
    if fresh and warm.mismatched == "refuse":
        raise ConfigError(
            "weights of the earlier run do not fit the new model",
            received="; ".join(f"{name}: {why}" for name, why in fresh.items()),
            allowed="weights of the same shapes, tables of any vocabulary",
            fix="set fit.warm_start.mismatched=fresh to let these start anew, or train the "
            "shapes of the earlier run",
        )
    for space, found_keys in keys.items():
        set_keys(target.model, space, found_keys)
    for name, found in rows.items():
        tensor = source.read(source.layout.tables[name])
        _set_rows(target.model.tables[name].rows, tensor, found)
    for name in dense:
        state.variables[name].assign(source.read(name))
    moments = [slot.name for slot in slots if _set_slot(state, source, slot, rows)]
    return WarmStartReport(
        source=str(source.directory),
        rows={
            name: {"rows": len(found), "transferred": int((found != NO_ROW).sum())}
            for name, found in rows.items()
        },
        dense=tuple(dense),
        fresh=fresh,
        moments=tuple(moments),
    )


def _check_moments(config: TrainConfig, warm: WarmStartConfig) -> None:
    """Moments are of use with their step count alone, and a schedule counts the same steps."""
    optimizer = config.optimizer
    changes = optimizer.schedule.kind != "constant" or optimizer.warmup_steps is not None
    if warm.moments == "transfer" and changes:
        raise ConfigError(
            "a schedule of the learning rate would begin at the earlier run's end",
            received=f"fit.warm_start.moments = transfer, "
            f"optimizer.schedule = {optimizer.schedule.kind}, "
            f"optimizer.warmup_steps = {optimizer.warmup_steps}",
            allowed="optimizer.schedule = constant without a warm-up, or moments = reset",
            fix="set fit.warm_start.moments=reset",
        )


def _open_source(path: str, passes_over: PassesOver) -> _Source:
    """Opens the checkpoint that a path stands for: itself, or a run's best or last one."""
    directory = local_path(path)
    if not (directory / SEAL_FILE).is_file():
        run = resolve_run(path)
        shelves = [run / CHECKPOINTS_DIR / name for name in (BEST_DIR, LAST_DIR)]
        entries = list_entries(shelves[0]) or list_entries(shelves[1])
        if not entries:
            raise UpstreamNotReadyError(
                "the run to start from has no checkpoint yet",
                received=run,
                fix="let it finish at least one epoch, or name another run",
            )
        directory = entries[-1].path
    layout = read_checkpoint(directory).layout
    version_dir, expected = read_dataset_reference(directory.resolve().parents[2])
    try:
        manifest = read_run_manifest(version_dir, expected, passes_over=passes_over)
        version = read_encoded_version(version_dir, manifest)
    except InputDataError as error:
        raise InputDataError(
            "the run to start from was trained on a dataset version that cannot be read: without "
            "its vocabularies no row has a token",
            received=f"{error.what}: {error.received}",
            fix="restore that version, or start from a run whose version is there",
        ) from error
    reader = tf.train.load_checkpoint(str(directory / STATE_PREFIX))
    return _Source(directory, layout, version, reader, reader.get_variable_to_shape_map())


def _match_tables(
    target: WarmTarget, layout: Layout, source: _Source, fresh: dict[str, str]
) -> tuple[dict[str, np.ndarray], dict[KeySpace, np.ndarray]]:
    """Returns the earlier row of each row of each table that comes over, and keys to set."""
    version = read_encoded_version(target.data.version_dir, target.data.manifest)
    rows: dict[str, np.ndarray] = {}
    keys: dict[KeySpace, np.ndarray] = {}
    for name in layout.tables:
        table = target.model.tables[name]
        if name not in source.layout.tables:
            fresh[name] = "the earlier model has no such table"
            continue
        before = list(source.shapes[source.layout.tables[name]])
        if before[1] != table.dim:
            fresh[name] = f"shape {before} there, {[table.vocabulary_size, table.dim]} here"
        elif isinstance(table, DynamicTable) != (name in source.layout.keys):
            fresh[name] = "it is dynamic in one of the two models alone"
        elif isinstance(table, DynamicTable):
            earlier = source.read(source.layout.keys[name])
            matched = match_dynamic_table(target.model, table, earlier, (version, source.version))
            if isinstance(matched, str):
                fresh[name] = matched
            else:
                rows[name], keys[table.keys] = matched.rows, matched.keys
        else:
            found = match_rows(target.model.id_spaces[name], version, source.version)
            if _fits(found, before[0], table.vocabulary_size):
                rows[name] = found
            else:
                here = [table.vocabulary_size, table.dim]
                fresh[name] = f"its ids are made in another way; shape {before} there, {here} here"
    return rows, keys


def _fits(rows: np.ndarray | None, before: int, here: int) -> TypeGuard[np.ndarray]:
    """Whether rows of an earlier table are those of all ids of a new one."""
    return rows is not None and rows.max(initial=0) < before and len(rows) == here


def _match_dense(state: State, layout: Layout, source: _Source, fresh: dict[str, str]) -> list[str]:
    """Returns the dense weights that come over."""
    matched = []
    for name in layout.dense:
        here = state.variables[name].shape.as_list()
        if name not in source.layout.dense:
            fresh[name] = f"the earlier model has no such weight; shape {here} here"
        elif list(source.shapes[name]) != here:
            fresh[name] = f"shape {list(source.shapes[name])} there, {here} here"
        else:
            matched.append(name)
    return matched


def _set_slot(state: State, source: _Source, slot: SlotMap, rows: Mapping[str, np.ndarray]) -> bool:
    """Sets one tensor of the optimizers; those of fresh weights stay as they are."""
    variable, tensor = state.variables[slot.name], source.read(slot.source)
    if slot.table is not None:
        if slot.table not in rows:
            return False
        _set_rows(variable, tensor, rows[slot.table])
    elif list(tensor.shape) != variable.shape.as_list():
        return False
    else:
        variable.assign(tensor)
    return True


def _set_rows(variable: tf.Variable, before: np.ndarray, rows: np.ndarray) -> None:
    """Sets the rows of known tokens; the others keep their first values."""
    values = variable.numpy().copy()
    known = rows != NO_ROW
    values[known] = before[rows[known]]
    variable.assign(values)
