from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from etl.tfrecord.framing import CorruptRecordError, RecordBlock
from tests.training.fixtures import encode_example, write_shard
from training.input.columns import plan_columns
from training.input.damage import DamagePolicy
from training.input.pool_config import PoolConfig
from training.input.shard_damage import (
    decode_piece,
    find_shard_damage,
    is_usable,
    missing_shard,
)
from training.input.shard_reader import Shard

SCHEMA = FeatureSchema((FeatureSpec("f", "int64", "user"),))


def config_of(manifest: Manifest, on_corrupt: str) -> PoolConfig:
    return PoolConfig(plan_columns(manifest, SCHEMA.features), damage=DamagePolicy(on_corrupt))


def block_of(payloads: list[bytes]) -> RecordBlock:
    sizes = [len(payload) for payload in payloads]
    index = np.stack([np.cumsum([0, *sizes])[:-1], sizes], 1).astype(np.int64)
    return RecordBlock(np.frombuffer(b"".join(payloads), np.uint8), index, 1000, 7)


def test_a_bad_record_is_left_out_where_the_policy_says_so(tiny_manifest: Manifest) -> None:
    good = [encode_example({"f": value}, SCHEMA) for value in (5, 6)]
    block = block_of([good[0], b"\xff\xff", good[1]])
    skipping = config_of(tiny_manifest, "skip_record")
    batch, sound = decode_piece(skipping.build_decoder(), block, "file", skipping.damage)
    assert batch.column("f").to_pylist() == [5, 6]
    assert sound is not None
    assert sound.tolist() == [True, False, True]
    assert skipping.damage.counts.totals() == {"bad_records": 1}
    assert f"file, byte offset {1000 + len(good[0])}" == skipping.damage.counts.first_bad
    failing = config_of(tiny_manifest, "fail")
    with pytest.raises(CorruptRecordError):
        decode_piece(failing.build_decoder(), block, "file", failing.damage)
    assert decode_piece(failing.build_decoder(), block_of(good), "f", failing.damage)[1] is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "short", "long"])
def test_a_damaged_shard_is_left_out_whole(
    damage: str, tmp_path: Path, tiny_manifest: Manifest
) -> None:
    path = tmp_path / f"{damage}.tfrecord"
    write_shard(path, [{"f": i} for i in range(50)], SCHEMA)
    shard, config = Shard(str(path), 50, "0", None), config_of(tiny_manifest, "skip_shard")
    sound = replace(shard, path=str(tmp_path / "sound.tfrecord"))
    Path(sound.path).write_bytes(path.read_bytes())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "flipped":
        content = bytearray(path.read_bytes())
        content[200] ^= 4
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    elif damage == "long":
        path.write_bytes(path.read_bytes() * 2)
    else:
        shard = replace(shard, rows=51)
    assert is_usable(sound, config)
    assert not is_usable(shard, config)
    assert not is_usable(shard, config)  # counted once
    assert config.damage.counts.totals() == {"shards": 1}
    reason = find_shard_damage(shard, config)
    assert reason is not None
    assert str(path) not in reason
    assert config.damage.counts.describe() == [f"shard skipped: {path}: {reason}"]
    assert is_usable(shard, config_of(tiny_manifest, "fail"))  # found when it is read


def test_a_shard_that_cannot_be_read_is_named() -> None:
    error = missing_shard(Shard("there/a.tfrecord", 1, "0", None), FileNotFoundError("no file"))
    assert isinstance(error, InputDataError)
    assert "there/a.tfrecord: no file" in str(error)
    gone = FileNotFoundError(2, "No such file or directory", "there/a.tfrecord")
    assert str(missing_shard(Shard("there/a.tfrecord", 1, "0", None), gone)).count("there/") == 1
