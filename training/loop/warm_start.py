"""Warm start: first weights of an earlier run, by token, its keys and rows, or rows of files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.artefacts.dataset import ToleratesShard
from conf.artefacts.run import CHECKPOINT_FILE
from conf.errors import ConfigError, InputDataError, SluiceError
from conf.local_paths import local_path
from conf.schema import INPUT_ROLES, PAD_ID, Role
from conf.training.models import ModelConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import TrainConfig, WarmStartConfig
from training.checkpoint.checkpoint_files import (
    STATE_PREFIX,
    CheckpointLayout,
    CheckpointTensors,
    read_checkpoint,
)
from training.checkpoint.manager import describe_layout
from training.checkpoint.restore import RunReference, find_run_of, resolve_checkpoint
from training.checkpoint.saved_tensors import (
    MODEL,
    OPTIMIZERS,
    TrainingState,
    collect_state,
    share_state,
)
from training.distribution.workers import Workers
from training.embedding.dynamic_table import DynamicTable, ShardedRows, TableRows
from training.embedding.key_index import FIRST_ROW, SAVED_KEYS
from training.embedding.key_rules import COUNTERS, COUNTS, STEPS, TIMES, WAITING_KEYS
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable
from training.embedding.table_files import TableRows as KeyedRows
from training.embedding.table_files import load_table
from training.encoders.vocabularies import (
    NO_ROW,
    EncodedVersion,
    MatchTokens,
    list_fitted_anew,
    match_keys,
    match_rows,
    match_tokens,
    read_encoded_version,
)
from training.loop.optimizers import Optimizers
from training.models.model import Model
from training.reader.feature_columns import unknown_name
from training.reader.training_data import TrainingData

_ORDERS: Mapping[str, tuple[Role, ...]] = {
    "features": INPUT_ROLES,
    "user_features": ("user",),
    "item_features": ("item",),
}
"""Keys of models that name what they read; without one it is the features of these roles."""
_ITEM_OF_LIST = re.compile(r"(.+)/([0-9]+)")
_ROW_STATE = f"{OPTIMIZERS}/sparse/"


@dataclass(frozen=True)
class SlotMap:
    """A tensor of the new optimizers, and the earlier one; `table`: whose rows it follows."""

    name: str
    source: str
    table: str | None


def map_slots(
    new: tuple[TrainingState, CheckpointLayout],
    old: tuple[Mapping[str, Sequence[int]], CheckpointLayout],
    fresh: dict[str, str],
) -> list[SlotMap]:
    """Pairs the tensors of two optimizers; `fresh` gets those without an earlier one, and why."""
    (state, layout), (old_shapes, old_layout) = new, old
    slots = {name: v for name, v in state.variables.items() if name.startswith(f"{OPTIMIZERS}/")}
    shapes = {name: variable.shape.as_list() for name, variable in slots.items()}
    dense_shapes = [state.variables[name].shape.as_list() for name in layout.dense]
    maps: list[SlotMap] = []
    for prefix, names in _group_slots(shapes).items():
        if prefix.startswith(_ROW_STATE):
            lists = (layout.trained_tables, old_layout.trained_tables)
            maps += _pair_slots(names, lists, old_shapes, fresh, is_of_rows=True)
        elif prefix and [shapes[name] for name in names] == dense_shapes:
            maps += _pair_slots(names, (layout.dense, old_layout.dense), old_shapes, fresh)
        else:
            maps += [
                SlotMap(name, name, None)
                for name in names
                if slots[name].dtype.is_integer and not shapes[name] and name in old_shapes
            ]
            unknown = "it is not known which weight this tensor of the optimizers is of"
            fresh |= {name: unknown for name in names if shapes[name]}
    return maps


def _group_slots(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """Names by the list that they are of, in its order; those of no list under ""."""
    groups: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in shapes:
        match = _ITEM_OF_LIST.fullmatch(name)
        groups[match[1] if match else ""].append((int(match[2]) if match else 0, name))
    return {prefix: [name for _, name in sorted(items)] for prefix, items in groups.items()}


def _pair_slots(
    names: Sequence[str],
    lists: tuple[Sequence[str], Sequence[str]],
    old_shapes: Mapping[str, Sequence[int]],
    fresh: dict[str, str],
    *,
    is_of_rows: bool = False,
) -> Iterator[SlotMap]:
    weights, earlier = lists
    for name in names:
        prefix, _, number = name.rpartition("/")
        weight = weights[int(number)]
        if weight not in earlier:
            continue  # The weight itself is fresh, and said to be.
        source = f"{prefix}/{earlier.index(weight)}"
        if source in old_shapes:
            yield SlotMap(name, source, weight if is_of_rows else None)
        else:
            fresh[name] = f"the earlier optimizers have no {source}"


@dataclass(frozen=True)
class WarmTarget:
    """The new model that a warm start sets; `encoded`: how its version encodes, if known."""

    model: Model
    optimizers: Optimizers
    data: TrainingData
    encoded: EncodedVersion | None = None


@dataclass(frozen=True)
class WarmStartReport:
    """Weights that a warm start has set, by name, and those that it has left `fresh`, with why.

    `moments` are tensors of the optimizers; `refitted` are features whose values the build has
    fitted anew, so that the weights that came over were learned on others.
    """

    source: str | None
    rows: Mapping[str, Mapping[str, int]]
    dense: tuple[str, ...] = ()
    fresh: Mapping[str, str] = field(default_factory=dict)
    moments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    refitted: tuple[str, ...] = ()

    def render(self) -> str:
        counts = (
            f"{name} {found['transferred']:,} of {found['rows']:,} rows"
            for name, found in self.rows.items()
        )
        parts = [", ".join(counts), f"{len(self.dense)} dense weights"]
        parts += [f"{len(self.moments)} tensors of the optimizers"] if self.moments else []
        parts += [f"fresh: {name} ({why})" for name, why in self.fresh.items()]
        if self.refitted:
            shown = ", ".join(self.refitted)
            parts.append(f"fitted anew since then, so their weights meet other values: {shown}")
        sources = ", ".join(filter(None, (self.source, *self.files.values())))
        return f"warm start from {sources}: {'; '.join(parts)}"


@dataclass(frozen=True)
class _EarlierRun:
    """The checkpoint to take weights from."""

    directory: Path
    layout: CheckpointLayout
    version: EncodedVersion
    config: TrainConfig
    reader: Any
    shapes: Mapping[str, list[int]]

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self.reader.get_tensor(name))

    def read_keys(self, table: str) -> dict[str, np.ndarray]:
        start = self.layout.keys[table].removesuffix(SAVED_KEYS)
        names = [name for name in self.shapes if name.startswith(start)]
        return {name.removeprefix(start): self.read(name) for name in names}


def start_from(config: TrainConfig, target: WarmTarget, workers: Workers) -> WarmStartReport:
    """Sets the new model of all processes of a run, as `transfer_weights` does."""
    state = collect_state(**{MODEL: target.model, OPTIMIZERS: target.optimizers})
    if state.sharded:  # Each process takes the rows that it owns.
        report = _transfer_each(config, target, workers)
    else:
        found = workers.share(lambda: asdict(transfer_weights(config, target)))
        report = WarmStartReport(**found)
    share_state(state, workers)
    return report


def _transfer_each(config: TrainConfig, target: WarmTarget, workers: Workers) -> WarmStartReport:
    """Has each process read the earlier run, and refuses another one than the chief's."""
    failure: SluiceError | None = None
    report, found = WarmStartReport(None, {}), ""
    try:
        report = transfer_weights(config, target)
        if report.source is not None:
            found = (Path(report.source) / CHECKPOINT_FILE).read_text("utf-8")
    except SluiceError as error:
        failure = error
    if workers.any(failure is not None):
        raise failure or InputDataError(
            "another worker cannot start from what fit.warm_start names",
            received=str(config.fit.warm_start and config.fit.warm_start.path),
            fix="see that worker's message; each of them reads the path",
        )
    if workers.any(workers.share(lambda: found) != found):
        raise InputDataError(
            "fit.warm_start.path is another checkpoint on another worker",
            received=report.source,
            fix="name one run (SERIES/runs/ID) on storage that all workers share",
        )
    return report


def transfer_weights(
    config: TrainConfig, target: WarmTarget, match: MatchTokens = match_tokens
) -> WarmStartReport:
    """Sets a new model to the weights of an earlier run, and tables to the rows of files.

    Refused, it changes nothing. `match` finds the earlier ids; rows of new tokens, which have none,
    keep their first values.
    """
    warm = config.fit.warm_start
    if warm is None:
        raise ValueError("fit.warm_start is not set")
    files = read_table_files(target.model, warm.tables)
    report = WarmStartReport(None, {})
    if warm.path is not None:
        source = _open_source(warm.path, config.input.tolerates)
        if warm.moments == "transfer":
            _check_moments(config.optimizer, source.config.optimizer)
        _check_order(config.model, target, source)
        report = _transfer_run(source, target, warm, match)
    for name, places in set_table_files(target.model, files).items():
        target.optimizers.hold_rows(name, target.model.tables[name], places)
    found = {
        name: {"rows": target.model.tables[name].vocabulary_size, "transferred": len(keys)}
        for name, (keys, _) in files.items()
    }
    return replace(report, rows={**report.rows, **found}, files=warm.tables)


def _transfer_run(
    source: _EarlierRun, target: WarmTarget, warm: WarmStartConfig, match: MatchTokens
) -> WarmStartReport:
    """Sets the weights that do not come from files to those of an earlier run."""
    state = collect_state(**{MODEL: target.model, OPTIMIZERS: target.optimizers})
    layout = describe_layout(state, target.model)
    fresh: dict[str, str] = {}
    wanted = [name for name in layout.tables if name not in warm.tables]
    where = (target.data.version_dir, target.data.manifest)
    versions = (target.encoded or read_encoded_version(*where), source.version)
    rows, keys = _match_tables(target.model, versions, wanted, source, fresh, match)
    kept = [state.name_of(variable) for variable in target.model.state_variables]
    dense = _match_dense(state, (*layout.dense, *kept), source, fresh)
    slots: list[SlotMap] = []
    if warm.moments == "transfer":
        slots = map_slots((state, layout), (source.shapes, source.layout), fresh)
    if fresh and warm.mismatched == "refuse":
        raise ConfigError(
            "weights of the earlier run do not fit the new model",
            received="; ".join(f"{name}: {why}" for name, why in fresh.items()),
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
    _hold_weights(target, layout, (rows, dense), moments)
    features = (target.model.inputs, target.model.embedded_features)
    return WarmStartReport(
        source=str(source.directory),
        rows={
            name: {"rows": len(found), "transferred": int((found != NO_ROW).sum())}
            for name, found in rows.items()
        },
        dense=tuple(dense),
        fresh=fresh,
        moments=tuple(moments),
        refitted=tuple(list_fitted_anew(*features, *versions)),
    )


def _check_moments(optimizer: OptimizerConfig, earlier: OptimizerConfig) -> None:
    """Moments are of use with their step count alone, and a schedule counts the same steps."""
    kinds = [(one.sparse.kind, one.dense.kind) for one in (earlier, optimizer)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            "moments of the earlier run's optimizers are not those of these",
            received=f"{kinds[0]}, now {kinds[1]}",
            fix="set fit.warm_start.moments=reset",
        )
    if optimizer.schedule.kind != "constant" or optimizer.warmup_steps is not None:
        raise ConfigError(
            "a schedule of the learning rate would begin at the earlier run's end",
            received=f"optimizer.schedule = {optimizer.schedule.kind}, "
            f"optimizer.warmup_steps = {optimizer.warmup_steps}",
            fix="set fit.warm_start.moments=reset",
        )


def _check_order(config: ModelConfig, target: WarmTarget, source: _EarlierRun) -> None:
    """Refuses features in another order: networks join vectors, and numbers, in that of features.

    Weights would have the shapes of the earlier ones, and meet other inputs.
    """
    model, kernels = target.model, (v for n in target.model.networks for v in n.weights.values())
    if all(len(weight.shape) < 2 for weight in kernels):
        return
    models = (config, target.data.manifest), (source.config.model, source.version.manifest)
    for key, roles in _ORDERS.items():
        if not all(hasattr(one, key) for one, _ in models):
            continue
        orders = []
        for one, manifest in models:
            named = getattr(one, key)
            of_role = (spec.name for spec in manifest.schema.by_role(*roles))
            orders.append(tuple(of_role if named is None else named))
        common = set(model.inputs).intersection(*orders)
        vectors = common & set(model.embedded_features)
        for names in (vectors, common - vectors):
            here, there = ([name for name in order if name in names] for order in orders)
            if here != there:
                raise ConfigError(
                    "the networks of the earlier run read the same features in another order",
                    received=f"{', '.join(here)}; there {', '.join(there)}",
                    fix=f"name them in model.{key} in the order of the earlier run",
                )


def _open_source(path: str, tolerates: ToleratesShard) -> _EarlierRun:
    """Opens the checkpoint that a path stands for: itself, or a run's best or last one."""
    directory = resolve_checkpoint(path)
    layout = read_checkpoint(directory).layout
    reference = RunReference.read(find_run_of(directory))
    version = read_encoded_version(reference.version_dir, reference.read_manifest(tolerates))
    reader = CheckpointTensors(directory / STATE_PREFIX)
    shapes = reader.get_variable_to_shape_map()
    return _EarlierRun(directory, layout, version, reference.config, reader, shapes)


def _match_tables(
    model: Model,
    versions: tuple[EncodedVersion, EncodedVersion],
    names: Sequence[str],
    source: _EarlierRun,
    fresh: dict[str, str],
    match: MatchTokens,
) -> tuple[dict[str, np.ndarray], dict[KeySpace, MatchedKeys]]:
    rows: dict[str, np.ndarray] = {}
    keys: dict[KeySpace, MatchedKeys] = {}
    for name in names:
        table = model.tables[name]
        if name not in source.layout.tables:
            fresh[name] = "the earlier model has no such table"
            continue
        before = list(source.shapes[source.layout.tables[name]])
        if before[1] != table.dim:
            fresh[name] = f"shape {before} there, {[table.vocabulary_size, table.dim]} here"
        elif isinstance(table, DynamicTable) != (name in source.layout.keys):
            fresh[name] = "it is dynamic in one of the two models alone"
        elif isinstance(table, DynamicTable):
            earlier = source.read_keys(name)
            matched = match_dynamic_table(model, table, earlier, versions)
            if isinstance(matched, str):
                fresh[name] = matched
            else:
                rows[name], keys[table.keys] = matched.rows, matched
        else:
            found = match_rows(model.id_spaces[name], *versions, match)
            here = [table.vocabulary_size, table.dim]
            if found is None or found.max(initial=0) >= before[0] or len(found) != here[0]:
                fresh[name] = f"its ids are made in another way; shape {before} there, {here} here"
            else:
                rows[name] = found
    return rows, keys


def _match_dense(
    state: TrainingState, names: Sequence[str], source: _EarlierRun, fresh: dict[str, str]
) -> list[str]:
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


def _hold_weights(
    target: WarmTarget,
    layout: CheckpointLayout,
    came: tuple[Mapping[str, np.ndarray], Sequence[str]],
    moments: Sequence[str],
) -> None:
    """Lets FTRL keep the rows and dense weights that came over without its sums."""
    rows, dense = came
    for number, name in enumerate(layout.trained_tables):
        if name in rows and f"{_ROW_STATE}slots/linear/{number}" not in moments:
            known = np.flatnonzero(rows[name] != NO_ROW)
            target.optimizers.hold_rows(name, target.model.tables[name], known)
    linears = f"{OPTIMIZERS}/dense/_linears/"
    kept = [n for n, name in enumerate(layout.dense) if name in dense]
    target.optimizers.hold_weights([n for n in kept if f"{linears}{n}" not in moments])


def _set_rows(variable: TableRows, before: np.ndarray, rows: np.ndarray) -> None:
    """Sets the rows of known tokens; the others keep their first values."""
    values = variable.numpy().copy()
    if isinstance(variable, ShardedRows):
        rows = rows[variable.owners.list_rows(len(rows))]
    known = rows != NO_ROW
    values[known] = before[rows[known]]
    if isinstance(variable, ShardedRows):
        variable.assign_own(values)
    else:
        variable.assign(values)


@dataclass(frozen=True)
class MatchedKeys:
    """Keys and rows of an earlier table that a dynamic table continues."""

    keys: np.ndarray  # int64 `[n]`, in the order of the earlier table
    rows: np.ndarray  # int64 `[2 + n]`, row of the earlier table for each row of the new one
    # What the rules of a table know of its keys, as it is saved; of one without rules empty.
    history: Mapping[str, np.ndarray] = field(default_factory=dict)


def match_dynamic_table(
    model: Model,
    table: DynamicTable,
    tensors: Mapping[str, np.ndarray],
    versions: tuple[EncodedVersion, EncodedVersion],
) -> MatchedKeys | str:
    """Returns what a dynamic table continues of an earlier one, or why it can continue nothing.

    `tensors` are those of the earlier table's keys, as it saved them; `versions` the dataset
    version to train on, and that of the earlier run.
    """
    feature = next(
        name
        for name, other in model.embedded_features.items()
        if isinstance(other, DynamicTable) and other.keys is table.keys
    )
    earlier = tensors[SAVED_KEYS]
    matched = match_keys(feature, earlier, *versions)
    if matched is None:
        return f"its keys are made in another way: those of feature {feature!r}"
    kept = np.flatnonzero(earlier != PAD_ID if matched is earlier else matched != NO_ROW)
    if table.keys.max_rows is not None and len(kept) > table.keys.max_rows:
        return f"{len(kept):,} keys there, and max_rows is {table.keys.max_rows:,}"
    rows = np.concatenate([np.arange(FIRST_ROW), kept + FIRST_ROW])
    if COUNTERS not in tensors or not table.keys.is_ruled:
        return MatchedKeys(matched[kept], rows)
    history = {name: tensors[name][kept] for name in (COUNTS, TIMES, STEPS) if name in tensors}
    waiting = tensors[WAITING_KEYS]
    asked = waiting[:, 0]
    keys = match_keys(feature, asked, *versions)
    if keys is not None and keys is not asked:
        waiting = np.column_stack([keys, waiting[:, 1:]])[keys != NO_ROW]
    history |= {WAITING_KEYS: waiting, COUNTERS: tensors[COUNTERS]}
    return MatchedKeys(matched[kept], rows, history)


def set_keys(model: Model, space: KeySpace, found: MatchedKeys) -> None:
    """Gives keys rows with first values, in all tables and optimizer state that have the keys."""
    keys = found.keys
    space.set_keys(keys, found.history)
    for matrix in space.matrices:
        matrix.assign(np.full((len(keys) + FIRST_ROW, matrix.dim), matrix.fill, np.float32))
    for table in model.tables.values():
        if isinstance(table, DynamicTable) and table.keys is space:
            padding = np.zeros((FIRST_ROW, table.dim), np.float32)
            table.rows.assign(np.concatenate([padding, table.draw_rows(keys)]))


def read_table_files(model: Model, paths: Mapping[str, str]) -> dict[str, KeyedRows]:
    """Reads rows for tables of a model, of a file each; nothing is set."""
    files = {}
    for name, path in paths.items():
        if name not in model.tables:
            problem = "fit.warm_start.tables names a table that the model does not have"
            raise unknown_name(problem, name, sorted(model.tables))
        files[name] = load_table(local_path(path), model.tables[name].dim)
        _check_ids(name, model.tables[name], path, files[name][0])
    for space, keys in _join_keys(model, files).items():
        if space.max_rows is not None and len(keys) > space.max_rows:
            raise ConfigError(
                f"the files of fit.warm_start.tables hold more keys than table {space.label}",
                received=f"{len(keys):,} keys",
                allowed=f"max_rows = {space.max_rows:,}",
                fix=f"raise model.embeddings.{space.label}.max_rows, or shorten the file",
            )
    return files


def _check_ids(name: str, table: EmbeddingTable, path: str, keys: np.ndarray) -> None:
    stray = keys[(keys < 0) | (keys >= table.vocabulary_size)]
    if len(stray) and not isinstance(table, DynamicTable):
        raise InputDataError(
            f"{path} holds an id that the vocabulary of table {name} does not have",
            received=int(stray[0]),
            allowed=f"1 to {table.vocabulary_size - 1}",
            fix="use the file of a run on the same vocabulary, or fit.warm_start.path, which "
            "matches ids by their tokens",
        )


def _join_keys(model: Model, files: Mapping[str, KeyedRows]) -> dict[KeySpace, np.ndarray]:
    """Returns the keys that files give to each key space, in their order."""
    joined: dict[KeySpace, np.ndarray] = {}
    for name, (keys, _) in files.items():
        table = model.tables[name]
        if isinstance(table, DynamicTable):
            own = np.concatenate([joined.get(table.keys, keys[:0]), keys])
            _, first = np.unique(own, return_index=True)
            joined[table.keys] = own[np.sort(first)]
    return joined


def set_table_files(model: Model, files: Mapping[str, KeyedRows]) -> dict[str, np.ndarray]:
    """Sets tables to the rows of files, and returns by table which rows these are, int64 `[n]`.

    Of dynamic tables the keys become those of the files. Tables that share them, and have no file,
    keep the rows of these keys; their optimizer state starts anew.
    """
    places: dict[str, np.ndarray] = {}
    given: dict[str, KeyedRows] = {}
    for space, keys in _join_keys(model, files).items():
        rows = space.find_on_host(keys)
        known = rows >= FIRST_ROW
        for name, table in model.tables.items():
            if isinstance(table, DynamicTable) and table.keys is space and name not in files:
                given[name] = (keys[known], table.rows.numpy()[rows[known]])
        set_keys(model, space, MatchedKeys(keys, np.arange(FIRST_ROW + len(keys))))
    for name, (keys, rows) in {**given, **files}.items():
        places[name] = _put_rows(model.tables[name], keys, rows)
    return places


def _put_rows(table: EmbeddingTable, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sets the rows of keys that a table has; returns which rows these are."""
    places = table.keys.find_on_host(keys) if isinstance(table, DynamicTable) else keys
    values = table.rows.numpy().copy()
    values[places] = rows
    table.rows.assign(values)
    return places
