from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import ShardInfo, SplitInfo
from etl.tfrecord.codec.crc32c import describe_file
from jobs.inspection.records import read_dataset_head, read_first
from jobs.inspection.verify import count_records, verify_dataset
from tests.jobs.inspection.conftest import CONFIG
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset


def test_reads_over_shard_borders(version):
    manifest = read_manifest(version)
    rows = manifest.split("catalog").shards[0].rows
    records = read_dataset_head(version, manifest, rows + 2, "catalog")
    assert [record["movie_id"] for record in records] == list(range(2, rows + 4))
    assert records[0]["title"] == "Film 1"


def test_absent_features_are_left_out(version):
    record = read_dataset_head(version, read_manifest(version), 1, "catalog")[0]
    assert set(record) == {"movie_id", "title"}


def test_the_first_split_with_records_by_default(version):
    manifest = read_manifest(version)
    assert read_dataset_head(version, manifest, 1, None) == read_dataset_head(
        version, manifest, 1, "train"
    )


def test_no_more_than_there_are(version):
    manifest = read_manifest(version)
    assert len(read_dataset_head(version, manifest, 10_000, "test")) == manifest.split("test").rows


def test_features_inferred_from_a_bare_shard_agree_with_the_schema(version):
    manifest = read_manifest(version)
    path = version / manifest.split("train").shards[0].path
    known = read_first([path], 5, manifest)
    inferred = read_first([path], 5)
    for one, other in zip(known, inferred, strict=True):
        assert {k: v for k, v in one.items() if v != []} == {
            k: v for k, v in other.items() if v != []
        }


def test_an_unknown_split_is_refused(version):
    with pytest.raises(InputDataError, match="no such split"):
        read_dataset_head(version, read_manifest(version), 1, "tset")


def test_a_version_without_records(version):
    empty = replace(read_manifest(version), splits=())
    with pytest.raises(InputDataError, match="holds no records"):
        read_dataset_head(version, empty, 1, None)


def test_bytes_that_are_no_text_are_spelt_out(tmp_path):
    import pyarrow as pa

    from etl.tfrecord.table import TableWriter

    path = tmp_path / "raw.tfrecord"
    batch = pa.record_batch({"a": pa.array([b"\xff\x00"]), "l": pa.array([[b"x", b"\xfe"]])})
    with TableWriter(path, batch.schema) as writer:
        writer.write(batch)
    assert read_first([path], 1) == [{"a": "\\xff\x00", "l": ["x", "\\xfe"]}]


def _flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(bytes(data))


def _reference_crc32c(data: bytes) -> str:
    """Bit by bit, after RFC 3720, appendix B.4."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return f"{register ^ 0xFFFFFFFF:08x}"


def test_a_sound_version(version):
    manifest = read_manifest(version)
    pieces: list[int] = []
    result = verify_dataset(version, manifest, pieces.append)
    assert result.problems == ()
    assert result.rows == sum(split.rows for split in manifest.splits)
    assert result.bytes == sum(pieces)
    assert result.files == 3 + 4 * 2 + len(manifest.other_files)
    assert json.loads(json.dumps(result.to_json()))["ok"] is True


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_a_flipped_byte_in_any_place_is_found(tmp_path, compression):
    config = replace(CONFIG, compression=compression, users=12)
    version = write_dataset(tmp_path, config)
    manifest = read_manifest(version)
    shard = manifest.split("train").shards[1]
    file = version / shard.path
    original = file.read_bytes()
    for position in range(0, len(original), len(original) // 23):
        _flip(file, position)
        problems = verify_dataset(version, manifest).problems
        assert {problem.file for problem in problems} == {shard.path}, position
        assert any("CRC-32C is" in problem.what for problem in problems)
        file.write_bytes(original)


def test_a_damaged_record_s_offset_is_named(version):
    manifest = read_manifest(version)
    shard = manifest.split("train").shards[0]
    file = version / shard.path
    first = int.from_bytes(file.read_bytes()[:8], "little") + 16
    _flip(file, first + 12)
    whats = [problem.what for problem in verify_dataset(version, manifest).problems]
    assert any(f"at byte offset {first} (record 1)" in what for what in whats)


def test_several_problems_are_all_found(version):
    manifest = read_manifest(version)
    missing, cut = (shard for shard in manifest.split("test").shards)
    (version / missing.path).unlink()
    file = version / cut.path
    file.write_bytes(file.read_bytes()[:-3])
    _flip(version / "encoders" / "movie_id.parquet", 40)
    found = {problem.file: problem.what for problem in verify_dataset(version, manifest).problems}
    assert found[missing.path] == "is missing"
    assert set(found) == {missing.path, cut.path, "encoders/movie_id.parquet"}
    whats = [p.what for p in verify_dataset(version, manifest).problems if p.file == cut.path]
    assert any("bytes long" in what for what in whats)
    assert any("truncated" in what for what in whats)


def test_another_sound_file_under_the_same_name(version):
    manifest = read_manifest(version)
    one, other = manifest.split("test").shards
    (version / one.path).write_bytes((version / other.path).read_bytes())
    whats = [problem.what for problem in verify_dataset(version, manifest).problems]
    assert any("CRC-32C" in what for what in whats)
    assert any("no offset" in what for what in whats)


def test_a_manifest_that_lies_about_the_rows(version):
    manifest = read_manifest(version)
    shard = manifest.split("test").shards[0]
    lie = SplitInfo("test", (replace(shard, rows=shard.rows + 1),))
    problems = verify_dataset(version, replace(manifest, splits=(lie,))).problems
    assert len(problems) == 1
    assert f"holds {shard.rows:,} records" in problems[0].what


def test_a_manifest_cannot_make_it_read_elsewhere(version, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    link = SplitInfo("test", (ShardInfo("../../../outside", 1, 6, _reference_crc32c(b"secret")),))
    manifest = replace(read_manifest(version), splits=(link,))
    result = verify_dataset(version, manifest)
    assert [problem.what for problem in result.problems] == ["lies outside its dataset version"]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 5000])
def test_checksums_agree_with_the_definition(tmp_path, size):
    file = tmp_path / "file"
    file.write_bytes(bytes(i * 31 % 256 for i in range(size)))
    found = describe_file(tmp_path, file)
    assert (found.bytes, found.crc32c) == (size, _reference_crc32c(file.read_bytes()))


def test_records_are_counted_and_damage_is_named(tmp_path):
    version = write_dataset(tmp_path, FakeConfig(users=10, items=5))
    file = version / read_manifest(version).split("catalog").shards[0].path
    assert count_records(file) == (3, None)
    file.write_bytes(file.read_bytes()[:-1])
    rows, damage = count_records(file)
    assert rows <= 2
    assert "truncated payload" in damage
    assert "(record 2)" in damage
