"""Damage of shards and of their records: found, and passed over where the policy says so."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.framing import CorruptRecordError, RecordBlock
from training.input.damage import DamagePolicy
from training.input.decoders import BlockDecoder
from training.input.pool_config import PoolConfig
from training.input.shard_reader import Shard, ShardReader


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
        received=f"{shard.path}: {_describe(error)}",
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


def _describe(error: Exception) -> str:
    """What is wrong, without the path that an error of the system repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


_DAMAGE: dict[tuple[object, ...], str | None] = {}


def find_shard_damage(shard: Shard, config: PoolConfig) -> str | None:
    """What is damaged in a shard, or None; found out once per process."""
    key = (shard.path, shard.crc32c, config.features, config.record_type)
    if key not in _DAMAGE:
        decoder, reader = config.build_decoder(), ShardReader(shard, 0, DamagePolicy())
        try:
            while (block := reader.read(shard.rows)) is not None:
                decoder.decode_block(block, shard.path)
            # What else stands in it was not written with the version.
            has_more = reader.read(shard.rows + 1) is not None
            found = f"more than {shard.rows}" if has_more else f"{reader.position} of {shard.rows}"
            is_whole = reader.position == shard.rows
            _DAMAGE[key] = None if is_whole else f"{found} records"
        except (CorruptRecordError, OSError) as error:
            _DAMAGE[key] = _describe(error).splitlines()[0].removeprefix(f"{shard.path}: ")
    return _DAMAGE[key]
