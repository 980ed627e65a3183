"""Items that a row's user has in train, or its history holds: none of them is a negative.

A row meets several of its user's other items among a thousand negatives; taught as such they would
be pushed away from the user who likes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID
from conf.training.input import InputConfig
from training.embedding.key_mapping import read_keys
from training.encoders.vocabularies import find_named_ids, is_named
from training.input.batches import Batch
from training.input.train_counts import read_train_counts, read_train_pairs
from training.reader.batch_plan import find_mixed


class RowItems(NamedTuple):
    """Rows of a batch and items of them, int64 `[n]` each; a pair may be there twice."""

    rows: tf.Tensor
    items: tf.Tensor


@dataclass(frozen=True)
class TrainRows:
    """The rows that a run trains on: a version, and how its train split is read (None: all rows).

    `batch_size` rows are ranked together: those of a step over all replicas, or of one of its parts
    where gradients are accumulated.
    """

    version_dir: ReadablePath
    manifest: Manifest
    batch_size: int
    config: InputConfig | None = None

    def count_ids(self, part: Literal["user", "item"]) -> int:
        """Returns the size of a key's vocabulary; 0: it has none."""
        spec = self.manifest.schema[self.manifest.require_key(part)]
        return int(spec.vocabulary_size or 0)

    def count_items(self, what: Literal["rows", "events"]) -> np.ndarray:
        """Reads how many rows, or events, each item has, int64 `[vocabulary_size]`."""
        counts = read_train_counts(self.version_dir, self.manifest, "item", self.config)
        return counts.place(getattr(counts, what), np.arange(self.count_ids("item")))

    @cached_property
    def parts(self) -> tuple[TrainRows, ...]:
        """These rows, and those of each dataset of `input.mix`."""
        source = self.config or InputConfig()
        mixed = find_mixed(source, self.manifest, [self.manifest.require_key("item")])
        own = source.model_copy(update={"mix": ()})
        others = [replace(self, version_dir=v, manifest=m, config=own) for v, m in mixed]
        return self, *others


@dataclass(frozen=True)
class UserItems:
    """Distinct pairs of user and item of the train split, by user."""

    users: np.ndarray  # int64 [users], ascending
    starts: np.ndarray  # int64 [users + 1], where each user's items begin
    items: np.ndarray  # int64 [pairs]


def read_user_items(
    version_dir: ReadablePath, manifest: Manifest, config: InputConfig | None = None
) -> UserItems:
    """Reads the train split through, once: the items that each user has, those of histories too."""
    return group_pairs(_read_pairs(version_dir, manifest, config))


def _read_pairs(
    version_dir: ReadablePath, manifest: Manifest, config: InputConfig | None
) -> np.ndarray:
    """Reads the pairs of known users and items, int64 `[n, 2]`; they repeat."""
    read = read_train_pairs(version_dir, manifest, config or InputConfig(), positives=False)
    pairs = [np.zeros([0, 2], np.int64), *(np.stack(part, axis=1) for part in read)]
    found = np.concatenate(pairs)
    named = find_named_ids(version_dir, manifest, manifest.require_key("user"))
    return found[is_named(found[:, 0], named)]


def group_pairs(pairs: np.ndarray) -> UserItems:
    """Groups int64 `[n, 2]` by user, each pair once; ids below the first token stand for nobody."""
    known = (pairs[:, 1] >= FIRST_TOKEN_ID) & ~np.isin(pairs[:, 0], np.arange(FIRST_TOKEN_ID))
    pairs = pairs[known]
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    is_new = np.ones(len(pairs), bool)
    is_new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    pairs = pairs[is_new]
    users, first = np.unique(pairs[:, 0], return_index=True)
    return UserItems(users, np.append(first, len(pairs)), np.ascontiguousarray(pairs[:, 1]))


class KnownItems:
    """Finds the items of a batch's rows: those of the user, of histories, and the row's own.

    `users` are the name of the user's id and what users have in train; None: there are no users.
    """

    def __init__(
        self,
        item_key: str,
        users: tuple[str, UserItems] | None,
        histories: Sequence[str],
        vocabulary_size: int,
    ) -> None:
        self._item_key, self._histories = item_key, tuple(histories)
        self._size, self._user = vocabulary_size, None if users is None else users[0]
        user = () if self._user is None else (self._user,)
        self.inputs = (item_key, *user, *self._histories)
        self.users = tf.zeros([0], tf.int64)  # Those who have items in train.
        if users is not None:
            of_users = (users[1].users, users[1].starts, users[1].items)
            self.users, self._starts, self._items = (tf.constant(n, tf.int64) for n in of_users)

    def find(self, batch: Batch) -> RowItems:
        """Returns the items of each row of a batch, which has the features `inputs`."""
        own = tf.cast(read_keys(batch, self._item_key), tf.int64)
        parts = [RowItems(tf.range(tf.size(own, tf.int64)), own)]
        parts += [_list_items(read_keys(batch, history)) for history in self._histories]
        if self._user is not None:
            parts.append(self._find_of_users(tf.cast(read_keys(batch, self._user), tf.int64)))
        return RowItems(*(tf.concat(columns, axis=0) for columns in zip(*parts, strict=True)))

    def _find_of_users(self, users: tf.Tensor) -> RowItems:
        if not int(self.users.shape[0]):
            return RowItems(users[:0], users[:0])
        found = tf.searchsorted(self.users, users, out_type=tf.int64)
        found = tf.minimum(found, tf.size(self.users, tf.int64) - 1)
        rows = tf.where(tf.gather(self.users, found) == users)[:, 0]
        found = tf.gather(found, rows)
        starts = tf.gather(self._starts, found)
        owners, places = _list_ranges(starts, tf.gather(self._starts, found + 1) - starts)
        return RowItems(tf.gather(rows, owners), tf.gather(self._items, places))

    def contains(self, known: RowItems, ids: tf.Tensor) -> tf.Tensor:
        """Returns whether items are those of their row, bool `[rows, n]` of int64 `[rows, n]`."""
        codes = tf.sort(known.rows * self._size + known.items)
        rows = tf.range(tf.shape(ids, tf.int64)[0])[:, tf.newaxis]
        asked = tf.reshape(rows * self._size + ids, [-1])
        found = tf.searchsorted(codes, asked, out_type=tf.int64)
        found = tf.minimum(found, tf.size(codes, tf.int64) - 1)
        return tf.reshape(tf.gather(codes, found) == asked, tf.shape(ids))

    def mark(self, known: RowItems, row_count: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Returns which of some items, int64 `[n]`, are among those of each row, bool `[rows, n]`.

        The work grows with the items of the rows, not with their product with the vocabulary.
        """
        distinct, place_of, counts = tf.unique_with_counts(ids, tf.int64)
        every = tf.range(tf.size(distinct, tf.int64))
        none = tf.fill([self._size], tf.constant(-1, tf.int64))
        met = tf.gather(
            tf.tensor_scatter_nd_update(none, distinct[:, tf.newaxis], every), known.items
        )
        kept = tf.where(met >= 0)[:, 0]
        met, rows = tf.gather(met, kept), tf.gather(known.rows, kept)
        # An id that stands in several columns is marked in each of them.
        starts = tf.gather(tf.cumsum(counts, exclusive=True), met)
        owners, places = _list_ranges(starts, tf.gather(counts, met))
        columns = tf.gather(tf.cast(tf.argsort(place_of), tf.int64), places)
        cells = tf.stack([tf.gather(rows, owners), columns], axis=1)
        # Sums of ones: GPUs have no kernel that sets bools.
        shape = tf.stack([tf.cast(row_count, tf.int64), tf.size(ids, tf.int64)])
        return tf.scatter_nd(cells, tf.ones_like(columns, tf.float16), shape) > 0.0


def _list_ranges(starts: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the numbers of ranges, int64 `[n]` each, one after the other, and whose each is."""
    ends = tf.cumsum(counts)
    size = tf.reduce_sum(counts) + 1
    begins = tf.scatter_nd(ends[:, tf.newaxis], tf.ones_like(ends), size[tf.newaxis])
    owners = tf.cumsum(begins)[:-1]
    return owners, tf.range(tf.size(owners, tf.int64)) + tf.gather(starts - ends + counts, owners)


def _list_items(values: tf.Tensor | tf.RaggedTensor) -> RowItems:
    """Returns the items of lists, without their padding."""
    if isinstance(values, tf.RaggedTensor):
        return RowItems(values.value_rowids(), tf.cast(values.values, tf.int64))
    cells = tf.where(tf.not_equal(values, 0))
    return RowItems(cells[:, 0], tf.cast(tf.gather_nd(values, cells), tf.int64))


def build_known_items(train: TrainRows, features: Sequence[str]) -> KnownItems:
    """Reads what `KnownItems` needs of the datasets that are trained on.

    Where there are users, a history that is none of the model's `features` is not read for this
    alone; a list of other ids than the item's is no history.
    """
    manifest = train.manifest
    item, user, histories = manifest.require_key("item"), manifest.keys.user, manifest.histories
    if user is None and not histories:
        raise ConfigError(
            "model.objective.mask = user_items needs users, or a history of the item's ids",
            received="a dataset with neither",
            fix="set model.objective.mask=target, or declare events.user or a history in the build",
        )
    users = None
    if user is not None:
        pairs = [_read_pairs(part.version_dir, part.manifest, part.config) for part in train.parts]
        users = (user, group_pairs(np.concatenate(pairs)))
        histories = tuple(name for name in histories if name in features)
    return KnownItems(item, users, histories, int(manifest.schema[item].vocabulary_size or 0))
