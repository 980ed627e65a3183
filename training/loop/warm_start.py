"""Warm start: weights of an earlier run as the first ones of a new run, embeddings by token."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.paths import ToleratesShard, local_path
from conf.run import CHECKPOINTS_DIR, resolve_run
from conf.schema import PAD_ID
from conf.training.train import TrainConfig, WarmStartConfig
from training.checkpoint.checkpoint_files import (
    METADATA_FILE,
    STATE_PREFIX,
    CheckpointLayout,
    list_checkpoints,
    read_checkpoint,
)
from training.checkpoint.manager import BEST_DIR, LAST_DIR, describe_layout
from training.checkpoint.saved_tensors import MODEL, OPTIMIZERS, TrainingState, collect_state
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import SAVED_KEYS, KeySpace
from training.embedding.ruled_key_space import (
    COUNTS,
    MOMENT,
    STEPS,
    TIMES,
    WAITING_KEYS,
    RuledKeySpace,
)
from training.input.split_source import TrainingData
from training.input.vocabularies import (
    NO_ROW,
    EncodedVersion,
    match_keys,
    match_rows,
    read_encoded_version,
)
from training.loop.optimizers import Optimizers
from training.models.model import Model
from training.run_directory import RunReference

ITEM_OF_LIST = re.compile(r"(.+)/([0-9]+)")


@dataclass(frozen=True)
class SlotMap:
    """A tensor of the new optimizers and the earlier one that it continues.

    Attributes:
        name: Its name.
        source: Name of the earlier tensor.
        table: The table whose rows it follows, or None: it is of a dense weight, or a counter.
    """

    name: str
    source: str
    table: str | None


def map_slots(
    new: tuple[TrainingState, CheckpointLayout],
    old: tuple[Mapping[str, Sequence[int]], CheckpointLayout],
    fresh: dict[str, str],
) -> list[SlotMap]:
    """Pairs the tensors of two optimizers.

    Optimizers hold their slots in lists: one tensor per table or per dense weight, in the order
    of the layout. Whole numbers of shape `[]` are counters of steps.

    Args:
        new: The new state and its layout.
        old: The earlier tensors' shapes and their layout.
        fresh: Receives the tensors that no earlier one belongs to, with the reason.
    """
    (state, layout), (old_shapes, old_layout) = new, old
    slots = {name: v for name, v in state.variables.items() if name.startswith(f"{OPTIMIZERS}/")}
    shapes = {name: variable.shape.as_list() for name, variable in slots.items()}
    table_shapes = [
        state.variables[name].shape.as_list() for name in layout.trained_tables.values()
    ]
    dense_shapes = [state.variables[name].shape.as_list() for name in layout.dense]
    maps: list[SlotMap] = []
    for prefix, names in _group_slots(shapes).items():
        found = [shapes[name] for name in names]
        if prefix and _leads(found, table_shapes):
            for name, table in zip(names, layout.trained_tables, strict=True):
                _pair_slots(
                    maps,
                    fresh,
                    name,
                    table,
                    _position_in_list(table, old_layout.trained_tables),
                    old_shapes,
                )
        elif prefix and found == dense_shapes:
            for name, weight in zip(names, layout.dense, strict=True):
                _pair_slots(
                    maps, fresh, name, None, _position_in_list(weight, old_layout.dense), old_shapes
                )
        else:
            maps += [
                SlotMap(name, name, None)
                for name in names
                if slots[name].dtype.is_integer and not shapes[name] and name in old_shapes
            ]
            fresh |= {
                name: "it is not known which weight this tensor of the optimizers is of"
                for name in names
                if shapes[name]
            }
    return maps


def _group_slots(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """Names by the list that they are of, in its order; those of no list under ""."""
    groups: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in shapes:
        match = ITEM_OF_LIST.fullmatch(name)
        groups[match[1] if match else ""].append((int(match[2]) if match else 0, name))
    return {prefix: [name for _, name in sorted(items)] for prefix, items in groups.items()}


def _leads(found: Sequence[Sequence[int]], tables: Sequence[Sequence[int]]) -> bool:
    """Whether each tensor has a row for each row of its table."""
    return len(found) == len(tables) and all(
        shape[:1] == table[:1] for shape, table in zip(found, tables, strict=True)
    )


def _position_in_list(name: str, names: Mapping[str, str] | Sequence[str]) -> int | None:
    ordered = list(names)
    return ordered.index(name) if name in ordered else None


def _pair_slots(
    maps: list[SlotMap],
    fresh: dict[str, str],
    name: str,
    table: str | None,
    position: int | None,
    old_shapes: Mapping[str, Sequence[int]],
) -> None:
    if position is None:
        return  # The weight itself is fresh, and said to be.
    source = f"{name.rpartition('/')[0]}/{position}"
    if source in old_shapes:
        maps.append(SlotMap(name, source, table))
    else:
        fresh[name] = f"the earlier optimizers have no {source}"


@dataclass(frozen=True)
class MatchedKeys:
    """Keys and rows of an earlier table that a dynamic table continues.

    Attributes:
        keys: Its keys, int64 `[n]`, in the order of the earlier table.
        rows: Row of the earlier table for each row of the new one, int64 `[2 + n]`.
        history: Counts and times of the keys, the keys that waited for a row, and the moment, by
            the names of `RuledKeySpace.state_tensors`; empty where the earlier table had no rules.
    """

    keys: np.ndarray
    rows: np.ndarray
    history: Mapping[str, np.ndarray] = field(default_factory=dict)


def match_dynamic_table(
    model: Model,
    table: DynamicTable,
    earlier: np.ndarray,
    versions: tuple[EncodedVersion, EncodedVersion],
) -> MatchedKeys | str:
    """Returns what a dynamic table continues of an earlier one, or why it can continue nothing.

    Args:
        model: The new model.
        table: One of its tables.
        earlier: Keys of the earlier table, int64 `[n]`, from row 2 on.
        versions: The dataset version to train on, and that of the earlier run.
    """
    feature = _find_feature(model, table)
    found = match_keys(feature, earlier, *versions)
    if found is None:
        return f"its keys are made in another way: those of feature {feature!r}"
    kept = np.flatnonzero(earlier != PAD_ID if found is earlier else found != NO_ROW)
    if table.keys.max_rows is not None and len(kept) > table.keys.max_rows:
        return f"{len(kept):,} keys there, and max_rows is {table.keys.max_rows:,}"
    rows = np.concatenate([np.arange(FIRST_ROW), kept + FIRST_ROW])
    return MatchedKeys(found[kept], rows)


def _find_feature(model: Model, table: DynamicTable) -> str:
    """Returns a feature of a table's keys."""
    return next(
        name
        for name, other in model.embedded_features.items()
        if isinstance(other, DynamicTable) and other.keys is table.keys
    )


def match_history(
    model: Model,
    table: DynamicTable,
    found: MatchedKeys,
    earlier: Mapping[str, np.ndarray],
    versions: tuple[EncodedVersion, EncodedVersion],
) -> MatchedKeys:
    """Returns matched keys with what an earlier table with rules knew of them.

    Args:
        model: The new model.
        table: One of its tables.
        found: Its keys.
        earlier: Tensors of the earlier key space.
        versions: As for `match_dynamic_table`.
    """
    if MOMENT not in earlier or not isinstance(table.keys, RuledKeySpace):
        return found
    kept = found.rows[FIRST_ROW:] - FIRST_ROW
    history = {name: earlier[name][kept] for name in (COUNTS, TIMES, STEPS) if name in earlier}
    waiting = earlier[WAITING_KEYS]
    asked = waiting[:, 0]
    keys = match_keys(_find_feature(model, table), asked, *versions)
    if keys is not None and keys is not asked:
        waiting = np.column_stack([keys, waiting[:, 1:]])[keys != NO_ROW]
    return replace(found, history={**history, WAITING_KEYS: waiting, MOMENT: earlier[MOMENT]})


def set_keys(model: Model, space: KeySpace, found: MatchedKeys) -> None:
    """Gives keys rows with first values, in all tables and optimizer state that have the keys."""
    keys = found.keys
    if found.history and isinstance(space, RuledKeySpace):
        space.continue_keys(keys, found.history)
    else:
        space.set_keys(keys)
    for matrix in space.matrices:
        matrix.assign(np.full((len(keys) + FIRST_ROW, matrix.dim), matrix.fill, np.float32))
    for table in model.tables.values():
        if isinstance(table, DynamicTable) and table.keys is space:
            padding = np.zeros((FIRST_ROW, table.dim), np.float32)
            table.rows.assign(np.concatenate([padding, table.draw_rows(keys)]))


@dataclass(frozen=True)
class WarmTarget:
    """The model that a warm start sets.

    Attributes:
        model: The new model.
        optimizers: Its optimizers.
        data: Its dataset version.
    """

    model: Model
    optimizers: Optimizers
    data: TrainingData


@dataclass(frozen=True)
class WarmStartReport:
    """Weights that a warm start has set.

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
class _EarlierRun:
    """The checkpoint to take weights from."""

    directory: Path
    layout: CheckpointLayout
    version: EncodedVersion
    reader: Any
    shapes: Mapping[str, list[int]]

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self.reader.get_tensor(name))

    def read_keys(self, table: str) -> dict[str, np.ndarray]:
        """Returns what is saved of a dynamic table's keys, by its names there."""
        start = self.layout.keys[table].removesuffix(SAVED_KEYS)
        names = [name for name in self.shapes if name.startswith(start)]
        return {name.removeprefix(start): self.read(name) for name in names}


def transfer_weights(
    config: TrainConfig, target: WarmTarget, new_rows: int | None = None
) -> WarmStartReport:
    """Sets a new model to the weights of an earlier run.

    Args:
        config: The resolved config, with `fit.warm_start`.
        target: The new model; it is unchanged where the weights are refused.
        new_rows: Earlier row that rows of new tokens take; None: they keep their first values.

    Raises:
        ConfigError: Weights do not fit, or moments would meet a schedule of the learning rate.
        InputDataError: The checkpoint or its dataset version is damaged or gone.
        UpstreamNotReadyError: There is no such run or checkpoint.
    """
    warm = config.fit.warm_start
    if warm is None:
        raise ValueError("fit.warm_start is not set")
    _check_moments(config, warm)
    source = _open_source(warm.path, config.input.tolerates)
    state = collect_state(**{MODEL: target.model, OPTIMIZERS: target.optimizers})
    layout = describe_layout(state, target.model)
    fresh: dict[str, str] = {}
    rows, keys = _match_tables(target, layout, source, fresh)
    kept = [state.name_of(variable) for variable in target.model.state_variables]
    dense = _match_dense(state, (*layout.dense, *kept), source, fresh)
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
        if new_rows is not None:
            found = np.where(found == NO_ROW, new_rows, found)
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


def _open_source(path: str, tolerates: ToleratesShard) -> _EarlierRun:
    """Opens the checkpoint that a path stands for: itself, or a run's best or last one."""
    directory = local_path(path)
    if not (directory / METADATA_FILE).is_file():
        run = resolve_run(path)
        checkpoints = run / CHECKPOINTS_DIR
        entries = list_checkpoints(checkpoints / BEST_DIR) or list_checkpoints(
            checkpoints / LAST_DIR
        )
        if not entries:
            raise UpstreamNotReadyError(
                "the run to start from has no checkpoint yet",
                received=run,
                fix="let it finish at least one epoch, or name another run",
            )
        directory = entries[-1].path
    layout = read_checkpoint(directory).layout
    reference = RunReference.read(directory.resolve().parents[2])
    try:
        manifest = reference.read_manifest(tolerates)
        version = read_encoded_version(reference.version_dir, manifest)
    except InputDataError as error:
        raise InputDataError(
            "the run to start from was trained on a dataset version that cannot be read: without "
            "its vocabularies no row has a token",
            received=f"{error.what}: {error.received}",
            fix="restore that version, or start from a run whose version is there",
        ) from error
    reader = tf.train.load_checkpoint(str(directory / STATE_PREFIX))
    return _EarlierRun(directory, layout, version, reader, reader.get_variable_to_shape_map())


def _match_tables(
    target: WarmTarget, layout: CheckpointLayout, source: _EarlierRun, fresh: dict[str, str]
) -> tuple[dict[str, np.ndarray], dict[KeySpace, MatchedKeys]]:
    """Returns the earlier row of each row of each table that comes over, and keys to set."""
    version = read_encoded_version(target.data.version_dir, target.data.manifest)
    rows: dict[str, np.ndarray] = {}
    keys: dict[KeySpace, MatchedKeys] = {}
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
            earlier, versions = source.read_keys(name), (version, source.version)
            matched = match_dynamic_table(target.model, table, earlier[SAVED_KEYS], versions)
            if isinstance(matched, str):
                fresh[name] = matched
            else:
                rows[name] = matched.rows
                keys[table.keys] = match_history(target.model, table, matched, earlier, versions)
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


def _match_dense(
    state: TrainingState, names: Sequence[str], source: _EarlierRun, fresh: dict[str, str]
) -> list[str]:
    """Returns the dense weights and moving statistics that come over."""
    matched = []
    for name in names:
        here = state.variables[name].shape.as_list()
        if name not in source.shapes:
            fresh[name] = f"the earlier model has no such weight; shape {here} here"
        elif list(source.shapes[name]) != here:
            fresh[name] = f"shape {list(source.shapes[name])} there, {here} here"
        else:
            matched.append(name)
    return matched


def _set_slot(
    state: TrainingState, source: _EarlierRun, slot: SlotMap, rows: Mapping[str, np.ndarray]
) -> bool:
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
