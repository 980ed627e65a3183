"""Rows of a dynamic table in two tiers: as many as the device is given, all others in host memory.

    input   rows of the batch -> places on the device; which rows come to them, and which leave
    step    rows that leave are written to host memory, rows that come are read from there,
            and only then the lookups; meanwhile those are read that come with the next step

Steps run in the order in which the input has planned them. So a row that leaves with one step and
comes back with a later one has been written by then, however far the input is ahead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from conf.errors import ConfigError
from etl.tfrecord.codec.kernels import inlined, kernel
from training.embedding.key_index import FIRST_ROW, NO_KEYS, MappedBatch

NO_ROW = -1
_MIN_ROWS = 1 << 10
PLACE, COMES, LEAVES, IS_READ = 0, 1, 2, 3
"""Columns of swaps: a place, the row that comes to it, the one that leaves it or -1, and whether
host memory has values of the one that comes; a new row has none yet."""

NO_SWAPS = np.empty((0, 4), np.int64)


class PlacedBatch(NamedTuple):
    """Where the rows of a batch are on the device: `rows`' and new rows' places, int64 `[n]`.

    Attributes:
        swaps: What changes places before the step, int64 `[swaps, 4]`.
        distinct: Distinct rows of the batch.
        own: Rows that this process brings to the exchange between workers, int64 `[block]`.
        is_own: Which of the new rows this process owns, bool `[all new]`; None: it owns all.
    """

    places: np.ndarray
    new_places: np.ndarray
    swaps: np.ndarray = NO_SWAPS
    distinct: int = 0
    own: np.ndarray = NO_KEYS
    is_own: np.ndarray | None = None


PlaceBatch = Callable[[MappedBatch, bool], PlacedBatch]
"""Function of where the keys of a batch are, and whether a step trains on it."""


class DevicePlaces:
    """Which row each of `count` places is given, the least recently used one first.

    Places 0 and 1 are those of padding and of unknown keys, as their rows are; -1: no row.
    """

    def __init__(self, count: int) -> None:
        self._count, self._batches = count, 0
        self._place_of = np.zeros(_MIN_ROWS, np.int32)  # by row; 0: none
        self._used = np.zeros(count + FIRST_ROW, np.int64)  # batch that used a place last
        # A ring through place 0: behind it the most recent place, before it the least recent one.
        self._links = np.zeros((count + FIRST_ROW, 2), np.int32)
        self.rows = np.empty(0, np.int64)
        self.set_to(np.array([*range(FIRST_ROW), *[NO_ROW] * count], np.int64))

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in (self._place_of, self._used, self._links, self.rows))

    def set_to(self, rows: np.ndarray) -> None:
        """Sets the row of each place; empty places are given out first."""
        self.rows = rows.copy()
        self._place_of[:] = 0
        self._reserve(int(rows.max()) + 1)
        places = np.arange(FIRST_ROW, len(rows))
        taken = places[rows[places] != NO_ROW]
        self._place_of[rows[taken]] = taken
        ring = np.concatenate([[0], taken, places[rows[places] == NO_ROW]])
        self._links[ring, _BEHIND] = np.roll(ring, -1)
        self._links[ring, _BEFORE] = np.roll(ring, 1)

    def place(self, rows: np.ndarray, new: np.ndarray) -> PlacedBatch | int:
        """Gives each row of a batch a place; returns how many it takes if they do not fit.

        `new` are those that host memory has no values of, each once.
        """
        self._reserve(int(rows.max(initial=0)) + 1)
        self._batches += 1
        missing, places = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        state = (self.rows, self._place_of, self._used, self._links)
        distinct, count = _touch(rows, self._batches, missing, *state)
        missing = missing[:count]
        if distinct > self._count:
            self._place_of[missing] = 0
            return distinct
        swaps = np.empty((count, 4), np.int64)
        _place(rows, places, self._batches, missing, swaps, *state)
        swaps[:, IS_READ] = ~np.isin(missing, new, assume_unique=True)
        return PlacedBatch(places, self._place_of[new].astype(np.int64), swaps, distinct)

    def _reserve(self, count: int) -> None:
        if count > len(self._place_of):
            size = max(count, len(self._place_of) * 3 // 2)
            grown = np.zeros(size, np.int32)
            grown[: len(self._place_of)] = self._place_of
            self._place_of = grown


_BEFORE, _BEHIND = 0, 1


@inlined
def _bring_forward(links, place):  # type: ignore[no-untyped-def]
    before, behind = links[place, _BEFORE], links[place, _BEHIND]
    links[before, _BEHIND], links[behind, _BEFORE] = behind, before
    first = links[0, _BEHIND]
    links[place, _BEFORE], links[place, _BEHIND] = 0, first
    links[first, _BEFORE], links[0, _BEHIND] = place, place


@kernel
def _touch(rows, batch, missing, at, place_of, used, links):  # type: ignore[no-untyped-def]
    """Uses the places of rows that have one, and lists the others. Returns distinct, missing."""
    distinct = count = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < FIRST_ROW:
            continue
        place = place_of[row]
        if place == 0:
            place_of[row] = -1
            missing[count] = row
            count += 1
            distinct += 1
        elif place > 0 and used[place] != batch:
            used[place] = batch
            _bring_forward(links, place)
            distinct += 1
    return distinct, count


@kernel
def _place(  # type: ignore[no-untyped-def]
    rows, places, batch, missing, swaps, at, place_of, used, links
):
    """Gives missing rows the least recent places, and looks the places of all rows up."""
    for i in range(len(missing)):
        place = links[0, _BEFORE]
        gone = at[place]
        if gone != NO_ROW:
            place_of[gone] = 0
        swaps[i, PLACE], swaps[i, COMES], swaps[i, LEAVES] = place, missing[i], gone
        at[place], place_of[missing[i]], used[place] = missing[i], place, batch
        _bring_forward(links, place)
    for i in range(len(rows)):
        places[i] = rows[i] if rows[i] < FIRST_ROW else place_of[rows[i]]


class HostRows:
    """A matrix `[rows, dim]` in host memory that grows by half, to `most` rows, where it lies."""

    def __init__(self, rows: int, dim: int, fill: float, most: int | None = None) -> None:
        self._most = most
        self.values = np.full((rows, dim), fill, np.float32)

    def reserve(self, count: int) -> None:
        """Gives memory to more rows; those to come hold any numbers."""
        if count > len(self.values):
            ahead = len(self.values) * 3 // 2
            size = max(count, ahead if self._most is None else min(ahead, self._most))
            # Nothing else refers to the memory: what is handed out are copies.
            self.values.resize((size, self.values.shape[1]), refcheck=False)


class DeviceTier:
    """The rows of a key space that are on the device, and the host memory of all of its matrices.

    Attributes:
        held: Row at each place after the last step, int64 `[2 + device_rows]`; -1: none.
        swaps: Steps that have swapped rows so far, one after the other.
        hits: Distinct rows of the batches of this epoch that were on the device.
        reads: Those that were read from host memory.
    """

    def __init__(self, table: str, device_rows: int) -> None:
        self.table, self.device_rows = table, device_rows
        self._places = DevicePlaces(device_rows)
        self.held = self._places.rows.copy()
        self.swaps = self.hits = self.reads = 0
        self._matrices: list[HostRows] = []
        # The input plans while a step exchanges rows; replicas exchange them one after the other.
        self._turn, self._exchange_turn, self._session = threading.Lock(), threading.Lock(), 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"rows of {table}")
        self._planned = deque[np.ndarray]()  # Swaps of the steps to come.
        self._ahead: tuple[np.ndarray, Future[list[np.ndarray]]] | None = None

    @property
    def bytes(self) -> int:
        return self._places.bytes + self.held.nbytes

    def add(self, matrix: HostRows) -> None:
        """Adds a matrix; `exchange` takes and returns them in the order of these calls."""
        self._matrices.append(matrix)

    def forget(self) -> None:
        """Leaves all places empty: host memory alone has the rows."""
        with self._turn:
            self._session += 1
            self._planned.clear()
            self.wait()
            self._ahead = None
            self.held[FIRST_ROW:] = NO_ROW

    def begin_batches(self, *, is_new_epoch: bool) -> PlaceBatch:
        """Returns the function that gives the rows of the batches to come places on the device.

        What was planned for batches that no step has trained on is forgotten, and functions of
        earlier calls plan nothing any more.
        """
        with self._turn:
            self._session += 1
            session = self._session
            self._planned.clear()
            if not np.array_equal(self._places.rows, self.held):
                self._places.set_to(self.held)
            if is_new_epoch:
                self.hits = self.reads = 0

        def place(found: MappedBatch, is_trained: bool) -> PlacedBatch:
            rows = found.rows
            with self._turn:
                if session != self._session or not is_trained:
                    return PlacedBatch(np.minimum(rows, FIRST_ROW - 1), NO_KEYS)
                placed = self._places.place(rows, found.new_rows)
                if isinstance(placed, PlacedBatch):
                    self._planned.append(placed.swaps)
                    return placed
            raise ConfigError(
                f"model.embeddings.{self.table}.device_rows is too small for one batch",
                received=f"{self.device_rows:,}, and a batch of {len(rows):,} keys has "
                f"{placed:,} rows",
                allowed=f"{placed:,} or more; {len(rows):,} are enough for all such batches",
                fix="raise device_rows, or lower input.batch_size",
            )

        return place

    def exchange(
        self, replica: int, count: int, distinct: int, swaps: np.ndarray, *leaving: np.ndarray
    ) -> list[np.ndarray]:
        """Takes the rows that leave their places and returns those that come, in a step.

        `leaving` and what is returned are float32 `[swaps, dim]` per matrix, any numbers for new
        rows. The first replica's are taken, as all are equal. `count` rows there are after the
        batch, and `distinct` in it.
        """
        with self._exchange_turn:
            come = _list_read(swaps)
            if replica != 0:
                return self._read(come)
            coming = self._finish_read(come)
            gone = swaps[:, LEAVES] != NO_ROW
            for matrix, rows in zip(self._matrices, leaving, strict=True):
                matrix.reserve(count)
                matrix.values[swaps[gone, LEAVES]] = rows[gone]
            self.held[swaps[:, PLACE]] = swaps[:, COMES]
            self.swaps += 1
            self.hits += int(distinct) - len(swaps)
            self.reads += int(swaps[:, IS_READ].sum())
            self._begin_read()
            return coming

    def wait(self) -> None:
        """Waits until no thread reads host memory, which may move where it grows."""
        if self._ahead is not None:
            self._ahead[1].exception()

    def _read(self, come: np.ndarray) -> list[np.ndarray]:
        return [matrix.values.take(come, axis=0) for matrix in self._matrices]

    def _begin_read(self) -> None:
        """Reads the rows of the next step: they are not on the device, so nothing writes them."""
        if self._planned:
            self._planned.popleft()
        if self._planned:
            come = _list_read(self._planned[0])
            self._ahead = come, self._reader.submit(self._read, come)

    def _finish_read(self, come: np.ndarray) -> list[np.ndarray]:
        self.wait()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and np.array_equal(ahead[0], come):
            return ahead[1].result()
        return self._read(come)

    def describe(self) -> dict[str, int]:
        return {"device_hits": self.hits, "swapped": self.reads}


def _list_read(swaps: np.ndarray) -> np.ndarray:
    """The rows that come; for those that are new any row."""
    return np.where(swaps[:, IS_READ] != 0, swaps[:, COMES], FIRST_ROW - 1)
