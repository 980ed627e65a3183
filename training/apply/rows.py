"""Reads rows that are asked for: of a dataset, of an export's users, or of a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from training.encoders.vocabularies import (
    Vocabulary,
    find_named_ids,
    is_named,
    read_key_vocabulary,
    read_plan,
)
from training.evaluation.item_index import (
    ItemIds,
    find_cells,
    order_by_id,
    read_cells,
    read_item_features,
)
from training.evaluation.metrics import MISSING, IntArray, Pairs
from training.evaluation.protocols import carries_seen, require_rows
from training.evaluation.users_as_of import (
    UserRows,
    count_rows,
    find_user_rows,
    read_user_rows,
)
from training.export.serving_encoders import ServingEncoders, build_serving_encoders
from training.export.source_facts import read_source_facts
from training.input.batches import Batch, build_eval_dataset, read_batches
from training.raw_inputs.converter import to_dense
from training.raw_inputs.files import RawFile, find_key_input, read_key_rows, regroup
from training.raw_inputs.inputs import InputColumn, SourceNames
from training.reader.feature_columns import ROLE_OF_SPLIT
from training.reader.training_data import TrainingData

_log = logging.getLogger("sluice.training.predict")


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
        self._vocabulary: Vocabulary | None = None
        if self._user is not None:
            self._vocabulary = read_key_vocabulary(*self._where, self._user)

    def read(self, source: Source) -> Iterator[Rows]:
        """Yields the rows of a split, or of users as of one, in the order of the shards."""
        if source.as_of is None:
            yield from self._read_split(source.split or TEST)
            return
        seen = self._find_seen(USERS)
        parts = find_user_rows(*self._where, source.as_of, self._batch_size)
        if source.users is not None:
            parts = self._choose_users(parts, source.users)
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
        dataset = build_eval_dataset(*self._where, split, self._batch_size, names, tuple(ragged))
        first = 1
        for batch in read_batches(dataset, *self._where, split):
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
        keys = self._manifest.keys
        is_asked = self._answers.give is Give.LISTS and not self._answers.has_pool
        if not (is_asked and keys.candidates and carries_candidates(self._manifest, split)):
            return []
        return [self._manifest.require_key("item"), keys.candidates]

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
            names = pa.array(ids) if self._vocabulary is None else self._vocabulary.take(ids)
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

    def _choose_users(self, parts: Sequence[UserRows], file: RawFile) -> tuple[UserRows, ...]:
        user = self._manifest.require_key("user")
        encoders = read_encoders(TrainingData(*self._where), (user,))
        key, keys, found = find_key_input(encoders.inputs, user), [], []
        for given, rows in read_key_rows(file, [key], key, self._batch_size):
            keys += given
            found.append(encoders.encode({key.name: tf.constant(rows.inputs[key.name])})[user])
        ids = np.concatenate([np.asarray(part, np.int64) for part in found])
        only = np.where(is_named(ids, find_named_ids(*self._where, user)), ids, MISSING)
        there = np.concatenate([part.users for part in parts])
        unmatched = [keys[row] for row in np.flatnonzero(~np.isin(only, there)).tolist()]
        _report_unmatched(file, "user", len(keys), unmatched)
        kept = [np.isin(part.users, only) for part in parts]
        return tuple(
            UserRows(part.split, part.rows[own], part.users[own])
            for part, own in zip(parts, kept, strict=True)
        )


def choose_split(export: Export, manifest: Manifest) -> str:
    """Returns the split whose rows get lists by default: `users`, or `test`."""
    has_users = manifest.keys.user is not None and manifest.has_split(USERS)
    if not export.is_ranking or not has_users:
        return USERS if has_users else TEST
    if not export.has_items:
        return TEST
    read = find_row_inputs(export, Give.LISTS, is_encoded=True)
    roles = {manifest.schema[item["feature"]].role for item in read}
    return TEST if manifest.keys.candidates is not None or roles - {"user"} else USERS


def carries_candidates(manifest: Manifest, split: str) -> bool:
    """Whether the records of a split bring candidates: those of some splits, or none, may not."""
    name = manifest.keys.candidates
    if name is None or split in ROLE_OF_SPLIT or split == TRAIN:
        return False
    statistics = manifest.statistics.get(split, {}).get(name, {})
    return bool(statistics.get("values") != 0)  # Not known: as the keys say.


def _join_cells(batch: Batch, item: str, candidates: str, items: ItemIds) -> Pairs:
    """Returns each row's candidates and its own item, each once, as far as they are known."""
    given = read_cells(batch[candidates], items)
    own = items.columns_of(np.asarray(batch[item], np.int64))
    known = np.flatnonzero(own != MISSING)
    rows = np.concatenate((given.rows, known))
    columns = np.concatenate((given.columns, own[known]))
    return Pairs(*np.divmod(np.unique(rows * np.int64(len(items)) + columns), len(items)))


def to_array(values: Any) -> np.ndarray:
    """Returns features of a batch as signatures take them, lists padded with 0."""
    return np.asarray(values.to_tensor() if isinstance(values, tf.RaggedTensor) else values)


def choose_items(
    export: Export, file: RawFile | None = None, data: TrainingData | None = None
) -> Items:
    """Returns what is ranked: the catalogue, or the items of a file.

    A file names items of the catalogue by their keys. One that holds all inputs of an item too
    describes items, which the catalogue need not have; those of a ranking model are encoded by the
    dataset's encoders.
    """
    catalogue, about = export.items, export.card["lists"]["item"]
    is_computed = data is not None and _is_computed(data)
    if data is not None and is_computed and export.is_ranking:
        catalogue = _add_features(export, catalogue, data)
    if file is None:
        return catalogue
    if about is None:
        raise ConfigError("keys of a file stand in one column, and the item's is made of several")
    key, of_items = InputColumn.from_json(about), find_item_inputs(export)
    encoders, described = None, None
    if data is not None and (export.is_ranking or is_computed):
        names = (key.feature, *(item["feature"] for item in of_items if export.is_ranking))
        encoders = read_encoders(data, tuple(dict.fromkeys(names)))
    if not export.is_ranking:
        described = [InputColumn.from_json(item) for item in of_items]
    elif encoders is not None:
        described = list(encoders.inputs)
    if described is not None and _is_described(file, described, key):
        return _read_described(export, catalogue, RawKeys(file, key, encoders), described)
    return _read_known(catalogue, RawKeys(file, key, encoders if is_computed else None))


@dataclass(frozen=True)
class RawKeys:
    """A file whose rows are named by a key; `encoders` make ids of keys that nobody knows."""

    file: RawFile
    key: InputColumn
    encoders: ServingEncoders | None

    def find_ids(self, raw: Arrays, catalogue: Items) -> IntArray:
        """Returns the ids of keys, `MISSING` where the catalogue does not have one."""
        given = raw[self.key.name]
        if self.encoders is not None:
            encoded = self.encoders.encode({self.key.name: tf.constant(given)}, (self.key.feature,))
            ids = np.asarray(encoded[self.key.feature], np.int64)
            return np.where(catalogue.columns_of(ids) == MISSING, MISSING, ids)
        positions = pc.index_in(pa.array(given).cast(catalogue.keys.type), catalogue.keys)
        found = positions.fill_null(MISSING).to_numpy()
        return np.where(found == MISSING, MISSING, catalogue.ids[found])


def _read_known(catalogue: Items, named: RawKeys) -> Items:
    keys: list[Any] = []
    ids = [np.zeros(0, np.int64)]
    for part, rows in read_key_rows(named.file, [named.key], named.key, 1 << 16):
        keys += part
        ids.append(named.find_ids(rows.inputs, catalogue))
    known = np.concatenate(ids)
    unmatched = [keys[row] for row in np.flatnonzero(known == MISSING).tolist()]
    _report_unmatched(named.file, "item", len(keys), unmatched)
    return catalogue.take(catalogue.columns_of(np.unique(known[known != MISSING])))


def _read_described(
    export: Export, catalogue: Items, named: RawKeys, inputs: Sequence[InputColumn]
) -> Items:
    keys, ids, vectors, features = [], [], [], []
    names = {item.name for item in inputs}
    read = [*inputs, *([] if named.key.name in names else [named.key])]
    for part, rows in read_key_rows(named.file, read, named.key, export.batch_size):
        keys += part
        ids.append(named.find_ids(rows.inputs, catalogue))
        if export.is_ranking and named.encoders is not None:
            raw = {name: tf.constant(values) for name, values in rows.inputs.items()}
            features.append(_name_features(export, named.encoders.encode(raw)))
            vectors.append(np.zeros((len(part), 0), np.float32))
        else:
            vectors.append(Ranker(export).embed(RowInputs(rows.inputs), Give.ITEM_EMBEDDING))
    found = np.concatenate(ids)
    # Items that the catalogue does not have get ids of their own, from -1 down.
    unknown = found == MISSING
    found = np.where(unknown, -np.cumsum(unknown, dtype=np.int64), found)
    order = np.argsort(found, kind="stable")
    index = order_by_id(found, np.concatenate(vectors))
    arrays = {n: _join([one[n] for one in features])[order] for n in (features or [{}])[0]}
    tokens = pa.array(keys).take(pa.array(order))
    return Items(index.ids, index.vectors, tokens, arrays or None)


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates rows; lists are padded to the longest with 0, as encoded lists are."""
    if parts[0].ndim < 2:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts])


def find_item_inputs(export: Export) -> list[Mapping[str, Any]]:
    """Returns the inputs of an item: raw ones of a retrieval model, of a ranking one encoded."""
    if not export.is_ranking:
        return list(export.find_inputs(Give.ITEM_EMBEDDING))
    of_rows = {item["name"] for item in find_row_inputs(export, Give.LISTS, is_encoded=True)}
    read = find_row_inputs(export, Give.SCORES, is_encoded=True)
    return [item for item in read if item["name"] not in of_rows]


def _name_features(export: Export, features: Mapping[str, Any]) -> Arrays:
    return {i["name"]: to_array(features[i["feature"]]) for i in find_item_inputs(export)}


def _add_features(export: Export, catalogue: Items, data: TrainingData) -> Items:
    """Returns the catalogue with its features, where its keys are not what the graph takes."""
    key = data.manifest.require_key("item")
    names = dict.fromkeys((key, *(item["feature"] for item in find_item_inputs(export))))
    where = (data.version_dir, data.manifest)
    _, columns = read_item_features(*where, tuple(names), export.batch_size)
    return replace(catalogue, features=_name_features(export, columns))


def _is_computed(data: TrainingData) -> bool:
    """Whether the items' ids are computed of keys: lists name items by their ids then."""
    plan, key = read_plan(data.version_dir, data.manifest), data.manifest.require_key("item")
    return plan.column(key).operation is not None


def _is_described(file: RawFile, inputs: Sequence[InputColumn], key: InputColumn) -> bool:
    """Whether a file holds inputs that are not made of the key's own column."""
    sources = SourceNames(tuple(inputs)).sources
    names = {item.name for item in inputs if item.column != key.column}
    others = names | {sources[name] for name in names & sources.keys()}
    return bool(others & set(file.find_columns()))


def read_encoders(data: TrainingData, names: tuple[str, ...]) -> ServingEncoders:
    """Reads the encoders of some features of a dataset version."""
    plan, facts = read_plan(data.version_dir, data.manifest), read_source_facts(data.manifest)
    return build_serving_encoders(data.version_dir, plan, names, facts)


def _report_unmatched(file: RawFile, what: str, given: int, unmatched: Sequence[Any]) -> None:
    """Warns of keys that name nothing: they are left out; refuses a file of such keys alone."""
    if not unmatched:
        return
    said = describe_unmatched(file.path, given, unmatched)
    if len(unmatched) == given:
        raise InputDataError(f"no {what} of {file.path} is known", received=said,
                             fix="check the raw values of the key's column")  # fmt: skip
    _log.warning("%s, among the %ss: they are left out", said, what)
