"""Pools of decoded rows: threads read and decode, and put each row where it belongs.

A row's place follows from its record's number alone. So nothing depends on which thread was
quicker, and a shuffle costs one copy: rows are decoded into their shuffled places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.framing import RecordBlock
from training.input.decoders import BlockDecoder
from training.input.epoch_plan import PoolPlan, Segment
from training.input.pool_config import PoolConfig
from training.input.pool_fill import PoolFill
from training.input.rows import Rows
from training.input.shard_cache import CachedReader, Runs, split_runs
from training.input.shard_damage import decode_piece, is_usable, missing_shard
from training.input.shard_reader import Shard, ShardReader

Piece = RecordBlock | tuple[int, pa.RecordBatch]


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
        self._job: PoolFill | None = None

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
        job = PoolFill(plan, places - low, self._config)
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

    def _finish(self, job: PoolFill, futures: list[Future[None]]) -> Rows:
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            # The same error whichever thread was first: by the text of what is wrong.
            raise min(errors, key=str)
        return job.build()

    def _work(self, job: PoolFill, decoder: BlockDecoder) -> None:
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

    def _place(self, job: PoolFill, segment: Segment, piece: Piece, decoder: BlockDecoder) -> None:
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
