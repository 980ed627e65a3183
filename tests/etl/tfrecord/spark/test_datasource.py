"""`format("tfrecord")` in a real Spark session."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyspark.sql.functions as F
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.framing import BadRange
from etl.tfrecord.spark.datasource import register_tfrecord
from etl.tfrecord.spark.failures import known_failures, translate_failure
from etl.tfrecord.spark.read_task import DamageLog, QuarantinedRange
from etl.tfrecord.table import write_table
from tests.tfrecord_files import read_quarantine

FORMAT = "sluice"  # the name that no other connector can claim


def shard_names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.startswith("part-"))


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def test_tensorflow_reads_spark_output_and_empty_partitions_leave_no_file(spark, tmp_path):
    frame = spark.range(0, 50, 1, 2).repartition(8, F.col("id") % 2)
    frame.write.format("tfrecord").mode("append").option("codec", "gzip").save(str(tmp_path))
    names = shard_names(tmp_path)
    assert 0 < len(names) <= 2
    assert all(name.endswith("-c000.tfrecord.gz") for name in names)
    assert not list(tmp_path.glob("_temporary*"))
    records = tf.data.TFRecordDataset(
        [str(tmp_path / name) for name in names], compression_type="GZIP"
    )
    ids = [tf.train.Example.FromString(r.numpy()).features.feature["id"] for r in records]
    assert sorted(f.int64_list.value[0] for f in ids) == list(range(50))
    shards = json.loads((tmp_path / "_sluice_commit.json").read_text())["shards"]
    assert sorted(shard["path"] for shard in shards) == names
    assert sum(shard["rows"] for shard in shards) == 50


def test_the_old_connectors_name_and_options_work(spark, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(7, [[1, 2], [3]])], "id long, steps array<array<long>>")
    writer = frame.write.format("tfrecords").mode("overwrite")
    writer.option("recordType", "SequenceExample").option("writeLocality", "distributed").option(
        "codec", "org.apache.hadoop.io.compress.GzipCodec"
    ).save(str(tmp_path))
    (name,) = shard_names(tmp_path)
    (record,) = tf.data.TFRecordDataset(str(tmp_path / name), compression_type="GZIP")
    example = tf.train.SequenceExample.FromString(record.numpy())
    steps = example.feature_lists.feature_list["steps"].feature
    assert [list(step.int64_list.value) for step in steps] == [[1, 2], [3]]
    read = spark.read.format("tfrecords").option("recordType", "SequenceExample")
    assert read.load(str(tmp_path)).first().steps == [[1, 2], [3]]


def test_overwrite_with_deterministic_names_gives_equal_bytes(spark, tmp_path: Path) -> None:
    frame = spark.range(0, 999, 1, 3).withColumn("x", F.sqrt("id").cast("float"))
    runs = []
    for _ in range(2):
        writer = frame.write.format(FORMAT).mode("overwrite")
        writer.option("deterministicNames", "true").save(f"file://{tmp_path}")
        runs.append({k: v for k, v in files_of(tmp_path).items() if k.startswith("part-")})
    assert runs[0] == runs[1]
    assert shard_names(tmp_path) == [f"part-0000{k}.tfrecord" for k in range(3)]


def test_failed_job_leaves_earlier_data_and_no_trace(spark, tmp_path: Path) -> None:
    spark.range(5).coalesce(1).write.format(FORMAT).mode("overwrite").save(str(tmp_path))
    before = files_of(tmp_path)
    bad = spark.range(0, 100, 1, 2).select(
        F.when(F.col("id") == 77, 1e300).otherwise(1.0).alias("price")
    )
    with pytest.raises(PySparkException, match="float32 cannot stand for"):
        bad.write.format(FORMAT).mode("overwrite").save(str(tmp_path))
    assert files_of(tmp_path) == before
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_a_jvm_connector_of_the_same_name_is_reported(spark, monkeypatch) -> None:
    from etl.tfrecord.spark import datasource

    claimed = {"tfrecords": "com.example.Other"}
    monkeypatch.setattr(datasource, "_find_jvm_providers", lambda spark: claimed)
    with pytest.warns(UserWarning, match=r"com\.example\.Other.*'tfrecords'.*sluice"):
        datasource.register_tfrecord(spark)


def test_registering_twice_does_no_harm(spark, capfd) -> None:
    spark.sparkContext.setLogLevel("WARN")
    try:
        register_tfrecord(spark)
        spark.range(1).count()
    finally:
        spark.sparkContext.setLogLevel("OFF")
    assert "already" not in capfd.readouterr().err


def test_sparks_own_partition_by_is_refused_not_ignored(spark, tmp_path: Path) -> None:
    frame = spark.range(3).withColumn("d", F.col("id") % 2)
    with pytest.raises(Exception, match="partitioning"):
        frame.write.partitionBy("d").format(FORMAT).mode("append").save(str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


TABLES = {
    "CREATE TABLE": lambda spark, path: spark.sql(f"create table t using sluice location '{path}'"),
    "createTable": lambda spark, path: spark.catalog.createTable("t", str(path), FORMAT),
    "AS SELECT": lambda spark, path: spark.sql("create table t using sluice as select 1L id"),
    "saveAsTable": lambda spark, path: spark.range(3).write.format(FORMAT).saveAsTable("t"),
    "writeTo": lambda spark, path: spark.range(3).writeTo("t").using(FORMAT).create(),
    "load": lambda spark, path: spark.read.format(FORMAT).load(),
}


@pytest.mark.parametrize("make", TABLES)
def test_a_table_is_refused_with_the_calls_that_work(spark, tmp_path: Path, make: str) -> None:
    write(spark.range(3), tmp_path)
    with pytest.raises(PySparkException) as refused:
        TABLES[make](spark, tmp_path)
    known = translate_failure(refused.value)
    assert isinstance(known, ConfigError)
    assert len(str(known).splitlines()) == 2
    assert ".load(path)" in str(known)
    assert not spark.catalog.tableExists("t")


def test_a_table_whose_columns_are_given_is_refused_where_it_is_used(spark, tmp_path: Path) -> None:
    write(spark.range(3), tmp_path)
    spark.sql(f"create table t (id bigint) using sluice location '{tmp_path}'")
    try:
        for use in ("select * from t", "insert into t values (1)"):
            with pytest.raises(PySparkException) as refused:
                spark.sql(use).collect()
            assert isinstance(translate_failure(refused.value), ConfigError)
    finally:
        spark.sql("drop table t")
    spark.sql(f"create temporary view v using sluice options (path '{tmp_path}')")
    assert sorted(row.id for row in spark.table("v").collect()) == [0, 1, 2]
    write(spark.range(4), tmp_path)
    with pytest.raises(InputDataError, match="No such file"), known_failures():
        spark.table("v").collect()
    spark.catalog.dropTempView("v")


def write(frame, path: Path, mode: str = "overwrite", **options: object) -> None:
    frame.write.format(FORMAT).mode(mode).options(**options).save(str(path))


def read_ids(spark, path: Path) -> list[int]:
    files = sorted(str(p) for p in path.rglob("part-*") if "_" not in str(p.relative_to(path))[0])
    records = tf.data.TFRecordDataset(files)
    return sorted(
        tf.train.Example.FromString(r.numpy()).features.feature["id"].int64_list.value[0]
        for r in records
    )


def test_partition_values_become_directories_that_spark_reads(spark, tmp_path: Path) -> None:
    from etl.tfrecord.commit.output_directory import read_output_manifest

    frame = spark.range(0, 60, 1, 2).selectExpr(
        "id", "date_add(date'2026-01-01', int(id % 3)) d", "if(id % 2 = 0, null, 'a/b=%') c"
    )
    write(frame, tmp_path, partitionBy='["d","c"]', maxRecordsPerFile=4)
    committed = read_output_manifest(tmp_path)
    assert committed.partition_columns == (("d", "date"), ("c", "string"))
    assert [f.name for f in committed.features] == ["id"]
    assert sum(s.rows for s in committed.shards) == 60
    assert max(s.rows for s in committed.shards) == 4
    assert all((tmp_path / s.path).stat().st_size == s.bytes for s in committed.shards)
    folders = {s.path.rpartition("/")[0]: dict(s.partition_values) for s in committed.shards}
    assert len(folders) == 6
    assert folders["d=2026-01-01/c=__HIVE_DEFAULT_PARTITION__"] == {"d": "2026-01-01", "c": None}
    found = spark.read.format("binaryFile").load(str(tmp_path)).select("d", "c").distinct()
    assert {(str(row.d), row.c) for row in found.collect()} == {
        (values["d"], values["c"]) for values in folders.values()
    }
    assert read_ids(spark, tmp_path) == list(range(60))


def test_dynamic_overwrite_replaces_the_partitions_written_and_static_all(spark, tmp_path):
    frame = spark.range(0, 30, 1, 2).selectExpr("id", "id % 3 as p")
    write(frame, tmp_path, partitionBy="p", index="true")
    again = frame.where("p = 1").selectExpr("id + 100 as id", "p")
    write(again, tmp_path, partitionBy="p", partitionOverwriteMode="dynamic")
    kept = [k for k in range(30) if k % 3 != 1]
    assert read_ids(spark, tmp_path) == kept + [k + 100 for k in range(1, 30, 3)]
    assert sorted(p.name for p in (tmp_path / "_index").iterdir()) == ["p=0", "p=2"]
    write(again, tmp_path, partitionBy="p")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_SUCCESS", "_sluice_commit.json", "p=1"]
    assert read_ids(spark, tmp_path) == [k + 100 for k in range(1, 30, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitionBy": "idd"}, "did you mean 'id'"),
        ({"partitionBy": "x"}, "x \\(double\\)"),
        ({"partitionBy": '[".p"]'}, "hidden"),
        ({"writeLocality": "local"}, "writeLocality"),
    ],
)
def test_bad_write_options_are_refused_before_anything_is_touched(
    spark, tmp_path, options, message
):
    frame = spark.range(3).selectExpr("id", "double(id) x", "id % 2 p", "1 `.p`")
    with pytest.raises(PySparkException, match=message):
        write(frame, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_append_that_does_not_fit_is_refused(spark, tmp_path: Path) -> None:
    write(spark.range(3), tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(PySparkException, match="would not fit"):
        write(spark.range(3).selectExpr("string(id) id"), tmp_path, "append")
    with pytest.raises(PySparkException, match="compression gzip"):
        write(spark.range(3), tmp_path, "append", compression="gzip")
    assert files_of(tmp_path) == before
    write(spark.range(3).selectExpr("id", "1.5f as x"), tmp_path, "append")
    assert read_ids(spark, tmp_path) == [0, 0, 1, 1, 2, 2]


def test_a_thread_of_ones_own_finds_the_format_once_it_registers(spark, tmp_path: Path) -> None:
    def write(name: str, registers: bool) -> str | None:
        try:
            if registers:
                register_tfrecord(spark)
            writer = spark.range(3).write.format("tfrecord").mode("append")
            writer.save(str(tmp_path / name))
        except Exception as error:  # what Spark raises there is no error of PySpark's
            return str(error)
        return None

    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(write, "registered", True).result() is None
    with ThreadPoolExecutor(1) as fresh:
        # Should Spark find it by itself one day, the guide's advice can go.
        assert "Failed to find the data source: tfrecord" in str(
            fresh.submit(write, "unregistered", False).result()
        )
    assert shard_names(tmp_path / "registered")


def test_a_cut_file_is_read_as_far_as_it_goes_where_that_is_wanted(spark, tmp_path: Path) -> None:
    write(spark.range(0, 100, 1, 1), tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("part-*")
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(Exception, match="another size"):
        spark.read.format(FORMAT).load(str(tmp_path / "out")).collect()
    skipped = spark.read.format(FORMAT).option("onCorrupt", "skip").load(str(tmp_path / "out"))
    assert sorted(row.id for row in skipped.collect()) == list(range(99))


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


def bad(offset: int, data: bytes, record: int | None = None, continues: bool = False) -> BadRange:
    return BadRange(offset, np.frombuffer(data, np.uint8), record, "why", continues)


def log_damage(
    directory: Path | None, *ranges: BadRange, start: int = 0, error: BaseException | None = None
) -> list[QuarantinedRange]:
    """Reads a file as far as it goes; the ranges that the log holds."""
    with DamageLog("/data/f", start, directory and str(directory)) as log:
        for item in ranges:
            log.add(item)
        if error is not None:
            raise error
    return log.ranges


def test_pieces_become_one_range_and_bytes_are_kept(tmp_path: Path, caplog) -> None:
    with DamageLog("/data/f", 0, str(tmp_path / "aside")) as log:
        log.add(bad(10, b"abc", 1))
        log.add(bad(20, b"de", 5))
        log.add(bad(22, b"fgh", 5, continues=True))
        log.add(bad(25, b"", None))
    first, second, last = read_quarantine(tmp_path / "aside")
    assert (first.offset, first.length, first.record, first.reason) == (10, 3, 1, "why")
    assert (second.offset, second.length, last.length) == (20, 5, 0)
    saved = (tmp_path / "aside" / str(second.saved_in)).read_bytes()
    assert saved[second.saved_at :][:5] == b"defgh"
    assert "3 bad range(s) of 8 bytes" in caplog.text


def test_what_a_read_leaves_when_it_fails_stops_or_ends(tmp_path: Path, caplog) -> None:
    with pytest.raises(OSError, match="disk"):
        log_damage(tmp_path, bad(1, b"x"), error=OSError("disk"))
    assert (list(tmp_path.iterdir()), caplog.text) == ([], "")
    # One that is not finished tells what it met and replaces nothing.
    for ranges in ([bad(1, b"x"), bad(5, b"y")], [bad(1, b"x")]):
        with pytest.raises(GeneratorExit):
            log_damage(tmp_path, *ranges, error=GeneratorExit())
        assert [found.offset for found in read_quarantine(tmp_path)] == [1, 5]
    assert "2 bad range(s)" in caplog.text
    assert "1 bad range(s)" in caplog.text
    # The next one replaces what the last one left; another split has its own.
    for ranges in ([bad(1, b"x"), bad(5, b"y")], [bad(5, b"y")]):
        log_damage(tmp_path, *ranges)
        assert [found.offset for found in read_quarantine(tmp_path)] == [r.offset for r in ranges]
    log_damage(tmp_path, bad(200, b"x"), start=100)
    assert [found.offset for found in read_quarantine(tmp_path)] == [5, 200]
    log_damage(tmp_path)
    log_damage(tmp_path, start=100)
    assert list(tmp_path.iterdir()) == []
    assert log_damage(None, bad(1, b"x", 7)) == [QuarantinedRange("/data/f", 1, 1, 7, "why")]


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_partition_is_replaced_as_it_is_read(spark, tmp_path: Path, mode: str, linked) -> None:
    out = tmp_path / "out"
    folder = tmp_path / "far" if linked else out / "_p=1"
    folder.mkdir(parents=True)
    write_table(pa.table({"id": [7, 8, 9]}), folder / "by_hand.tfr")
    if linked:
        out.mkdir()
        (out / "_p=1").symlink_to("../far")
    read = spark.read.format(FORMAT)
    assert sorted((r.id, r["_p"]) for r in read.load(str(out)).collect()) == [
        (7, 1), (8, 1), (9, 1)
    ]  # fmt: skip
    frame = spark.range(2).selectExpr("id", "1 as _p")
    write(frame, out, partitionBy="_p", partitionOverwriteMode=mode)
    assert sorted((r.id, r["_p"]) for r in read.load(str(out)).collect()) == [(0, 1), (1, 1)]
    assert (folder / "by_hand.tfr").exists() == linked
