"""Reads rows that are asked for, of a dataset, an export's users or a file, and what is ranked."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from conf.artefacts.export import (
    FEATURE_PREFIX,
    KEY,
    ROW_FEATURES,
    SEEN,
    USERS_FILE,
    VECTOR,
    Give,
)
from conf.errors import ConfigError, InputDataError
from conf.key_lists import describe_unmatched
from conf.manifest import Manifest
from conf.splits import TEST, TRAIN, USERS
from conf.storage.table_files import open_parquet
from training.apply.answers import Answers, Rows, Source, find_row_inputs
from training.apply.export import Arrays, Export, Items
from training.apply.ranker import Ranker, RowInputs
from training.encoders.serving import TENSOR_DTYPES, ServingEncoders, read_serving_encoders
from training.encoders.vocabularies import find_named_ids, is_named, read_key_vocabulary
from training.evaluation.item_index import MISSING, ItemIds, Pairs, find_cells, read_cells
from training.evaluation.metrics import IntArray
from training.evaluation.protocols import carries_seen, find_candidates, require_rows
from training.evaluation.users import (
    UserRows,
    count_rows,
    find_user_rows,
    read_user_rows,
)
from training.input.batches import Batch, read_split
from training.raw_inputs.converter import to_dense
from training.raw_inputs.files import RawFile, find_key_input, read_key_rows, regroup
from training.raw_inputs.inputs import InputColumn, SourceNames
from training.reader.feature_columns import ROLE_OF_SPLIT
from training.reader.training_data import TrainingData

_log = logging.getLogger("sluice.training.predict")


def to_array(values: Any) -> np.ndarray:
    """Returns features of a batch as signatures take them, lists padded with 0."""
    return np.asarray(values.to_tensor() if isinstance(values, tf.RaggedTensor) else values)


def read_file(
    export: Export, answers: Answers, file: RawFile, items: Items | None
) -> Iterator[Rows]:
    """Yields the rows of a file, of raw values."""
    inputs = [InputColumn.from_json(item) for item in find_row_inputs(export, answers.give)]
    key = name_file_rows(file.id_column, answers.give)
    for rows in file.read(inputs, export.batch_size):
        yield Rows(key, rows.ids, encode_rows(export, rows.inputs, items), rows.first)


def name_file_rows(id_column: str | None, give: Give) -> str:
    """Returns the name of the column that names rows of a file."""
    if id_column is None:
        return "row"
    return "id" if give is Give.LISTS else id_column


def encode_rows(export: Export, raw: Arrays, items: Items | None) -> RowInputs:
    """Returns rows of raw values, encoded where the items beside them are."""
    if items is None or items.features is None:
        return RowInputs(raw)
    return RowInputs(export.call(ROW_FEATURES, raw), is_encoded=True)


def read_users(
    export: Export, answers: Answers, items: Items | None, part: slice | None = None
) -> Iterator[Rows]:
    """Yields the users of an export, or the rows `part` of them, with what they have met."""
    inputs = find_users_inputs(export, answers)
    part = part or slice(0, export.card["users"]["rows"])
    first = part.start + 1
    for batch in regroup(_slice_users(export, part), export.batch_size):
        arrays = {
            item["name"]: to_dense(batch.column(f"{FEATURE_PREFIX}{item['feature']}"))
            for item in inputs
        }
        seen = None
        if answers.mask_seen and items is not None:
            met = batch.column(SEEN)
            lengths = pc.list_value_length(met).to_numpy(zero_copy_only=False)
            seen = find_cells(lengths, met.flatten().to_numpy(zero_copy_only=False), items)
        yield Rows("user", batch.column(KEY), RowInputs(arrays, is_encoded=True), first, seen)
        first += batch.num_rows


def find_users_inputs(export: Export, answers: Answers) -> list[Mapping[str, Any]]:
    """Returns what is read of an export's users; refuses what it does not know of them."""
    inputs = find_row_inputs(export, answers.give, is_encoded=True)
    users = export.card["users"]
    names = [item["feature"] for item in inputs]
    unknown = names if users is None else [name for name in names if name not in users["features"]]
    if users is None or unknown:
        raise ConfigError("the model reads more than the export knows of users",
                          received=", ".join(unknown), fix="give rows by --input")  # fmt: skip
    if answers.mask_seen and not users["has_seen"]:
        raise ConfigError("items that users have met cannot be left out: the export lacks them",
                          fix="build with `seen: true`, or pass --keep-seen")  # fmt: skip
    return inputs


def _slice_users(export: Export, part: slice) -> Iterator[pa.RecordBatch]:
    """Yields some rows; only row groups that hold them are read."""
    with open_parquet(export.path / USERS_FILE) as file:
        begin = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            low, high = max(part.start, begin), min(part.stop, begin + count)
            if low < high:
                yield from file.read_row_group(group).slice(low - begin, high - low).to_batches()
            begin += count


class DatasetRows:
    """Rows of the dataset that a run was trained on."""

    def __init__(
        self, export: Export, data: TrainingData, answers: Answers, items: Items | None
    ) -> None:
        self._where, self._manifest = (data.version_dir, data.manifest), data.manifest
        self._answers, self._items, self._batch_size = answers, items, export.batch_size
        self._inputs = find_row_inputs(export, answers.give, is_encoded=True)
        self._user = data.manifest.keys.user if answers.give is Give.LISTS else None
        self._vocabulary = self._user and read_key_vocabulary(*self._where, self._user)

    def read(self, source: Source) -> Iterator[Rows]:
        """Yields the rows of a split, or of users as of one, in the order of the shards."""
        if source.as_of is None:
            yield from self._read_split(source.split or TEST)
            return
        seen = self._find_seen(USERS)
        parts = find_user_rows(*self._where, source.as_of, self._batch_size)
        if source.users is not None:
            parts = tuple(self._choose_users(parts, source.users))
        names = self._list_features([self._manifest.require_key("user"), *seen])
        for part in parts:
            if len(part.rows):
                self._check_split(part.split)
                batches = read_user_rows(*self._where, part, names, seen, self._batch_size)
                for batch in batches:
                    yield self._name(batch, 1, seen)

    def _read_split(self, split: str) -> Iterator[Rows]:
        self._check_split(split)
        own = self._find_own(split)
        ragged = own[1:] or self._find_seen(split)
        names = self._list_features([*([self._user] if self._user else []), *own, *ragged])
        first = 1
        for batch in read_split(*self._where, split, self._batch_size, names, ragged):
            rows = self._name(batch, first, [] if own else ragged)
            numbers = pa.array(np.arange(first, first + len(rows.names)))
            if self._user is not None and split != USERS:
                rows = replace(rows, numbers=numbers)
            if own and self._items is not None:
                rows = replace(rows, candidates=_join_cells(batch, own[0], own[1], self._items))
            yield rows
            first += len(numbers)

    def _list_features(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*keys, *(item["feature"] for item in self._inputs))))

    def _find_own(self, split: str) -> list[str]:
        """Returns the features of a row's own item and its candidates, where these are ranked."""
        name = find_candidates(self._manifest, split)
        is_asked = self._answers.give is Give.LISTS and not self._answers.has_pool
        if name is None or not is_asked or split == TRAIN or split in ROLE_OF_SPLIT:
            return []
        return [self._manifest.require_key("item"), name]

    def _find_seen(self, split: str) -> list[str]:
        """Returns the feature of what rows have met; none where it is not left out."""
        if not self._answers.mask_seen:
            return []
        keys = self._manifest.keys
        if keys.user is None:
            _log.warning("the rows of dataset %r belong to no user: no item is left out as seen",
                         self._manifest.dataset_name)  # fmt: skip
            return []
        if keys.seen is None or not carries_seen(self._manifest, split):
            raise ConfigError(
                f"items that users have met cannot be left out: split {split} does not carry them",
                fix="choose another split, build with `seen: true` (import with `keys.seen`), or "
                "pass --keep-seen",
            )
        return [keys.seen]

    def _name(self, batch: Batch, first: int, seen: Sequence[str]) -> Rows:
        arrays = {item["name"]: to_array(batch[item["feature"]]) for item in self._inputs}
        numbers, key = np.arange(first, first + count_rows(batch)), "row"
        names = pa.array(numbers)
        if self._user is not None:
            ids, key = np.asarray(batch[self._user], np.int64), "user"
            names = self._vocabulary.take(ids) if self._vocabulary else pa.array(ids)
        met = read_cells(batch[seen[0]], self._items) if seen and self._items is not None else None
        return Rows(key, names, RowInputs(arrays, is_encoded=True), first, met)

    def _check_split(self, split: str) -> None:
        if split != USERS:
            require_rows(self._manifest, split)
            return
        schema = self._manifest.schema
        read = [item["feature"] for item in self._inputs]
        if others := [name for name in read if schema[name].role != "user"]:
            raise ConfigError(
                f"split {split!r} holds one record per user, and the model reads more of a row",
                received=", ".join(f"{name} (role {schema[name].role})" for name in others),
                fix="choose a split of events by --split, or give rows by --input",
            )

    def _choose_users(self, parts: Sequence[UserRows], file: RawFile) -> Iterator[UserRows]:
        user = self._manifest.require_key("user")
        encoders = read_serving_encoders(*self._where, (user,))
        key = find_key_input(encoders.inputs, user)
        keys = [one for part, _ in read_key_rows(file, [key], key, 1 << 16) for one in part]
        ids = _encode_keys(encoders, key, keys)
        known = np.isin(ids, np.concatenate([part.users for part in parts]))
        known &= is_named(ids, find_named_ids(*self._where, user))
        _report_unmatched(file, "user", keys, known)
        for part in parts:
            own = np.isin(part.users, ids[known])
            yield UserRows(part.split, part.rows[own], part.users[own])


def choose_split(export: Export, manifest: Manifest) -> str:
    """Returns the split whose rows get lists by default: `users`, or `test`."""
    if manifest.keys.user is None or not manifest.has_split(USERS):
        return TEST
    if not export.is_ranking:
        return USERS
    read = find_row_inputs(export, Give.LISTS, is_encoded=True)
    roles = {manifest.schema[item["feature"]].role for item in read}
    return TEST if manifest.keys.candidates is not None or roles - {"user"} else USERS


def _join_cells(batch: Batch, item: str, candidates: str, items: ItemIds) -> Pairs:
    """Returns each row's candidates and its own item, each once, as far as they are known."""
    given = read_cells(batch[candidates], items)
    own = items.columns_of(np.asarray(batch[item], np.int64))
    known = np.flatnonzero(own != MISSING)
    rows = np.concatenate((given.rows, known))
    columns = np.concatenate((given.columns, own[known]))
    return Pairs(*np.divmod(np.unique(rows * np.int64(len(items)) + columns), len(items)))


def choose_items(
    export: Export, file: RawFile | None = None, data: TrainingData | None = None
) -> Items:
    """Returns what is ranked: the catalogue, or the items of a file.

    A file names items of the catalogue by their keys. One that holds all inputs of an item too
    describes items, which the catalogue need not have; those of a ranking model are encoded by the
    dataset's encoders.
    """
    catalogue, about = export.items, export.card["lists"]["item"]
    if file is None:
        return catalogue
    if about is None:
        raise ConfigError("keys of a file stand in one column, and the item's is made of several")
    key, of_items, encoders = InputColumn.from_json(about), find_item_inputs(export), None
    if data is not None:
        names = (key.feature, *(item["feature"] for item in of_items if export.is_ranking))
        encoders = read_serving_encoders(data.version_dir, data.manifest, dict.fromkeys(names))
    inputs: Sequence[InputColumn] = encoders.inputs if encoders is not None else ()
    if not export.is_ranking:
        inputs = [InputColumn.from_json(item) for item in of_items]
    inputs = inputs if _is_described(file, inputs, key) else ()
    read = {item.name: item for item in (key, *inputs)}
    keys: list[Any] = []
    described: list[Arrays] = []
    for part, rows in read_key_rows(file, list(read.values()), key, export.batch_size):
        keys += part
        if inputs:
            described.append(_describe(export, encoders, rows.inputs))
    columns = _find_columns(catalogue, key, keys, encoders)
    known = columns != MISSING
    if not inputs:
        _report_unmatched(file, "item", keys, known)
        kept = np.unique(columns[known])
        tokens = catalogue.keys.take(pa.array(kept))
        return Items(catalogue.ids[kept], catalogue.vectors[kept], tokens)
    # Items that the catalogue does not have get ids of their own, from -1 down.
    ids = np.where(known, catalogue.ids[columns], -np.cumsum(~known))
    order = np.argsort(ids, kind="stable")
    arrays = {name: _join([one[name] for one in described])[order] for name in described[0]}
    vectors = np.zeros((len(ids), 0), np.float32) if export.is_ranking else arrays.pop(VECTOR)
    return Items(ids[order], vectors, pa.array(keys).take(pa.array(order)), arrays or None)


def find_item_inputs(export: Export) -> list[Mapping[str, Any]]:
    """Returns the inputs of an item: raw ones of a retrieval model, of a ranking one encoded."""
    if not export.is_ranking:
        return list(export.find_inputs(Give.ITEM_EMBEDDING))
    of_rows = {item["name"] for item in find_row_inputs(export, Give.LISTS, is_encoded=True)}
    read = find_row_inputs(export, Give.SCORES, is_encoded=True)
    return [item for item in read if item["name"] not in of_rows]


def _is_described(file: RawFile, inputs: Sequence[InputColumn], key: InputColumn) -> bool:
    """Whether a file holds inputs that are not made of the key's own column."""
    sources = SourceNames(tuple(inputs)).sources
    names = {item.name for item in inputs if item.column != key.column}
    others = names | {sources[name] for name in names & sources.keys()}
    return bool(others & set(file.find_columns()))


def _describe(export: Export, encoders: ServingEncoders | None, raw: Arrays) -> Arrays:
    """Returns the vectors of items, or of a ranking model their encoded features."""
    if encoders is None or not export.is_ranking:
        return {VECTOR: Ranker(export).embed(RowInputs(raw), Give.ITEM_EMBEDDING)}
    encoded = encoders.encode({name: tf.constant(values) for name, values in raw.items()})
    return {i["name"]: to_array(encoded[i["feature"]]) for i in find_item_inputs(export)}


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates rows; lists are padded to the longest with 0, as encoded lists are."""
    if parts[0].ndim < 2:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts])


def _find_columns(
    catalogue: Items, key: InputColumn, keys: Sequence[Any], encoders: ServingEncoders | None
) -> IntArray:
    """Returns the positions of raw keys, `MISSING` where the catalogue does not have one."""
    if encoders is not None:
        return catalogue.columns_of(_encode_keys(encoders, key, keys))
    texts = pa.array(map(str, keys), pa.string())
    found = pc.index_in(texts, catalogue.keys.cast(pa.string()))
    return np.asarray(found.fill_null(MISSING).to_numpy(), np.int64)


def _encode_keys(encoders: ServingEncoders, key: InputColumn, keys: Sequence[Any]) -> IntArray:
    raw = {key.name: tf.constant(keys, TENSOR_DTYPES[key.dtype])}
    return np.asarray(encoders.encode(raw, (key.feature,))[key.feature], np.int64)


def _report_unmatched(file: RawFile, what: str, keys: Sequence[Any], known: np.ndarray) -> None:
    """Warns of keys that name nothing: they are left out; refuses a file of such keys alone."""
    unmatched = [keys[row] for row in np.flatnonzero(~known).tolist()]
    if not unmatched:
        return
    said = describe_unmatched(file.path, len(keys), unmatched)
    if not known.any():
        raise InputDataError(f"no {what} of {file.path} is known", received=said,
                             fix="check the raw values of the key's column")  # fmt: skip
    _log.warning("%s, among the %ss: they are left out", said, what)
