from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from conf.errors import InputDataError
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.framing import CorruptRecordError
from training.reader import shards as shard_reader_module
from training.reader.shards import DamagePolicy, Shard, ShardReader, compare_begun

RECORDS = [b"%d" % i * (i % 7 + 1) for i in range(300)]


@pytest.fixture(params=[None, "GZIP"])
def shard(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setattr(shard_reader_module, "BLOCK_BYTES", 1 << 10)
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path, request.param or "") as writer:
        for record in RECORDS:
            writer.write(record)
    return Shard(path, len(RECORDS), "00000000", request.param)


def read_all(reader: ShardReader, *stops: int) -> list[bytes]:
    found = []
    for stop in stops:
        while (block := reader.read(stop)) is not None:
            assert block.first_record + len(block.index) <= stop
            data = block.data.tobytes()
            found += [data[start : start + size] for start, size in block.index.tolist()]
    return found


@pytest.mark.parametrize("on_corrupt", ["fail", "skip_record"])
@pytest.mark.parametrize("first", [0, 1, 57, 299])
def test_records_from_any_one_on(shard: Shard, first: int, on_corrupt: str) -> None:
    reader = ShardReader(shard, first, DamagePolicy(on_corrupt))
    assert read_all(reader, 300) == RECORDS[first:]
    assert reader.position == 300


@pytest.mark.parametrize("shard", [None], indirect=True)
def test_what_is_read_from_a_later_record_on_is_checked(shard: Shard) -> None:
    """Records that are passed over are, too: the checksum of the file goes through them."""
    content = bytearray(Path(shard.path).read_bytes())
    content[content.index(RECORDS[200])] ^= 1
    Path(shard.path).write_bytes(content)
    with pytest.raises(CorruptRecordError, match=r"checksum of the payload"):
        read_all(ShardReader(shard, 57, DamagePolicy()), 300)
    with pytest.raises(CorruptRecordError, match=r"checksum of the payload"):
        read_all(ShardReader(shard, 299, DamagePolicy()), 300)


@pytest.mark.parametrize("on_corrupt", ["fail", "skip_record"])
@pytest.mark.parametrize("first", [0, 57, 300])
def test_the_whole_file_is_compared_with_its_checksum(
    shard: Shard, first: int, on_corrupt: str
) -> None:
    path = Path(shard.path)
    same = replace(shard, crc32c=describe_file(path.parent, path).crc32c)
    for stop in (first, 100, 300):  # wherever reading ended
        damage = DamagePolicy(on_corrupt)
        reader = ShardReader(same, first, damage)
        read_all(reader, stop)
        assert damage.checks == {same: False}
        reader.compare()
        assert damage.checks == {same: True}
        other = ShardReader(shard, first, damage)
        read_all(other, stop)
        with pytest.raises(InputDataError, match=r"is not the file that was written"):
            other.compare()


@pytest.mark.parametrize("shard", [None], indirect=True)
def test_damage_that_was_told_explains_another_checksum(shard: Shard) -> None:
    content = bytearray(Path(shard.path).read_bytes())
    content[content.index(RECORDS[200])] ^= 1
    Path(shard.path).write_bytes(content)
    damage = DamagePolicy("skip_record")
    compare_begun(damage)  # nothing was begun
    ShardReader(shard, 0, damage).read(10)
    compare_begun(damage)
    assert damage.checks == {shard: True}
    assert damage.counts.totals() == {}  # what was not read is not counted
    with pytest.raises(CorruptRecordError):
        ShardReader(shard, 0, DamagePolicy()).compare()


def test_it_stops_where_it_is_told_and_goes_on(shard: Shard) -> None:
    reader = ShardReader(shard, 10, DamagePolicy())
    assert read_all(reader, 25) == RECORDS[10:25]
    assert reader.position == 25
    assert reader.read(25) is None
    assert read_all(reader, 26, 280, 300) == RECORDS[25:]
    assert reader.read(400) is None
