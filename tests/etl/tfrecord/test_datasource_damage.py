"""`format("tfrecord")` beside damaged or foreign files."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.tfrecord.datasource import register_tfrecord

FORMAT = "sluice"  # the name that no other connector can claim


@pytest.fixture(scope="module", autouse=True)
def _registered(spark) -> None:
    register_tfrecord(spark)


def write(frame, path: Path, mode: str = "overwrite") -> None:
    frame.write.format(FORMAT).mode(mode).save(str(path))


def test_a_cut_file_is_read_as_far_as_it_goes_where_that_is_wanted(spark, tmp_path: Path) -> None:
    write(spark.range(0, 100, 1, 1), tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("part-*")
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(Exception, match="another size"):
        spark.read.format(FORMAT).load(str(tmp_path / "out")).collect()
    skipped = spark.read.format(FORMAT).option("onCorrupt", "skip").load(str(tmp_path / "out"))
    assert sorted(row.id for row in skipped.collect()) == list(range(99))


def test_an_append_beside_a_lost_shard_is_refused(spark, tmp_path: Path) -> None:
    write(spark.range(0, 10, 1, 2), tmp_path / "out")
    sorted((tmp_path / "out").glob("part-*"))[0].unlink()
    with pytest.raises(Exception, match="is missing, but its manifest lists it"):
        write(spark.range(5), tmp_path / "out", "append")


def test_a_file_as_output_is_refused_in_words(spark, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(Exception, match="output directory cannot be made"):
        write(spark.range(5), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"


def test_a_damaged_manifest_may_be_deleted(spark, tmp_path: Path) -> None:
    writer = spark.range(3).write.format(FORMAT).mode("append")
    writer.save(str(tmp_path))
    manifest = tmp_path / "_sluice_commit.json"
    manifest.write_text(manifest.read_text()[:50])
    for attempt in (writer.save, spark.read.format(FORMAT).load):
        with pytest.raises(Exception, match=r"(?s)is damaged.*delete this one file"):
            attempt(str(tmp_path))
    manifest.unlink()
    writer.save(str(tmp_path))
    found = spark.read.format(FORMAT).load(str(tmp_path))
    assert sorted(row.id for row in found.collect()) == [0, 0, 1, 1, 2, 2]
