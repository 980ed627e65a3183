"""What the tables of a new model continue: keys and rows of an earlier run, or of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from conf.errors import ConfigError, InputDataError
from conf.local_paths import local_path
from conf.schema import PAD_ID
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_index import FIRST_ROW, SAVED_KEYS
from training.embedding.key_rules import COUNTERS, COUNTS, STEPS, TIMES, WAITING_KEYS
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable
from training.embedding.table_files import TableRows, load_table
from training.encoders.vocabularies import NO_ROW, EncodedVersion, match_keys
from training.models.model import Model, unknown_name


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


def read_table_files(model: Model, paths: Mapping[str, str]) -> dict[str, TableRows]:
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


def _join_keys(model: Model, files: Mapping[str, TableRows]) -> dict[KeySpace, np.ndarray]:
    """Returns the keys that files give to each key space, in their order."""
    joined: dict[KeySpace, np.ndarray] = {}
    for name, (keys, _) in files.items():
        table = model.tables[name]
        if isinstance(table, DynamicTable):
            own = np.concatenate([joined.get(table.keys, keys[:0]), keys])
            _, first = np.unique(own, return_index=True)
            joined[table.keys] = own[np.sort(first)]
    return joined


def set_table_files(model: Model, files: Mapping[str, TableRows]) -> dict[str, np.ndarray]:
    """Sets tables to the rows of files, and returns by table which rows these are, int64 `[n]`.

    Of dynamic tables the keys become those of the files. Tables that share them, and have no file,
    keep the rows of these keys; their optimizer state starts anew.
    """
    places: dict[str, np.ndarray] = {}
    given: dict[str, TableRows] = {}
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
