"""The shuffle buffer: threads read and decode shards, each row goes to its output index.

That follows from its record's number alone. So nothing depends on which thread was quicker, and a
shuffle costs one copy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from conf.schema import PackedSlot
from conf.training.input import ClassBalanceConfig
from etl.tfrecord.codec.decode import Decoder, RowWriter, build_decoder
from etl.tfrecord.codec.framing import RecordBlock
from etl.tfrecord.codec.kernels import allocate
from etl.tfrecord.types.features import WireFeature
from etl.tfrecord.types.parts import join_steps, list_lengths
from training.reader.epoch_plan import WHOLE, BatchShare, BufferPlan, ShardRange, plan_buffers
from training.reader.feature_columns import FeatureColumn, check_binary, fill_absent
from training.reader.filters import RowFilter
from training.reader.rows import LENGTH_COLUMN, DecodedRows, balance_classes
from training.reader.shards import (
    DamagePolicy,
    Shard,
    ShardReader,
    compare_begun,
    decode_records,
    find_shard_damage,
)

_ORDER, _BUFFER = 0, 1  # streams of random numbers
_DAMAGE_OF_SHARD: dict[tuple[object, ...], str | None] = {}


@dataclass(frozen=True)
class ReadPlan:
    """How the rows of a split are read."""

    columns: tuple[FeatureColumn, ...]
    shards: tuple[Shard, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()  # first record to read of each, and how many
    seed: int | None = None  # None keeps the order of the records
    buffer_rows: int = 1  # records that are shuffled together
    interleave: int = 1  # shards that are read at once
    batch_size: int = 1
    is_exact: bool = True  # whether as many rows are delivered as are planned
    balance: ClassBalanceConfig | None = None  # how rows of a buffer are drawn anew
    row_filter: RowFilter | None = None
    record_type: str = "Example"
    threads: int = 1
    damage: DamagePolicy = field(default_factory=DamagePolicy)
    binary_labels: tuple[str, ...] = ()  # their values must be 0 or 1
    has_lengths: bool = False  # whether to deliver the length of each row's longest list
    slots: tuple[PackedSlot, ...] = ()

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.ranges)

    @property
    def can_skip(self) -> bool:
        """Whether rows need not be decoded to be left out: each record is one planned row."""
        return self.is_exact and self.balance is None

    @property
    def features(self) -> tuple[WireFeature, ...]:
        """Features to decode: the columns, and those that the filter looks at beside them."""
        extra = self.row_filter.columns if self.row_filter is not None else ()
        wires = {column.name: column.wire for column in (*extra, *self.columns)}
        return tuple(wires.values())

    def build_decoder(self) -> Decoder:
        """A decoder for one thread."""
        return build_decoder(self.features, self.record_type, self.slots)

    def is_usable(self, shard: Shard) -> bool:
        """Whether a shard may be read; with `skip_shard` it is read through once to find out."""
        if self.damage.on_corrupt != "skip_shard":
            return True
        # The result is kept per process: each epoch asks again.
        key = (shard.path, shard.rows, shard.crc32c, self.features, self.record_type)
        if key not in _DAMAGE_OF_SHARD:
            _DAMAGE_OF_SHARD[key] = find_shard_damage(shard, self.build_decoder())
        reason = _DAMAGE_OF_SHARD[key]
        if reason is not None:
            self.damage.counts.add_shard(shard.path, reason)
        return reason is None


class ShuffleBuffer:
    """Reads one buffer of rows after another, in several threads."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._readers: dict[int, ShardReader] = {}
        self._executor = ThreadPoolExecutor(plan.threads, "sluice-input")
        self._decoders = [plan.build_decoder() for _ in range(plan.threads)]
        self._lock = threading.Lock()
        # Ranges that no thread reads at the moment; None ends a thread.
        self._waiting: queue.SimpleQueue[ShardRange | None] = queue.SimpleQueue()
        self._open_ranges, self._is_over = 0, True

    def start(self, buffer: BufferPlan, indices: np.ndarray) -> Callable[[], DecodedRows]:
        """Begins to fill a buffer; what waits for its rows comes back. The one before it is full.

        Each record goes to its output index, int64 `[rows]`; below 0 it is not decoded.
        """
        filling = _Filling(self._plan, indices)
        self._waiting = queue.SimpleQueue()
        self._open_ranges, self._is_over = len(buffer.ranges), False
        for part in buffer.ranges:
            self._waiting.put(part)
        futures = [self._executor.submit(self._work, filling, d) for d in self._decoders]

        def wait() -> DecodedRows:
            errors = [error for error in (future.exception() for future in futures) if error]
            if errors:
                # The same error whichever thread was first: by its text.
                raise min(errors, key=str)
            return filling.build()

        return wait

    def close(self) -> None:
        """Stops all work and closes the shards."""
        self._end()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._readers.clear()

    def _work(self, filling: _Filling, decoder: Decoder) -> None:
        try:
            while not self._is_over and (part := self._waiting.get()) is not None:
                block = self._read(part)
                if block is None:
                    self._end_range()
                    continue
                self._waiting.put(part)
                self._decode(filling, part, block, decoder)
        except BaseException:
            self._end()
            raise

    def _end_range(self) -> None:
        """Notes that a range has been read; after the last, ends all threads."""
        with self._lock:
            self._open_ranges -= 1
            if self._open_ranges == 0:
                self._end()

    def _end(self) -> None:
        """Ends all threads, also those that wait."""
        self._is_over = True
        for _ in range(self._plan.threads):
            self._waiting.put(None)

    def _read(self, part: ShardRange) -> RecordBlock | None:
        """Reads the next records of a range, which no other thread holds."""
        shard = self._plan.shards[part.shard]
        if part.shard not in self._readers:
            if not self._plan.is_usable(shard):
                return None
            self._readers[part.shard] = ShardReader(shard, part.first, self._plan.damage)
        reader = self._readers[part.shard]
        block = reader.read(part.first + part.rows)
        if block is None and reader.position >= shard.rows:
            reader.compare()
            del self._readers[part.shard]  # closes the file
        return block

    def _decode(
        self, filling: _Filling, part: ShardRange, block: RecordBlock, decoder: Decoder
    ) -> None:
        """Decodes the records that are wanted, and writes their rows."""
        path = self._plan.shards[part.shard].path
        first, count = block.first_record, len(block.index)
        start = part.start + first - part.first
        indices = filling.indices[start : start + count]
        wanted = indices >= 0
        if not wanted.all():
            indices = indices[wanted]
            block = RecordBlock(block.data, block.index[wanted], block.offset, first)
        batch, sound = decode_records(decoder, block, path, self._plan.damage)
        indices = indices if sound is None else indices[sound]
        filling.write(batch, indices, f"{path}, records {first} to {first + count - 1}")


class _Filling:
    """The arrays of a buffer that is being filled; rows with an index below 0 are left out."""

    def __init__(self, plan: ReadPlan, indices: np.ndarray) -> None:
        self.indices = indices
        self._plan = plan
        self._rows = int((indices >= 0).sum())
        self._lock = threading.Lock()
        self._kept = np.zeros(self._rows, bool)
        dense = [column for column in plan.columns if column.is_dense]
        shapes = {c.name: ((self._rows, *c.width), np.dtype(c.spec.dtype)) for c in dense}
        if plan.has_lengths:
            shapes[LENGTH_COLUMN] = (self._rows,), np.dtype(np.int64)
        self._dense = allocate(shapes)
        pads = [column.pad for column in dense] + [0] * plan.has_lengths
        self._writer = RowWriter(list(self._dense.values()), pads)  # type: ignore[arg-type]
        self._lists = [column for column in plan.columns if not column.is_dense]
        self._pieces: list[tuple[np.ndarray, pa.RecordBatch]] = []

    def write(self, batch: pa.RecordBatch, indices: np.ndarray, where: str) -> None:
        """Writes decoded rows to their output indices; any number of threads may do so."""
        plan = self._plan
        indices = self._filter(batch, indices, where)
        self._kept[indices[indices >= 0]] = True
        dense: list[pa.Array] = []
        lists: list[pa.Array] = []
        longest = np.zeros(len(indices), np.int64)
        for column in plan.columns:
            array = self._check(column, batch.column(column.name), where)
            if plan.has_lengths and column.is_dense and column.spec.is_ragged:
                longest = np.maximum(longest, list_lengths(array))
            (dense if column.is_dense else lists).append(array)
        if plan.has_lengths:
            dense.append(pa.array(longest))
        self._writer.write(dense, indices)
        if lists:
            names = [column.name for column in self._lists]
            with self._lock:
                self._pieces.append((indices, pa.RecordBatch.from_arrays(lists, names)))

    def _filter(self, batch: pa.RecordBatch, indices: np.ndarray, where: str) -> np.ndarray:
        """The output indices, below 0 for rows that the filter leaves out."""
        plan, kept = self._plan, indices >= 0
        if plan.row_filter is not None:
            passed = plan.row_filter.keep(batch, where)
            plan.damage.counts.add_filtered(int((kept & ~passed).sum()))
            kept &= passed
        return indices if kept.all() else np.where(kept, indices, -1)

    def _check(self, column: FeatureColumn, array: pa.Array, where: str) -> pa.Array:
        """The values of a column as the schema has them."""
        if column.is_sequence:
            array = join_steps(array)
        if column.name in self._plan.binary_labels:
            values = array.drop_null().to_numpy(zero_copy_only=False)
            check_binary(column.name, values, where)
        if array.null_count or column.is_fixed_list or column.may_lack:
            array = fill_absent(column, array, where)
        return array

    def build(self) -> DecodedRows:
        """Returns the rows in the order of their output indices."""
        kept, dense = np.flatnonzero(self._kept), self._dense
        if len(kept) < self._rows:
            dense = DecodedRows(self._rows, dense, {}).take(kept).dense
        return DecodedRows(len(kept), dense, self._build_lists() if self._lists else {})

    def _build_lists(self) -> dict[str, pa.Array]:
        if not self._pieces:
            return {c.name: pa.array([], c.wire.arrow_type) for c in self._lists}
        indices = np.concatenate([indices for indices, _ in self._pieces])
        order = pa.array(np.argsort(indices, kind="stable")[int((indices < 0).sum()) :])
        columns = {c.name: [batch.column(c.name) for _, batch in self._pieces] for c in self._lists}
        return {name: pa.concat_arrays(parts).take(order) for name, parts in columns.items()}


def read_epoch(
    plan: ReadPlan, epoch: int, first_row: int = 0, share: BatchShare = WHOLE, total: int = 0
) -> Iterator[DecodedRows]:
    """Reads an epoch's rows from one on, the same for the same seed and epoch.

    With `share` a part of the batches of the epoch's first `total` rows is delivered: `first_row`
    begins a batch then, and the plan `can_skip`. Rows that are not delivered are not decoded; where
    the plan cannot skip, it is known only after reading which they are.
    """
    buffers, dropped = _plan_epoch(plan, epoch), 0 if plan.can_skip else first_row
    if plan.is_exact:
        done = sum(buffer.first + buffer.rows <= first_row for buffer in buffers)
        dropped = max(0, dropped - sum(buffer.rows for buffer in buffers[:done]))
        buffers = buffers[done:]
    shuffle = ShuffleBuffer(plan)

    def start(buffer: BufferPlan) -> Callable[[], DecodedRows]:
        indices = _output_indices(plan, epoch, buffer)
        if not share.is_whole:
            first, last = buffer.first - first_row, total - first_row
            taken = share.select_rows(first, buffer.rows, plan.batch_size, last)
            indices = np.where(taken, np.cumsum(taken) - 1, -1)[indices]
        elif plan.can_skip:
            indices -= max(0, first_row - buffer.first)
        return shuffle.start(buffer, indices)

    try:
        filled = _read_ahead(map(start, buffers))
        for buffer, rows in zip(buffers, filled, strict=True):
            if plan.balance is not None:
                own = [plan.seed or 0, epoch, buffer.number]
                rows = balance_classes(rows, plan.balance.feature, plan.balance.shares, own)
            if rows.count > dropped:
                yield rows.slice(dropped, rows.count)
            dropped = max(0, dropped - rows.count)
        compare_begun(plan.damage, plan.shards)
    finally:
        shuffle.close()


def _read_ahead(begun: Iterator[Callable[[], DecodedRows]]) -> Iterator[DecodedRows]:
    """The rows of one buffer after another; the next one begins before those of one are used."""
    wait = next(begun, None)
    while wait is not None:
        rows = wait()
        wait = next(begun, None)
        yield rows


def _plan_epoch(plan: ReadPlan, epoch: int) -> list[BufferPlan]:
    order: Sequence[int] = range(len(plan.shards))
    if plan.seed is not None:
        rng = np.random.default_rng([plan.seed, epoch, _ORDER])
        order = rng.permutation(len(plan.shards)).tolist()
    return plan_buffers(plan.ranges, order, plan.buffer_rows, plan.interleave, plan.batch_size)


def _output_indices(plan: ReadPlan, epoch: int, buffer: BufferPlan) -> np.ndarray:
    if plan.seed is None:
        return np.arange(buffer.rows)
    rng = np.random.default_rng([plan.seed, epoch, _BUFFER, buffer.number])
    return rng.permutation(buffer.rows)
