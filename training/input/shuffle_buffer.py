"""Shuffle buffers of decoded rows: threads read and decode, each row goes to its output index.

A row's output index follows from its record's number alone. So nothing depends on which
thread was quicker, and a shuffle costs one copy: rows are decoded into their shuffled
positions.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from conf.schema import PackedSlot
from etl.tfrecord.reading import (
    CorruptRecordError,
    RecordBlock,
    RowWriter,
    WireFeature,
    allocate,
    join_steps,
    list_lengths,
)
from training.input.damage import DamagePolicy
from training.input.decoded_rows import DecodedRows
from training.input.decoders import BlockDecoder, build_block_decoder
from training.input.epoch_plan import BufferPlan, ShardRange, plan_buffers
from training.input.feature_columns import FeatureColumn, check_binary, fill_absent
from training.input.filters import RowFilter
from training.input.shards import (
    CachedReader,
    DecodedRuns,
    Shard,
    ShardCache,
    ShardReader,
    split_runs,
)

LENGTH_COLUMN = "\0length"
"""Column that holds the length of a row's longest list, where batches of like length are made."""


@dataclass(frozen=True)
class BufferConfig:
    """What pools are made of.

    Attributes:
        columns: Features to deliver.
        row_filter: Which rows are kept; None keeps all.
        record_type: `Example` or `SequenceExample`.
        decoder: `block` or `tensorflow`.
        threads: Threads that read and decode.
        damage: What becomes of damage.
        binary_label: Feature whose values must be 0 or 1; None checks none.
        has_lengths: Whether to deliver the length of each row's longest list.
        cache: Where decoded shards are kept; None for nowhere.
        slots: Places of features in packed features.
    """

    columns: tuple[FeatureColumn, ...]
    row_filter: RowFilter | None = None
    record_type: str = "Example"
    decoder: str = "block"
    threads: int = 1
    damage: DamagePolicy = field(default_factory=DamagePolicy)
    binary_label: str | None = None
    has_lengths: bool = False
    cache: ShardCache | None = None
    slots: tuple[PackedSlot, ...] = ()

    @property
    def features(self) -> tuple[WireFeature, ...]:
        """What is decoded: the columns, and what the filter looks at beside them."""
        extra = self.row_filter.columns if self.row_filter is not None else ()
        wires = {column.name: column.wire for column in (*extra, *self.columns)}
        return tuple(wires.values())

    @functools.cached_property
    def places(self) -> tuple[tuple[FeatureColumn, int], ...]:
        """The columns, and where each stands among the features."""
        positions = {feature.name: number for number, feature in enumerate(self.features)}
        return tuple((column, positions[column.name]) for column in self.columns)

    @functools.cached_property
    def are_dense(self) -> tuple[bool, ...]:
        """Which of the columns are dense."""
        return tuple(column.is_dense for column in self.columns)

    def build_decoder(self) -> BlockDecoder:
        """Builds a decoder for one thread."""
        return build_block_decoder(self.decoder, self.features, self.record_type, self.slots)


def decode_piece(
    decoder: BlockDecoder, block: RecordBlock, path: str, damage: DamagePolicy
) -> tuple[pa.RecordBatch, np.ndarray | None]:
    """Decodes a block, leaving out malformed records where the policy says so.

    Returns:
        The columns, and which of the records they hold: bool `[records]`, None for all.

    Raises:
        CorruptRecordError: A record is malformed and must not be skipped.
        InputDataError: A record does not hold what the schema says.
    """
    if damage.on_corrupt != "skip_record":
        return decoder.decode_block(block, path), None
    batch, bad = decoder.decode_sound(block, path)
    sound = np.ones(len(block.index), bool)
    for record in bad:
        sound[record.record] = False
        offset = block.offset + int(block.index[record.record, 0])
        damage.counts.add_record(path, offset, record.reason)
    return batch, sound


def build_missing_shard_error(shard: Shard, error: OSError) -> InputDataError:
    """The error of a shard that cannot be read."""
    return InputDataError(
        "a shard that the manifest lists cannot be read",
        received=f"{shard.path}: {_describe_damage(error)}",
        fix="restore the shard, roll back to an earlier version, or build again",
    )


def is_usable(shard: Shard, config: BufferConfig) -> bool:
    """Whether a shard may be read; with `skip_shard` it is read through once to find out.

    Raises:
        InputDataError: A record does not hold what the schema says.
    """
    if config.damage.on_corrupt != "skip_shard":
        return True
    reason = find_shard_damage(shard, config)
    if reason is not None:
        config.damage.counts.add_shard(shard.path, reason)
    return reason is None


def _describe_damage(error: Exception) -> str:
    """What is wrong, without the path that an error of the system repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


_DAMAGE_OF_SHARD: dict[tuple[object, ...], str | None] = {}


def find_shard_damage(shard: Shard, config: BufferConfig) -> str | None:
    """What is damaged in a shard, or None; found out once per process."""
    key = (shard.path, shard.crc32c, config.features, config.record_type)
    if key not in _DAMAGE_OF_SHARD:
        decoder, reader = config.build_decoder(), ShardReader(shard, 0, DamagePolicy())
        try:
            while (block := reader.read(shard.rows)) is not None:
                decoder.decode_block(block, shard.path)
            # What else stands in it was not written with the version.
            has_more = reader.read(shard.rows + 1) is not None
            found = f"more than {shard.rows}" if has_more else f"{reader.position} of {shard.rows}"
            is_whole = reader.position == shard.rows
            _DAMAGE_OF_SHARD[key] = None if is_whole else f"{found} records"
        except (CorruptRecordError, OSError) as error:
            _DAMAGE_OF_SHARD[key] = (
                _describe_damage(error).splitlines()[0].removeprefix(f"{shard.path}: ")
            )
    return _DAMAGE_OF_SHARD[key]


class BufferFill:
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

    def __init__(self, plan: BufferPlan, places: np.ndarray, config: BufferConfig) -> None:
        self.places = places
        self.waiting: queue.SimpleQueue[ShardRange | None] = queue.SimpleQueue()
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
            shapes[LENGTH_COLUMN] = (self._rows,), np.dtype(np.int64)
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

    def _check(self, column: FeatureColumn, array: pa.Array, where: str) -> pa.Array:
        """The values of a column as the schema has them."""
        if column.is_sequence:
            array = join_steps(array)
        if array.null_count or column.is_fixed_list:
            array = fill_absent(column, array, where)
        if column.name == self._config.binary_label:
            check_binary(column.name, array, where)
        return array

    def build(self) -> DecodedRows:
        """The rows, in the order of their places."""
        lists = {}
        if any(not column.is_dense for column in self._config.columns):
            lists = self._build_lists()
        kept = np.flatnonzero(self._kept)
        if len(kept) == self._rows:
            return DecodedRows(self._rows, self._dense, lists)
        dense = DecodedRows(self._rows, self._dense, {}).take(kept).dense
        return DecodedRows(len(kept), dense, lists)

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


def _shape(rows: int, column: FeatureColumn) -> tuple[int, ...]:
    return (rows,) if column.length is None else (rows, column.length)


Piece = RecordBlock | tuple[int, pa.RecordBatch]


class BufferReader:
    """Fills the pools of an epoch in their order.

    Args:
        shards: Shards of the split, by number.
        config: What pools are made of.
    """

    def __init__(self, shards: Sequence[Shard], config: BufferConfig) -> None:
        self._shards, self._config = shards, config
        self._readers: dict[int, ShardReader | CachedReader] = {}
        self._executor = ThreadPoolExecutor(config.threads, "sluice-input")
        self._decoders = [config.build_decoder() for _ in range(config.threads)]
        self._job: BufferFill | None = None

    def start(
        self, plan: BufferPlan, places: np.ndarray, low: int = 0
    ) -> Callable[[], DecodedRows]:
        """Begins to fill a pool; the one before it is full.

        Args:
            plan: The pool.
            places: Place of each of its records, int64 `[rows]`.
            low: Places below it are wanted by nobody: their records are not decoded.

        Returns:
            Function that waits for the rows, in the order of their places from `low` on.

        Raises:
            InputDataError: By that function: a shard is damaged, missing or shorter than the
                manifest says, or a record does not hold what the schema says.
        """
        job = BufferFill(plan, places - low, self._config)
        self._job = job
        for segment in plan.segments:
            job.waiting.put(segment)
        futures = [self._executor.submit(self._work, job, decoder) for decoder in self._decoders]
        return lambda: self._finish(job, futures)

    def close(self) -> None:
        """Stops all work and closes the shards."""
        if self._job is not None:
            self._job.end()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._readers.clear()

    def _finish(self, job: BufferFill, futures: list[Future[None]]) -> DecodedRows:
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            # The same error whichever thread was first: by the text of what is wrong.
            raise min(errors, key=str)
        return job.build()

    def _work(self, job: BufferFill, decoder: BlockDecoder) -> None:
        try:
            while not job.is_over and (segment := job.waiting.get()) is not None:
                piece = self._read(segment)
                if piece is None:
                    job.end_segment()
                    continue
                job.waiting.put(segment)
                self._place(job, segment, piece, decoder)
        except BaseException:
            job.end()
            raise

    def _read(self, segment: ShardRange) -> Piece | None:
        """Next records of a segment, which is in no other thread's hands."""
        shard, stop = self._shards[segment.shard], segment.first + segment.rows
        damage = self._config.damage
        if segment.shard not in self._readers:
            if not is_usable(shard, self._config):
                return None
            self._readers[segment.shard] = self._open(shard, segment.first)
        reader = self._readers[segment.shard]
        try:
            piece = reader.read(stop)
        except OSError as error:
            raise build_missing_shard_error(shard, error) from error
        if piece is None and reader.position >= shard.rows:
            del self._readers[segment.shard]  # closes the file
        elif piece is None and damage.on_corrupt == "fail" and reader.position < stop:
            raise InputDataError(
                f"{shard.path} ends early",
                received=f"{reader.position} records",
                allowed=f"{shard.rows}, as the manifest says",
                fix="restore the shard, roll back to an earlier version, or build again",
            )
        return piece

    def _open(self, shard: Shard, first: int) -> ShardReader | CachedReader:
        cache = self._config.cache
        if cache is not None:
            return CachedReader(cache.load(shard, lambda: self._decode_shard(shard)), first)
        return ShardReader(shard, first, self._config.damage)

    def _decode_shard(self, shard: Shard) -> DecodedRuns:
        """All records of a shard, to be kept."""
        damage, decoder = self._config.damage, self._config.build_decoder()
        runs: DecodedRuns = []
        reader = ShardReader(shard, 0, damage)
        while (block := reader.read(shard.rows)) is not None:
            batch, sound = decode_piece(decoder, block, shard.path, damage)
            runs += split_runs(block.first_record, batch, sound)
        return runs

    def _place(
        self, job: BufferFill, segment: ShardRange, piece: Piece, decoder: BlockDecoder
    ) -> None:
        if isinstance(piece, RecordBlock):
            number, count = piece.first_record, len(piece.index)
        else:
            number, count = piece[0], piece[1].num_rows
        start = segment.start + number - segment.first
        places = job.places[start : start + count]
        path = self._shards[segment.shard].path
        if isinstance(piece, RecordBlock):
            wanted = places >= 0
            if not wanted.all():
                places = places[wanted]
                piece = RecordBlock(
                    piece.data, piece.index[wanted], piece.offset, piece.first_record
                )
            batch, sound = decode_piece(decoder, piece, path, self._config.damage)
            places = places if sound is None else places[sound]
        else:
            batch = piece[1]
        job.place(batch, places, f"{path}, records {number} to {number + count - 1}")


_ORDER, _BUFFER = 0, 1  # streams of random numbers


@dataclass(frozen=True)
class EpochConfig:
    """What an epoch is made of.

    Attributes:
        shards: Shards of the split, by number.
        ranges: First record and number of records to read of each.
        pools: What pools are made of.
        pool_rows: Records that are shuffled together.
        interleave: Shards that are read at once.
        batch_size: Rows per batch.
        seed: The run's seed; None keeps the order of the records.
        is_exact: Whether as many rows are delivered as are planned.
        redraw: Draws the rows of a pool anew, given a seed; None leaves them.
    """

    shards: tuple[Shard, ...]
    ranges: tuple[tuple[int, int], ...]
    pools: BufferConfig
    pool_rows: int
    interleave: int
    batch_size: int
    seed: int | None
    is_exact: bool = True
    redraw: Callable[[DecodedRows, Sequence[int]], DecodedRows] | None = None

    @property
    def rows(self) -> int:
        """Records that are planned."""
        return sum(rows for _, rows in self.ranges)


def read_epoch(config: EpochConfig, epoch: int, first_row: int = 0) -> Iterator[DecodedRows]:
    """Reads an epoch's rows, pool by pool; the next pool fills while one is used.

    Pools before `first_row` are not read at all where every planned record is delivered, and
    otherwise read and dropped: only then is it known how many rows they have.

    Args:
        config: What the epoch is made of.
        epoch: Zero-based epoch.
        first_row: Rows to leave out at the start.

    Yields:
        The rows of each pool. The same for the same seed and epoch, whatever the threads.

    Raises:
        InputDataError: As for `PoolReader.start`.
    """
    plans = _plan_epoch(config, epoch)
    skip = first_row
    if config.is_exact:
        done = [plan for plan in plans if plan.first + plan.rows <= first_row]
        plans, skip = plans[len(done) :], first_row - sum(plan.rows for plan in done)
    reader = BufferReader(config.shards, config.pools)
    try:
        pending: Callable[[], DecodedRows] | None = None
        for number, plan in enumerate(plans):
            # The rows before the first that is wanted are not even decoded.
            low = skip if config.is_exact and config.redraw is None else 0
            if pending is None:
                pending = reader.start(plan, _output_indices(config, epoch, plan), low)
            rows = pending()
            pending = None
            if number + 1 < len(plans):
                following = plans[number + 1]
                pending = reader.start(following, _output_indices(config, epoch, following))
            if config.redraw is not None:
                rows = config.redraw(rows, [config.seed or 0, epoch, plan.number])
            dropped = min(skip - low, rows.count)
            skip -= low + dropped
            if rows.count > dropped:
                yield rows.slice(dropped, rows.count)
    finally:
        reader.close()


def _plan_epoch(config: EpochConfig, epoch: int) -> list[BufferPlan]:
    order: Sequence[int] = range(len(config.shards))
    if config.seed is not None:
        rng = np.random.default_rng([config.seed, epoch, _ORDER])
        order = rng.permutation(len(config.shards)).tolist()
    return plan_buffers(
        config.ranges, order, config.pool_rows, config.interleave, config.batch_size
    )


def _output_indices(config: EpochConfig, epoch: int, plan: BufferPlan) -> np.ndarray:
    if config.seed is None:
        return np.arange(plan.rows)
    rng = np.random.default_rng([config.seed, epoch, _BUFFER, plan.number])
    return rng.permutation(plan.rows)
