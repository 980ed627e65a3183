"""Rows that lists of items are made for: of a split, of users as of a split, or of a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.key_lists import describe_unmatched
from conf.splits import TEST, TRAIN, USERS
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import (
    Vocabulary,
    find_named_ids,
    is_named,
    read_key_vocabulary,
)
from training.evaluation.item_index import ItemIds, read_cells
from training.evaluation.metrics import MISSING, IntArray, Pairs
from training.evaluation.protocols import carries_seen, require_rows
from training.evaluation.users_as_of import (
    UserRows,
    count_rows,
    find_user_rows,
    read_user_rows,
)
from training.input.batches import Batch, build_eval_dataset, read_batches
from training.models.ranking import RankingModel
from training.prediction.candidates import find_tokens
from training.prediction.rankers import ListRows, Ranker
from training.prediction.scores import read_encoders, read_file_rows
from training.raw_inputs.files import RawFile, find_key_input, read_key_rows
from training.reader.feature_columns import ROLE_OF_SPLIT

_log = logging.getLogger("sluice.training.predict")


@dataclass(frozen=True)
class ListSource:
    """Which rows get lists; one of `split`, `as_of` and `file`, or none.

    Attributes:
        split: Those of a split.
        as_of: Every user as things stood at the end of this split of events.
        file: Those of a file of raw values.
        users: The users of a file alone; its column of their raw ids is read.
    """

    split: str | None = None
    as_of: str | None = None
    file: RawFile | None = None
    users: RawFile | None = None

    def resolve(self, trained: TrainedModel) -> ListSource:
        """Returns the source with what is not named filled in."""
        if self.split or self.as_of or self.file:
            return self
        if self.users is not None:
            return replace(self, as_of=TEST)
        return replace(self, split=choose_split(trained))


def choose_split(trained: TrainedModel) -> str:
    """Returns the split whose rows get lists where none is named.

    That is `test` where a ranking model is given candidates there, else `users` where the dataset
    has users and their records hold all that the model reads of a row, else `test`.
    """
    manifest, model = trained.manifest, trained.model
    has_users = manifest.keys.user is not None and manifest.has_split(USERS)
    if not isinstance(model, RankingModel):
        return USERS if has_users else TEST
    roles = {manifest.schema[name].role for name in model.inputs} - {"item"}
    if manifest.keys.candidates is not None or roles - {"user"} or not has_users:
        return TEST
    return USERS


def carries_candidates(trained: TrainedModel, split: str) -> bool:
    """Whether the rows of a split hold the items to rank."""
    name = trained.manifest.keys.candidates
    if name is None or split in ROLE_OF_SPLIT or split == TRAIN:
        return False
    statistics = trained.manifest.statistics.get(split, {}).get(name, {})
    return bool(statistics.get("values") != 0)  # Not known: as the keys say.


def check_mask(
    trained: TrainedModel, source: ListSource, mask_seen: bool, *, has_pool: bool
) -> bool:
    """Returns whether seen items can be left out as they shall be.

    Raises:
        ConfigError: The dataset, or the split, does not carry them.
    """
    manifest, split = trained.manifest, source.split or USERS
    has_own = source.as_of is None and not has_pool and carries_candidates(trained, split)
    if not mask_seen or has_own or source.file is not None:
        return False
    if manifest.keys.user is None:
        _log.warning(
            "the rows of dataset %r belong to no user: no item is left out as seen",
            manifest.dataset_name,
        )
        return False
    if not carries_seen(manifest, split):
        is_built = manifest.keys.seen is not None
        raise ConfigError(
            "items that users have met cannot be left out: "
            + (f"split {split} does not carry them" if is_built else "this dataset does not carry "
               "them"),
            received="predict.mask_seen=true",
            fix=("choose another split" if is_built else "build it with `seen: true`, import it "
                 "with `keys.seen`")
            + ", or pass --set predict.mask_seen=false",
        )  # fmt: skip
    return True


def read_lists(
    trained: TrainedModel, ranker: Ranker, source: ListSource, mask_seen: bool, *, has_pool: bool
) -> Iterator[ListRows]:
    """Yields the rows that get lists, in the order of the shards or of the file.

    Args:
        trained: The model and its data set.
        ranker: What ranks.
        source: Where the rows are from.
        mask_seen: Whether to read the seen items, which the records must carry.
        has_pool: Whether all rows have the same candidates, whatever their own.

    Raises:
        ConfigError: The records do not hold what the model reads, or the dataset has no users.
        InputDataError: A split is missing or empty, a record is damaged, or a row is refused.
    """
    if source.file is not None:
        yield from _read_file_lists(trained, ranker, source.file)
    elif source.as_of is not None:
        yield from _read_user_lists(trained, ranker, source, mask_seen)
    else:
        yield from _read_split_lists(trained, ranker, source.split or TEST, mask_seen, has_pool)


def _read_split_lists(
    trained: TrainedModel, ranker: Ranker, split: str, mask_seen: bool, has_pool: bool
) -> Iterator[ListRows]:
    manifest, version_dir = trained.manifest, trained.version_dir
    _check_split(trained, ranker, split)
    keys = manifest.keys
    ragged = [keys.seen] if mask_seen and keys.seen else []
    own = []
    if keys.candidates is not None and carries_candidates(trained, split) and not has_pool:
        ragged, own = [keys.candidates], [manifest.require_key("item")]
    user = [] if keys.user is None else [keys.user]
    names = tuple(dict.fromkeys((*user, *ranker.inputs, *own, *ragged)))
    batch_size = trained.config.evaluation.batch_size
    dataset = build_eval_dataset(version_dir, manifest, split, batch_size, names, tuple(ragged))
    vocabulary = read_key_vocabulary(version_dir, manifest, keys.user) if keys.user else None
    first = 1
    for batch in read_batches(dataset, version_dir, manifest, split):
        rows = _name_rows(batch, keys.user, vocabulary, first)
        if keys.user is not None and split != USERS:
            rows = replace(rows, numbers=pa.array(np.arange(first, first + len(rows))))
        first += len(rows)
        if own:
            yield replace(rows, candidates=_join_cells(batch, own[0], ragged[0], ranker.items))
        else:
            yield _mask(rows, ragged, ranker.items)


def _read_user_lists(
    trained: TrainedModel, ranker: Ranker, source: ListSource, mask_seen: bool
) -> Iterator[ListRows]:
    manifest, version_dir = trained.manifest, trained.version_dir
    user, batch_size = manifest.require_key("user"), trained.config.evaluation.batch_size
    vocabulary = read_key_vocabulary(version_dir, manifest, user)
    ragged = [manifest.keys.seen] if mask_seen and manifest.keys.seen else []
    names = tuple(dict.fromkeys((user, *ranker.inputs, *ragged)))
    parts = find_user_rows(version_dir, manifest, source.as_of or TEST, batch_size)
    if source.users is not None:
        parts = _choose_users(parts, *_read_users(trained, source.users), source.users)
    for part in parts:
        if len(part.rows):
            _check_split(trained, ranker, part.split)
            for batch in read_user_rows(version_dir, manifest, part, names, ragged, batch_size):
                yield _mask(_name_rows(batch, user, vocabulary, 1), ragged, ranker.items)


def _read_users(trained: TrainedModel, file: RawFile) -> tuple[list[Any], IntArray]:
    """Returns the keys of the users of a file, and their ids: `MISSING` of keys that name none."""
    user = trained.manifest.require_key("user")
    encoders = read_encoders(trained, (user,))
    key, keys, parts = find_key_input(encoders.inputs, user), [], []
    for found, rows in read_key_rows(file, [key], key, trained.config.evaluation.batch_size):
        keys += found
        parts.append(encoders.encode({key.name: tf.constant(rows.inputs[key.name])})[user])
    ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
    named = is_named(ids, find_named_ids(trained.version_dir, trained.manifest, user))
    return keys, np.where(named, ids, MISSING)


def _choose_users(
    parts: Sequence[UserRows], keys: Sequence[Any], only: IntArray, file: RawFile
) -> tuple[UserRows, ...]:
    there = np.concatenate([part.users for part in parts])
    if unmatched := [keys[row] for row in np.flatnonzero(~np.isin(only, there)).tolist()]:
        said = describe_unmatched(file.path, len(keys), unmatched)
        if len(unmatched) == len(keys):
            raise InputDataError(
                f"no user of {file.path} is in the dataset",
                received=said,
                fix="check the raw values of the user's column, or give rows by --input",
            )
        _log.warning("%s, among the users: they are left out", said)
    keep = [np.isin(part.users, only) for part in parts]
    return tuple(
        UserRows(part.split, part.rows[kept], part.users[kept])
        for part, kept in zip(parts, keep, strict=True)
    )


def _mask(rows: ListRows, seen: Sequence[str], items: ItemIds) -> ListRows:
    return replace(rows, seen=read_cells(rows.features[seen[0]], items)) if seen else rows


def _name_rows(
    batch: Batch, user: str | None, vocabulary: Vocabulary | None, first: int
) -> ListRows:
    if user is not None:
        names = find_tokens(np.asarray(batch[user], np.int64), vocabulary)
        return ListRows("user", names, None, batch)
    numbers = np.arange(first, first + count_rows(batch))
    return ListRows("row", pa.array(numbers), None, batch)


def _check_split(trained: TrainedModel, ranker: Ranker, split: str) -> None:
    manifest = trained.manifest
    if split != USERS:
        require_rows(manifest, split)
        return
    others = [name for name in ranker.inputs if manifest.schema[name].role != "user"]
    if others:
        raise ConfigError(
            f"split {split!r} holds one record per user, and the model reads more of a row",
            received=", ".join(f"{name} (role {manifest.schema[name].role})" for name in others),
            fix="choose a split of events by --split, or give rows by --input",
        )


def _join_cells(batch: Batch, item: str, candidates: str, items: ItemIds) -> Pairs:
    """Returns each row's candidates and its own item, each once, as far as they are known."""
    given = read_cells(batch[candidates], items)
    own = items.columns_of(np.asarray(batch[item], np.int64))
    known = np.flatnonzero(own != MISSING)
    rows = np.concatenate((given.rows, known))
    columns = np.concatenate((given.columns, own[known]))
    codes = np.unique(rows * np.int64(len(items)) + columns)
    return Pairs(*np.divmod(codes, len(items)))


def _read_file_lists(trained: TrainedModel, ranker: Ranker, file: RawFile) -> Iterator[ListRows]:
    """Yields the rows of a file that get lists; it holds the raw inputs of a row, not of items."""
    key = "row" if file.id_column is None else "id"
    for rows in read_file_rows(trained, file, ranker.inputs):
        yield ListRows(key, rows.ids, None, rows.features)
