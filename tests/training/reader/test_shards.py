from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.framing import CorruptRecordError
from training.input.batches import build_train_dataset
from training.reader import shards as shard_reader_module
from training.reader.damage import DamagePolicy, InputCounts
from training.reader.shards import (
    CachedReader,
    Shard,
    ShardReader,
    compare_begun,
    filled_shards,
    split_runs,
)
from training.reader.split_source import InputOptions


def test_paths_and_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    shards = filled_shards(tiny_manifest, "train")
    assert [Path(shard.path).name for shard in shards] == [
        f"part-{i:05d}.tfrecord" for i in range(4)
    ]
    assert sum(shard.rows for shard in shards) == 780


@pytest.mark.parametrize("change", [{"record_type": "ByteArray"}, {"compression": "zstd"}])
def test_records_that_training_does_not_read(
    change, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises(InputDataError, match=next(iter(change.values()))):
        filled_shards(replace(tiny_manifest, **change), "train")


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
        assert damage.checks.select_begun() == [same]
        reader.compare()
        assert damage.checks.select_begun() == []
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
    assert damage.checks.select_begun() == []
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


def test_beyond_the_last_record_there_is_nothing(shard: Shard) -> None:
    assert ShardReader(shard, 300, DamagePolicy()).read(400) is None


def read(version: Path, config: InputConfig, epoch: int = 0) -> list[list[int]]:
    manifest = read_manifest(version)
    dataset = build_train_dataset(version, manifest, config, epoch=epoch, seed=3)
    return [batch["movie_id"].numpy().tolist() for batch in dataset]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_later_epochs_decode_nothing_and_give_the_same(
    kind, tmp_path: Path, tiny_version: Path, monkeypatch
) -> None:
    version = tmp_path / "copy"
    shutil.copytree(tiny_version, version)
    place = {"cache_dir": str(tmp_path / "kept")} if kind == "disk" else {}
    base = {"batch_size": 16, "shuffle_buffer": 300}
    config = InputConfig.model_validate({**base, "cache": kind, **place})
    plain = InputConfig.model_validate(base)
    expected = [read(version, plain, epoch) for epoch in (0, 1)]
    assert read(version, config) == expected[0]
    monkeypatch.setattr("training.reader.shuffle_buffer.ShardReader", None)
    assert read(version, config, 1) == expected[1]
    assert read(version, config) == expected[0]


@pytest.mark.parametrize("damage", ["cut", "short", "empty", "flipped"])
def test_a_damaged_file_is_made_again(
    damage: str, tmp_path: Path, tiny_version: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = InputConfig.model_validate(
        {"batch_size": 16, "cache": "disk", "cache_dir": str(tmp_path)}
    )
    expected = read(tiny_version, config)
    files = sorted(tmp_path.glob("*.arrow"))
    sound = [file.read_bytes() for file in files]
    for file in files:
        content = bytearray(file.read_bytes())
        if damage == "flipped":  # In the midst of the columns.
            content[len(content) // 2] ^= 1
        else:
            del content[{"cut": len(content) - 1, "short": 100, "empty": 0}[damage] :]
        file.write_bytes(content)
    assert read(tiny_version, config) == expected
    assert "is damaged and is made again" in caplog.text
    assert [file.read_bytes() for file in files] == sound


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_a_damaged_shard_lacks_is_counted_each_epoch_until_it_is_mended(
    kind, tmp_path: Path, tiny_version: Path
) -> None:
    version = tmp_path / "copy"
    shutil.copytree(tiny_version, version)
    manifest = read_manifest(version)
    shard = version / "train" / "part-00001.tfrecord"
    sound = shard.read_bytes()
    shard.write_bytes(bytes([*sound[:40], sound[40] ^ 1, *sound[41:]]))
    place = {"cache_dir": str(tmp_path / "kept")} if kind == "disk" else {}
    config = InputConfig.model_validate(
        {"batch_size": 16, "cache": kind, "on_corrupt": "skip_record", **place}
    )

    def read_epoch(epoch: int) -> tuple[int, dict[str, int]]:
        counts = InputCounts()
        dataset = build_train_dataset(
            version, manifest, config, epoch=epoch, seed=3, options=InputOptions(counts=counts)
        )
        return sum(int(batch["movie_id"].shape[0]) for batch in dataset), counts.totals()

    assert [read_epoch(epoch) for epoch in (0, 1)] == [(779 // 16 * 16, {"bad_records": 1})] * 2
    shard.write_bytes(sound)
    assert read_epoch(2) == (780 // 16 * 16, {})


def test_runs_keep_the_numbers_of_their_records() -> None:
    batch = pa.RecordBatch.from_pydict({"v": [10, 12, 13, 15]})
    sound = np.array([True, False, True, True, False, True])
    runs = list(split_runs(10, batch, sound))
    assert [(n, r.column(0).to_pylist()) for n, r in runs] == [
        (10, [10]), (12, [12, 13]), (15, [15])
    ]  # fmt: skip
    reader = CachedReader(runs, 11)
    assert reader.read(13)[0] == 12
    assert reader.read(13) is None
    number, rest = reader.read(99)
    assert (number, rest.column(0).to_pylist()) == (13, [13])
    assert reader.read(99)[0] == 15
    assert reader.read(99) is None
