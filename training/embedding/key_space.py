"""Key spaces: the keys that a table, its optimizer state and its bias share their rows by."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from conf.schema import OOV_ID, PAD_ID
from conf.training.tables import DynamicTableConfig
from training.embedding.device_tier import DeviceTier
from training.embedding.key_index import FIRST_ROW, SAVED_KEYS, KeyIndex, MappedBatch
from training.embedding.key_rules import RuledIndex
from training.embedding.static_table import list_copies
from training.embedding.worker_rows import RowExchange

if TYPE_CHECKING:
    from training.embedding.dynamic_table import GrowingRows

TRIM_EVERY = 8
"""Batches between two looks at how far the steps are, which a GPU has to be waited for."""
_log = logging.getLogger("sluice.training.embedding")
_Translate = Callable[["KeySpace", tf.Tensor], tf.Tensor]
MapBatch = Callable[[np.ndarray, np.ndarray | None, bool], MappedBatch]


class KeySpace(tf.Module):
    """The keys of a dynamic table, in host memory, and how far training has come with them.

    The input maps batches ahead of the steps that train on them, so the index may know keys that
    no step has met. A step stores the rows that there are after its batch, and under rules the
    number of the batch: the moment of the index that is saved, evaluated and exported.

    `exchange` are the rows that other workers own, `tier` those that the device holds of rows in
    host memory; None: this process, or its device, holds all.
    """

    def __init__(
        self,
        name: str,
        config: DynamicTableConfig | None = None,
        *,
        seed: int = 0,
        exchange: RowExchange | None = None,
    ) -> None:
        super().__init__(name="key_space")
        config = config or DynamicTableConfig()
        self.label, self.max_rows = name, config.max_rows
        self.index: KeyIndex | RuledIndex = KeyIndex(config.max_rows)
        if config.admission or config.eviction:
            self.index = RuledIndex(name, config, seed)
        self.capacity = FIRST_ROW + min(config.capacity, config.max_rows or config.capacity)
        self.is_on_host = config.device_rows is not None and _is_whole.get()
        self.tier: DeviceTier | None = None
        if config.device_rows is not None and not self.is_on_host:
            self.tier = DeviceTier(name, config.device_rows)
        self.exchange = None if _is_whole.get() else exchange
        self._members = _Members()
        self._session = 0
        self._turn = threading.Lock()  # A session's batch is mapped whole, or no longer.
        self._is_reported = False
        self.known_rows = tf.Variable(
            FIRST_ROW, dtype=tf.int64, trainable=False, name=f"{name}/known_rows"
        )
        if self.is_ruled:
            self.known_batches = tf.Variable(
                0, dtype=tf.int64, trainable=False, name=f"{name}/known_batches"
            )

    @property
    def is_ruled(self) -> bool:
        return isinstance(self.index, RuledIndex)

    @property
    def is_in_parts(self) -> bool:
        """Whether the device holds a part of the rows."""
        return self.tier is not None or self.exchange is not None

    @property
    def row_count(self) -> int:
        """Rows that training has come to, those of padding and of unknown keys included."""
        return int(list_copies(self.known_rows)[0])

    @property
    def moment(self) -> int:
        return int(self._steps)

    @property
    def _steps(self) -> tf.Variable:
        return list_copies(self.known_batches if self.is_ruled else self.known_rows)[0]

    @property
    def matrices(self) -> list[GrowingRows]:
        return self._members.matrices

    def join(self, matrix: GrowingRows) -> None:
        self._members.matrices.append(matrix)

    def begin_batches(self, *, is_new_epoch: bool) -> MapBatch:
        """Returns the function that maps the keys of the batches to come to rows.

        What batches that no step has trained on had changed is taken back. Functions of earlier
        calls change nothing any more. It takes keys, int64 `[n]`, their times, and whether the
        batch is an epoch's last.
        """
        steps = self._steps
        with self._turn:
            self._session += 1
            session = self._session
            self.index.rewind(self.moment)
            if is_new_epoch:
                self.index.begin_epoch()

        def map_batch(keys: np.ndarray, times: np.ndarray | None, is_last: bool) -> MappedBatch:
            with self._turn:
                if session != self._session:
                    return self._find_batch(keys)
                if isinstance(self.index, RuledIndex) and self.index.moment % TRIM_EVERY == 0:
                    self.index.trim(int(steps.numpy()))
                mapped = self.index.map(keys, times, is_last=is_last)
                self._warn_if_full()
                return mapped

        return map_batch

    def find_ahead(self, keys: np.ndarray) -> MappedBatch:
        """Returns the rows of keys as the last batch that was mapped has left them."""
        with self._turn:
            return self._find_batch(keys)

    def _find_batch(self, keys: np.ndarray) -> MappedBatch:
        moment = self.index.moment
        rows = self.index.find(keys, moment)
        return MappedBatch(rows, self.index.row_count, batches=moment if self.is_ruled else 0)

    def _warn_if_full(self) -> None:
        if self.index.refused and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "dynamic table %s is full (max_rows = %s): further new keys read zeros",
                self.label,
                self.max_rows,
            )

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys, of any shape, as they are looked up here: see `translating`.

        Outside of training and of graphs, keys are looked up and never added.
        """
        return _translate.get()(self, keys)

    def find_on_host(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of keys, int64 `[n]`, as the steps so far have left them."""
        with self._turn:
            return self.index.find(keys, self.moment)

    def read_keys(self) -> np.ndarray:
        """Returns the keys of the rows that training has come to, from row 2 on; 0: no key's."""
        with self._turn:
            return self.index.read_keys(self.moment)

    def build_lookup(self) -> tf.lookup.experimental.MutableHashTable:
        """Builds a table from keys to rows that a SavedModel holds among its variables."""
        keys = self.read_keys()
        taken = np.flatnonzero(keys != PAD_ID)
        return build_lookup(keys[taken], taken + FIRST_ROW)

    def sort_keys(self) -> None:
        """Gives keys rows by ascending key, without gaps: then nothing depends on when a key came.

        Counts and times are forgotten: it is for models that are not trained any further.
        """
        keys = self.read_keys()
        taken = np.flatnonzero(keys != PAD_ID)
        order = taken[np.argsort(keys[taken])]
        rows = np.concatenate([np.arange(FIRST_ROW), order + FIRST_ROW])
        values = [matrix.numpy()[rows] for matrix in self.matrices]
        self.set_keys(keys[order])
        for matrix, sorted_rows in zip(self.matrices, values, strict=True):
            matrix.assign(sorted_rows)

    def state_tensors(self) -> dict[str, tf.Tensor]:
        """Returns the index as the steps so far have left it."""
        with self._turn:
            state = self.index.read_state(self.moment)
        return {name: tf.constant(values) for name, values in state.items()}

    def restore_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Sets the index to a saved one; the matrices are restored by themselves."""
        self._replace(lambda: self.index.set_state(tensors))

    def set_keys(self, keys: np.ndarray, history: Mapping[str, np.ndarray] | None = None) -> None:
        """Gives rows from 2 on to keys, and forgets all others: see `RuledIndex.set_keys`."""
        self._replace(lambda: self.index.set_keys(keys, history))

    def _replace(self, set_index: Callable[[], None]) -> None:
        with self._turn:
            self._session += 1
            self.leave_device()
            try:
                set_index()
            finally:
                self.known_rows.assign(self.index.row_count)
                if self.is_ruled:
                    self.known_batches.assign(self.index.moment)

    def leave_device(self) -> None:
        """Writes the rows of a tier back and empties it: rows may be set, or renumbered, then."""
        if self.tier is not None:
            for matrix in self.matrices:
                matrix.write_back()
            self.tier.forget()

    def find_problems(self, shapes: Mapping[str, list[int]]) -> list[str]:
        """Returns why tensors of these shapes cannot be restored; none: they can."""
        lacking = [f"{name} is not in it" for name in self.index.saved if name not in shapes]
        rows = next(iter(shapes.get(SAVED_KEYS, [])), 0)
        if self.max_rows is not None and rows > self.max_rows:
            lacking.append(f"{rows:,} rows, and max_rows is {self.max_rows:,}")
        return lacking

    @property
    def matrix_bytes(self) -> int:
        """Memory that one device's copies of the matrices take, and host memory beyond."""
        tier_bytes = 0 if self.tier is None else self.tier.bytes
        return tier_bytes + sum(matrix.bytes for matrix in self.matrices)

    def describe(self) -> dict[str, int]:
        with self._turn:
            described, own = self.index.describe(self.moment), self.index.bytes
        described = {**described, "bytes": own + self.matrix_bytes}
        if self.exchange is not None:
            return {**described, **self.exchange.describe()}
        if self.tier is None:
            return described
        device_bytes = sum(matrix.device_bytes for matrix in self.matrices)
        return {**described, "device_bytes": device_bytes, **self.tier.describe()}

    def render(self) -> list[str]:
        """Returns what is worth saying of an epoch: counts, and keys of a list that nobody met."""
        lines, described = [], self.describe()
        if self.is_ruled or self.is_in_parts or self.index.refused:
            counts = ", ".join(f"{name} {value:,}" for name, value in described.items())
            lines.append(f"table {self.label}, this epoch: {counts}")
        if isinstance(self.index, RuledIndex) and self.exchange is None:
            with self._turn:
                lines += self.index.render_unmet(self.moment)
        return lines


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


_is_whole: ContextVar[bool] = ContextVar("holds_whole_tables", default=False)
_translate: ContextVar[_Translate] = ContextVar("translate_keys", default=_find_on_host)


@contextmanager
def holding_whole_tables() -> Iterator[None]:
    """Has tables of two tiers built in one, in host memory: for models that are not trained."""
    token = _is_whole.set(True)
    try:
        yield
    finally:
        _is_whole.reset(token)


@contextmanager
def translating(translate: _Translate) -> Iterator[None]:
    """Has keys looked up in the block by a function of key space and keys to rows."""
    token = _translate.set(translate)
    try:
        yield
    finally:
        _translate.reset(token)
