"""One pool that threads are filling: rows are written once, into their places."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pyarrow as pa

from etl.tfrecord.decode_rows import RowWriter, join_steps, list_lengths
from etl.tfrecord.memory import allocate
from training.input.columns import Column
from training.input.epoch_plan import PoolPlan, Segment
from training.input.pool_config import LENGTH, PoolConfig
from training.input.rows import Rows
from training.input.values import check_binary, fill_absent


class PoolFill:
    """A pool that is being filled.

    Args:
        plan: The pool.
        places: Place of each of its records, int64 `[rows]`; those below 0 are left out.
        config: What pools are made of.

    Attributes:
        places: As given.
        waiting: Segments that no thread reads at the moment; None lets a thread go.
        is_over: Whether all is read, or reading was given up.
    """

    def __init__(self, plan: PoolPlan, places: np.ndarray, config: PoolConfig) -> None:
        self.places = places
        self.waiting: queue.SimpleQueue[Segment | None] = queue.SimpleQueue()
        self.is_over = False
        self._config, self._left = config, len(plan.segments)
        self._rows = int((places >= 0).sum())
        self._lock = threading.Lock()
        self._kept = np.zeros(self._rows, bool)
        shapes = {
            column.name: (_shape(self._rows, column), column.numpy_dtype)
            for column in config.columns
            if column.is_dense
        }
        if config.has_lengths:
            shapes[LENGTH] = (self._rows,), np.dtype(np.int64)
        self._dense = allocate(shapes)
        pads = [column.pad for column in config.columns if column.is_dense]
        pads += [0] * config.has_lengths
        self._writer = RowWriter(list(self._dense.values()), pads)  # type: ignore[arg-type]
        self._pieces: list[tuple[np.ndarray, pa.RecordBatch]] = []

    def end_segment(self) -> None:
        """Notes that a segment has been read; after the last, lets all threads go."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.end()

    def end(self) -> None:
        """Lets all threads go, whatever is left to do."""
        self.is_over = True
        for _ in range(self._config.threads):
            self.waiting.put(None)

    def place(self, batch: pa.RecordBatch, places: np.ndarray, where: str) -> None:
        """Puts decoded rows into their places.

        Args:
            batch: The rows.
            places: Place of each, int64 `[rows]`; those below 0 are left out.
            where: File and records, for errors.

        Raises:
            InputDataError: A row does not hold what the schema says.
        """
        config = self._config
        places = self._keep(batch, places)
        self._kept[places[places >= 0]] = True
        dense, late, longest = [], [], np.zeros(len(places), np.int64)
        for (column, position), is_dense in zip(config.places, config.are_dense, strict=True):
            array = self._check(column, batch.column(position), where)
            if is_dense:
                if config.has_lengths and column.spec.is_ragged:
                    longest = np.maximum(longest, list_lengths(array))
                dense.append(array)
            else:
                late.append(array)
        if config.has_lengths:
            dense.append(pa.array(longest))
        self._writer.write(dense, places)
        if late:
            names = [column.name for column in config.columns if not column.is_dense]
            with self._lock:
                self._pieces.append((places, pa.RecordBatch.from_arrays(late, names)))

    def _keep(self, batch: pa.RecordBatch, places: np.ndarray) -> np.ndarray:
        """The places, below 0 for rows that the filter leaves out."""
        config, kept = self._config, places >= 0
        if config.row_filter is not None:
            passed = config.row_filter.keep(batch)
            config.damage.counts.add_filtered(int((kept & ~passed).sum()))
            kept &= passed
        return places if kept.all() else np.where(kept, places, -1)

    def _check(self, column: Column, array: pa.Array, where: str) -> pa.Array:
        """The values of a column as the schema has them."""
        if column.is_sequence:
            array = join_steps(array)
        if array.null_count or column.is_fixed_list:
            array = fill_absent(column, array, where)
        if column.name == self._config.binary_label:
            check_binary(column.name, array, where)
        return array

    def build(self) -> Rows:
        """The rows, in the order of their places."""
        lists = {}
        if any(not column.is_dense for column in self._config.columns):
            lists = self._build_lists()
        kept = np.flatnonzero(self._kept)
        if len(kept) == self._rows:
            return Rows(self._rows, self._dense, lists)
        dense = Rows(self._rows, self._dense, {}).take(kept).dense
        return Rows(len(kept), dense, lists)

    def _build_lists(self) -> dict[str, pa.Array]:
        names = [column.name for column in self._config.columns if not column.is_dense]
        if not self._pieces:
            kinds = {column.name: column.wire.arrow_type for column in self._config.columns}
            return {name: pa.array([], kinds[name]) for name in names}
        places = np.concatenate([places for places, _ in self._pieces])
        order = np.argsort(places, kind="stable")
        order = pa.array(order[int((places < 0).sum()) :])
        return {
            name: pa.concat_arrays([batch.column(name) for _, batch in self._pieces]).take(order)
            for name in names
        }


def _shape(rows: int, column: Column) -> tuple[int, ...]:
    return (rows,) if column.length is None else (rows, column.length)
