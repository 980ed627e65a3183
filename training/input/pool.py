"""Pools of decoded rows: threads read and decode, and put each row where it belongs.

A row's place follows from its record's number alone. So nothing depends on which thread was
quicker, and a shuffle costs one copy: rows are decoded into their shuffled places.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.decode import WireFeature
from etl.tfrecord.decode_rows import RowWriter, join_steps, list_lengths
from etl.tfrecord.framing import CorruptRecordError, RecordBlock
from etl.tfrecord.memory import allocate
from training.input.columns import Column
from training.input.damage import DamagePolicy
from training.input.decoders import BlockDecoder, build_block_decoder
from training.input.epoch_plan import PoolPlan, Segment
from training.input.filters import RowFilter
from training.input.rows import Rows
from training.input.shard_cache import CachedReader, Runs, ShardCache, split_runs
from training.input.shard_reader import Shard, ShardReader

LENGTH = "\0length"
"""Column that holds the length of a row's longest list, where batches of like length are made."""

Piece = RecordBlock | tuple[int, pa.RecordBatch]


@dataclass(frozen=True)
class PoolConfig:
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
    """

    columns: tuple[Column, ...]
    row_filter: RowFilter | None = None
    record_type: str = "Example"
    decoder: str = "block"
    threads: int = 1
    damage: DamagePolicy = field(default_factory=DamagePolicy)
    binary_label: str | None = None
    has_lengths: bool = False
    cache: ShardCache | None = None

    @property
    def features(self) -> tuple[WireFeature, ...]:
        """What is decoded: the columns, and what the filter looks at beside them."""
        extra = self.row_filter.columns if self.row_filter is not None else ()
        wires = {column.name: column.wire for column in (*extra, *self.columns)}
        return tuple(wires.values())

    @functools.cached_property
    def places(self) -> tuple[tuple[Column, int], ...]:
        """The columns, and where each stands among the features."""
        positions = {feature.name: number for number, feature in enumerate(self.features)}
        return tuple((column, positions[column.name]) for column in self.columns)

    @functools.cached_property
    def are_dense(self) -> tuple[bool, ...]:
        """Which of the columns are dense."""
        return tuple(column.is_dense for column in self.columns)

    def build_decoder(self) -> BlockDecoder:
        """Builds a decoder for one thread."""
        return build_block_decoder(self.decoder, self.features, self.record_type)


class PoolReader:
    """Fills the pools of an epoch in their order.

    Args:
        shards: Shards of the split, by number.
        config: What pools are made of.
    """

    def __init__(self, shards: Sequence[Shard], config: PoolConfig) -> None:
        self._shards, self._config = shards, config
        self._readers: dict[int, ShardReader | CachedReader] = {}
        self._executor = ThreadPoolExecutor(config.threads, "sluice-input")
        self._decoders = [config.build_decoder() for _ in range(config.threads)]
        self._job: _Job | None = None

    def start(self, plan: PoolPlan, places: np.ndarray, low: int = 0) -> Callable[[], Rows]:
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
        job = _Job(plan, places - low, self._config)
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

    def _finish(self, job: _Job, futures: list[Future[None]]) -> Rows:
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            # The same error whichever thread was first: by the text of what is wrong.
            raise min(errors, key=str)
        return job.build()

    def _work(self, job: _Job, decoder: BlockDecoder) -> None:
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

    def _read(self, segment: Segment) -> Piece | None:
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
            raise missing_shard(shard, error) from error
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

    def _decode_shard(self, shard: Shard) -> Runs:
        """All records of a shard, to be kept."""
        damage, decoder = self._config.damage, self._config.build_decoder()
        runs: Runs = []
        reader = ShardReader(shard, 0, damage)
        while (block := reader.read(shard.rows)) is not None:
            batch, sound = decode_piece(decoder, block, shard.path, damage)
            runs += split_runs(block.first_record, batch, sound)
        return runs

    def _place(self, job: _Job, segment: Segment, piece: Piece, decoder: BlockDecoder) -> None:
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


def missing_shard(shard: Shard, error: OSError) -> InputDataError:
    """The error of a shard that cannot be read."""
    return InputDataError(
        "a shard that the manifest lists cannot be read",
        received=f"{shard.path}: {error}",
        fix="restore the shard, roll back to an earlier version, or build again",
    )


def is_usable(shard: Shard, config: PoolConfig) -> bool:
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


_DAMAGE: dict[tuple[object, ...], str | None] = {}


def find_shard_damage(shard: Shard, config: PoolConfig) -> str | None:
    """What is damaged in a shard, or None; found out once per process."""
    key = (shard.path, shard.crc32c, config.features, config.record_type)
    if key not in _DAMAGE:
        decoder, reader = config.build_decoder(), ShardReader(shard, 0, DamagePolicy())
        try:
            while (block := reader.read(shard.rows)) is not None:
                decoder.decode_block(block, shard.path)
            short = reader.position < shard.rows
            _DAMAGE[key] = f"{reader.position} of {shard.rows} records" if short else None
        except (CorruptRecordError, OSError) as error:
            _DAMAGE[key] = str(error).splitlines()[0]
    return _DAMAGE[key]


class _Job:
    """A pool that is being filled."""

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
        """Puts decoded rows into their places."""
        config = self._config
        kept = places >= 0
        if config.row_filter is not None:
            passed = config.row_filter.keep(batch)
            config.damage.counts.add_filtered(int((kept & ~passed).sum()))
            kept &= passed
        if not kept.all():
            places = np.where(kept, places, -1)
        self._kept[places[kept]] = True
        dense, late, longest = [], [], np.zeros(len(places), np.int64)
        arrays = batch.columns
        for (column, position), is_dense in zip(config.places, config.are_dense, strict=True):
            array = arrays[position]
            if column.is_sequence:
                array = join_steps(array)
            if array.null_count or column.is_fixed_list:
                array = fill_absent(column, array, where)
            if column.name == config.binary_label:
                check_binary(column.name, array, where)
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


def fill_absent(column: Column, array: pa.Array, where: str) -> pa.Array:
    """Puts the schema's values where records lack a feature, and checks fixed lengths.

    Raises:
        InputDataError: A feature is absent that has no pad value, or a list has another length
            than the schema says; names the feature and the record.
    """
    spec = column.spec
    if column.is_ragged:
        return array.fill_null([]) if array.null_count else array
    if not spec.is_list:
        if not array.null_count:
            return array
        absent = column.absent
        if absent is None:
            raise _unfit(column, where, "no value", "one value")
        value = absent.encode() if isinstance(absent, str) else absent
        return array.fill_null(pa.scalar(value, array.type))
    if not spec.is_ragged:
        lengths = list_lengths(array)
        bad = lengths != spec.shape[0]
        if column.may_be_empty:
            bad &= lengths != 0
        if bad.any():
            found = int(lengths[int(bad.argmax())])
            raise _unfit(column, where, f"a list of {found}", f"a list of {spec.shape[0]}")
    return array


def check_binary(name: str, array: pa.Array, where: str) -> None:
    """Refuses labels other than 0 and 1.

    Raises:
        InputDataError: There is one; names the feature and the value.
    """
    values = array.to_numpy(zero_copy_only=False)
    bad = (values != 0) & (values != 1)
    if bad.any():
        raise InputDataError(
            f"label {name!r} holds a value that a binary objective cannot learn",
            received=f"{values[int(bad.argmax())]} in {where}",
            allowed="0 or 1",
            fix="map the label in the build config, leave such rows out by input.filter, or "
            "choose another objective",
        )


def _unfit(column: Column, where: str, found: str, wanted: str) -> InputDataError:
    return InputDataError(
        f"a record does not hold feature {column.name!r} as the schema says",
        received=f"{found} in {where}",
        allowed=f"{wanted} of {column.spec.dtype}",
        fix="give the feature a pad_value if it may be absent, or build the dataset again",
    )
