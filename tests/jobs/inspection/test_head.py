from __future__ import annotations

from dataclasses import replace

import pytest

from conf.dataset import read_manifest
from conf.errors import InputDataError
from jobs.inspection.head import read_dataset_head, read_head, wire_features


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
    known = read_head(path, 5, wire_features(manifest.schema))
    inferred = read_head(path, 5)
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

    from etl.tfrecord.writer import ShardWriter

    path = tmp_path / "raw.tfrecord"
    batch = pa.record_batch({"a": pa.array([b"\xff\x00"]), "l": pa.array([[b"x", b"\xfe"]])})
    with ShardWriter(path, batch.schema) as writer:
        writer.write(batch)
    assert read_head(path, 1) == [{"a": "\\xff\x00", "l": ["x", "\\xfe"]}]
