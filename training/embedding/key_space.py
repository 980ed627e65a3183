"""Key spaces: the keys that a table, its optimizer state and its bias share their rows by."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import tensorflow as tf

from conf.schema import OOV_ID, PAD_ID
from training.embedding.growing_rows import GrowingRows, list_copies
from training.embedding.key_index import FIRST_ROW, KeyIndex
from training.embedding.key_rules import MappedBatch
from training.embedding.placement.device_tier import DeviceTier
from training.embedding.placement.row_exchange import RowExchange

SAVED_KEYS = "by_row"
_log = logging.getLogger("sluice.training.embedding")
_Translate = Callable[["KeySpace", tf.Tensor], tf.Tensor]
MapBatch = Callable[[np.ndarray, np.ndarray | None, bool], MappedBatch]


class KeySpace(tf.Module):
    """The keys of a dynamic table, in host memory, and how many of them training has come to.

    The input maps batches ahead of the steps that train on them, so the index may know keys that
    no step has met. What steps have met is `row_count`, and a prefix of the index: that much is
    saved, evaluated and exported.

    Args:
        name: Name of the table.
        max_rows: Keys that get a row, at most; None: no limit.
        capacity: Rows that memory is reserved for from the start.
        device_rows: Rows that the device holds of those in host memory; None: it holds all.
        exchange: The rows that other workers own; None: this process holds all.

    Attributes:
        refused: Lookups of keys that got no row, as the table was full, since `begin`.
        tier: The rows that the device holds of those in host memory; None: it holds all.
    """

    def __init__(
        self,
        name: str,
        *,
        max_rows: int | None = None,
        capacity: int = 1,
        device_rows: int | None = None,
        exchange: RowExchange | None = None,
    ) -> None:
        super().__init__(name="key_space")
        self.label, self.max_rows = name, max_rows
        self.index = KeyIndex(max_rows)
        self.capacity = FIRST_ROW + (capacity if max_rows is None else min(capacity, max_rows))
        self.refused = 0
        self.is_on_host = device_rows is not None and _is_whole.get()
        self.tier: DeviceTier | None = None
        if device_rows is not None and not self.is_on_host:
            self.tier = DeviceTier(name, device_rows)
        self.exchange = None if _is_whole.get() else exchange
        self._members = _Members()
        self._session = 0
        self._turn = threading.Lock()  # A session's batch is mapped whole, or no longer.
        self._is_reported = False
        self.known_rows = tf.Variable(
            FIRST_ROW, dtype=tf.int64, trainable=False, name=f"{name}/known_rows"
        )

    @property
    def may_refuse(self) -> bool:
        """Whether a key that training meets may have no row."""
        return self.max_rows is not None

    @property
    def sets_all_rows(self) -> bool:
        """Whether a new key's row may hold another one's numbers, also in optimizer state."""
        return self.tier is not None

    @property
    def is_in_parts(self) -> bool:
        """Whether the device holds a part of the rows."""
        return self.tier is not None or self.exchange is not None

    @property
    def row_count(self) -> int:
        """Rows that training has come to, those of padding and of unknown keys included."""
        return int(list_copies(self.known_rows)[0])

    @property
    def matrices(self) -> list[GrowingRows]:
        """The matrices that have a row for each key."""
        return self._members.matrices

    def join(self, matrix: GrowingRows) -> None:
        """Lets a matrix grow with the keys."""
        self._members.matrices.append(matrix)

    def read_keys(self) -> np.ndarray:
        """Returns the keys of the rows that training has come to, from row 2 on."""
        return self.index.read_keys(FIRST_ROW, self.row_count)

    def begin(self) -> Callable[[np.ndarray], tuple[np.ndarray, int]]:
        """Returns the function that maps the keys of the batches to come to rows.

        Keys that no step has met are forgotten: batches that were mapped ahead, and never trained
        on, number nothing. Functions of earlier calls give no key a row any more.

        Returns:
            Function of keys, int64 `[n]`, to their rows, int64 `[n]`, and the rows there are then.
        """
        with self._turn:
            self._session += 1
            self.refused = 0
            self.index.truncate(self.row_count)
            session = self._session

        def map_keys(keys: np.ndarray) -> tuple[np.ndarray, int]:
            with self._turn:
                if session != self._session:
                    return self.index.find(keys), len(self.index)
                rows, refused = self.index.map(keys)
                self.refused += refused
                self._warn_if_full()
                return rows, len(self.index)

        return map_keys

    def begin_batches(self, *, is_new_epoch: bool) -> MapBatch:
        """As `begin`, for keys of any table.

        Args:
            is_new_epoch: Whether what happens is counted from nothing.

        Returns:
            Function of keys, int64 `[n]`, their times, and whether the batch is an epoch's last.
        """
        map_to_rows = self.begin()
        known = len(self.index)

        def map_batch(keys: np.ndarray, times: np.ndarray | None, is_last: bool) -> MappedBatch:
            nonlocal known
            rows, count = map_to_rows(keys)
            new, known = np.arange(known, count), count
            new_keys = self.index.read_keys(count - len(new), count)
            return MappedBatch(rows, count, new_keys, new, 0)

        return map_batch

    def find_ahead(self, keys: np.ndarray) -> MappedBatch:
        """Returns the rows of keys as the last batch that was mapped has left them."""
        none = np.empty(0, np.int64)
        return MappedBatch(self.index.find(keys), len(self.index), none, none, 0)

    def _warn_if_full(self) -> None:
        if self.refused and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "dynamic table %s is full (max_rows = %d): further new keys read zeros",
                self.label,
                self.max_rows,
            )

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys as they are looked up here: see `translating`.

        Outside of training and of graphs, keys are looked up and never added.

        Args:
            keys: Integers of any shape.

        Returns:
            Rows, int64 of the same shape; 1 for unknown keys.
        """
        return _translate.get()(self, keys)

    def find_on_host(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of keys, int64 `[n]`, as the steps so far have left them."""
        rows = self.index.find(keys)
        # The input may be ahead: a row that no step has come to holds nothing yet.
        return np.where(rows < self.row_count, rows, OOV_ID)

    def build_lookup(self) -> tf.lookup.experimental.MutableHashTable:
        """Builds a table from keys to rows that a SavedModel holds among its variables."""
        keys = self.read_keys()
        taken = np.flatnonzero(keys != PAD_ID)
        return build_lookup(keys[taken], taken + FIRST_ROW)

    def sort_keys(self) -> None:
        """Gives keys rows by ascending key, without gaps: then nothing depends on when a key came.

        Their counts and times are forgotten: it is for models that are not trained any further.
        """
        keys = self.read_keys()
        taken = np.flatnonzero(keys != PAD_ID)
        order = taken[np.argsort(keys[taken])]
        rows = np.concatenate([np.arange(FIRST_ROW), order + FIRST_ROW])
        values = [matrix.numpy()[rows] for matrix in self.matrices]
        self.set_keys(keys[order])
        for matrix, sorted_rows in zip(self.matrices, values, strict=True):
            matrix.assign(sorted_rows)

    @property
    def matrix_bytes(self) -> int:
        """Memory that one device's copies of the matrices take, and host memory beyond."""
        tier_bytes = 0 if self.tier is None else self.tier.bytes
        return tier_bytes + sum(matrix.bytes for matrix in self.matrices)

    def describe(self) -> dict[str, int]:
        """Returns how many keys have a row, what the table takes, and what a tier has done."""
        return {
            "keys": self.row_count - FIRST_ROW,
            "bytes": self.index.bytes + self.matrix_bytes,
            **self.describe_parts(),
        }

    def describe_parts(self) -> dict[str, int]:
        """Returns what is here, and how often a batch found it here; {}: all is."""
        if self.exchange is not None:
            return self.exchange.describe()
        if self.tier is None:
            return {}
        device_bytes = sum(matrix.device_bytes for matrix in self.matrices)
        return {"device_bytes": device_bytes, **self.tier.describe()}

    def render(self) -> list[str]:
        """Returns what is worth saying of an epoch: that the table is full, or in parts."""
        lines = self.render_parts()
        if self.refused:
            lines.append(
                f"table {self.label} is full: {self.refused:,} lookups of keys without a row read "
                f"zeros (model.embeddings.{self.label}.max_rows = {self.max_rows:,})"
            )
        return lines

    def render_parts(self) -> list[str]:
        """Returns `describe_parts` in words."""
        if self.exchange is not None:
            return self.exchange.render(self.label)
        return [] if self.tier is None else self.tier.render()

    def state_tensors(self) -> dict[str, tf.Tensor]:
        """Returns the keys that training has met."""
        return {SAVED_KEYS: tf.constant(self.read_keys())}

    def restore_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Sets the keys to saved ones; the matrices are restored by themselves.

        Raises:
            ValueError: A key occurs twice, or there are more than `max_rows`.
        """
        self.set_keys(tensors[SAVED_KEYS])

    def set_keys(self, keys: np.ndarray) -> None:
        """Gives rows from 2 on to keys, and forgets all others.

        Raises:
            ValueError: As for `KeyIndex.set_keys`.
        """
        with self._turn:
            self._session += 1
            self.leave_device()
            self.known_rows.assign(FIRST_ROW)
            self.index.set_keys(keys)
            self.known_rows.assign(len(self.index))

    def leave_device(self) -> None:
        """Writes the rows of a tier back and empties it: rows may be set, or renumbered, then."""
        if self.tier is not None:
            for matrix in self.matrices:
                matrix.write_back()
            self.tier.forget()

    def find_problems(self, found: Mapping[str, tuple[str, list[int]]]) -> list[str]:
        """Returns why saved tensors cannot be restored; none: they can.

        Args:
            found: Type and shape of each tensor, by the names of `state_tensors`.
        """
        if SAVED_KEYS not in found:
            return [f"{SAVED_KEYS} is not in it"]
        dtype, shape = found[SAVED_KEYS]
        if dtype != "int64" or len(shape) != 1:
            return [f"{SAVED_KEYS} is {dtype} {shape}, not int64 [None]"]
        if self.max_rows is not None and shape[0] > self.max_rows:
            return [f"{shape[0]:,} keys, and max_rows is {self.max_rows:,}"]
        return []


def build_lookup(keys: np.ndarray, rows: np.ndarray) -> tf.lookup.experimental.MutableHashTable:
    """Builds a table from keys to rows; padding has row 0, and unknown keys row 1."""
    lookup = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, OOV_ID)
    lookup.insert(tf.constant([PAD_ID], tf.int64), tf.constant([PAD_ID], tf.int64))
    lookup.insert(tf.constant(keys), tf.constant(rows))
    return lookup


class _Members:
    """Hides matrices from what looks for variables: they are found where they belong."""

    def __init__(self) -> None:
        self.matrices: list[GrowingRows] = []


def _find_on_host(space: KeySpace, keys: tf.Tensor) -> tf.Tensor:
    values = np.asarray(keys)
    return tf.constant(space.find_on_host(values.ravel()).reshape(values.shape))


def _are_rows(space: KeySpace, keys: tf.Tensor) -> tf.Tensor:
    return keys


_is_whole: ContextVar[bool] = ContextVar("holds_whole_tables", default=False)


@contextmanager
def holding_whole_tables() -> Iterator[None]:
    """Has tables of two tiers built in one, in host memory: for models that are not trained."""
    token = _is_whole.set(True)
    try:
        yield
    finally:
        _is_whole.reset(token)


_translate: ContextVar[_Translate] = ContextVar("translate_keys", default=_find_on_host)


@contextmanager
def translating(translate: _Translate) -> Iterator[None]:
    """Has keys looked up in another way in the block.

    Args:
        translate: Function of key space and keys to rows.
    """
    token = _translate.set(translate)
    try:
        yield
    finally:
        _translate.reset(token)


@contextmanager
def reading_rows() -> Iterator[None]:
    """Takes what is looked up in the block for rows: the batches of training hold them.

    Of a table in two tiers they are places on the device.
    """
    with translating(_are_rows):
        yield


def is_reading_rows() -> bool:
    """Whether this is in a block of `reading_rows`."""
    return _translate.get() is _are_rows
