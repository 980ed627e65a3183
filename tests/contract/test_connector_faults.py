"""What the JVM connectors get wrong, end to end: here each comes out right or is refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import types as t

from etl.tfrecord.types.features import RECORD_TYPES
from tests.machine import some_of


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "records"


def write(frame: Any, folder: Path, **options: str) -> None:
    frame.write.format("tfrecord").options(**options).mode("overwrite").save(str(folder))


def round_trip(frame: Any, folder: Path, schema: Any = None, **options: str) -> list[tuple]:
    write(frame, folder, **options)
    reader = frame.sparkSession.read.format("tfrecord").schema(schema or frame.schema)
    return sorted((tuple(row) for row in reader.load(str(folder)).collect()), key=str)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*"))


def test_decimals_keep_their_scale(spark, folder):
    rows = [(Decimal("12.34"),), (Decimal("-0.01"),), (None,)]
    frame = spark.createDataFrame(rows, "price decimal(10,2)")
    assert round_trip(frame, folder) == sorted(rows, key=str)


@pytest.mark.parametrize(
    ("element", "values"),
    some_of(
        [("int", [1, None, 3]), ("double", [0.5, None]), ("string", ["a", None]), ("long", [None])],
        [("double", [0.5, None]), ("string", ["a", None])],
    ),
)
def test_a_null_inside_an_array_is_refused_by_name_and_leaves_nothing(
    spark, folder, element, values
):
    frame = spark.createDataFrame([(values,)], f"basket array<{element}>")
    with pytest.raises(Exception, match=r"'basket'.*null"):
        write(frame, folder)
    assert not shards(folder)


@pytest.mark.parametrize("value", some_of([(1e300,), (-1e300,), (1e39,)], [(1e39,)]))
def test_a_double_beyond_float32_is_refused_not_made_infinite(spark, folder, value):
    frame = spark.createDataFrame([(value,)], "x double")
    with pytest.raises(Exception, match="'x'"):
        write(frame, folder)
    assert not shards(folder)


def test_a_double_beyond_float32_may_be_cast(spark, folder):
    frame = spark.createDataFrame([(1e300,)], "x double")
    assert round_trip(frame, folder, float64="cast") == [(float("inf"),)]


def test_an_int64_read_as_int_is_refused_not_wrapped(spark, folder):
    write(spark.createDataFrame([(2**40,)], "id long"), folder)
    with pytest.raises(Exception, match="'id'"):
        spark.read.format("tfrecord").schema("id int").load(str(folder)).collect()


def test_booleans_and_narrow_integers_come_back(spark, folder):
    schema = "flag boolean, small byte, short short, flags array<boolean>, bytes array<byte>"
    rows = [(True, -128, 32767, [True, False], [1, -1]), (False, 127, -32768, [], []),
            (None, None, None, None, None)]  # fmt: skip
    frame = spark.createDataFrame(rows, schema)
    assert round_trip(frame, folder) == sorted(rows, key=str)


def test_types_without_a_place_on_the_wire_are_all_named_before_any_task(spark, folder):
    now = datetime.datetime(2026, 1, 1)
    frame = spark.createDataFrame(
        [(now, now.date(), {"a": 1}, 1)], "at timestamp, day date, counts map<string,int>, id long"
    )
    with pytest.raises(Exception, match=r"cannot be written|do(es)? not fit") as error:
        write(frame, folder)
    message = str(error.value)
    assert all(name in message for name in ("at", "day", "counts"))
    assert not folder.exists()


def test_dates_and_times_follow_their_options(spark, folder):
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000)
    frame = spark.createDataFrame([(now, now.date())], "at timestamp, day date")
    options = {"timestamps": "ms", "dates": "days"}
    write(frame, folder, **options)
    read = spark.read.format("tfrecord").schema("at long, day long").load(str(folder))
    epoch = datetime.datetime(1970, 1, 1)
    assert [tuple(row) for row in read.collect()] == [
        ((now - epoch) // datetime.timedelta(milliseconds=1), (now - epoch).days)
    ]


def test_structs_become_columns(spark, folder):
    frame = spark.createDataFrame([((1, "a"),), ((2, None),)], "user struct<id:long,name:string>")
    write(frame, folder)
    read = spark.read.format("tfrecord").schema("`user.id` long, `user.name` string")
    rows = [tuple(row) for row in read.load(str(folder)).collect()]
    assert sorted(rows, key=str) == [(1, "a"), (2, None)]


def test_maps_follow_their_option(spark, folder):
    frame = spark.createDataFrame([({"a": 1, "b": 2},)], "counts map<string,long>")
    write(frame, folder, maps="entries")
    read = spark.read.format("tfrecord")
    read = read.schema("`counts.keys` array<string>, `counts.values` array<long>")
    keys, values = read.load(str(folder)).collect()[0]
    assert dict(zip(keys, values, strict=True)) == {"a": 1, "b": 2}


def test_vectors_become_float_lists(spark, folder):
    rows = [(Vectors.dense([0.5, 1.5, 0.0]),), (Vectors.sparse(3, [1], [2.5]),)]
    frame = spark.createDataFrame(rows, ["embedding"])
    assert round_trip(frame, folder, t.StructType.fromDDL("embedding array<float>")) == [
        ([0.0, 2.5, 0.0],),
        ([0.5, 1.5, 0.0],),
    ]


def test_arrays_of_arrays_in_an_example_are_refused_before_any_task(spark, folder):
    frame = spark.createDataFrame([([[1]],)], "sessions array<array<long>>")
    with pytest.raises(Exception, match="sessions"):
        write(frame, folder, recordType="Example")
    assert not folder.exists()


@pytest.mark.skipif(
    "SequenceExample" not in RECORD_TYPES, reason="this version has no record type SequenceExample"
)
def test_arrays_of_arrays_go_into_a_sequence_example(spark, folder):
    rows = [(1, [[1, 2], [], [3]]), (2, []), (3, None)]
    frame = spark.createDataFrame(rows, "id long, sessions array<array<long>>")
    write(frame, folder, recordType="SequenceExample")
    reader = spark.read.format("tfrecord").option("recordType", "SequenceExample")
    read = reader.schema(frame.schema).load(str(folder)).collect()
    assert sorted(tuple(row) for row in read) == rows


def test_an_empty_list_read_as_a_scalar_is_null(spark, folder):
    write(spark.createDataFrame([([],), ([7],)], "x array<long>"), folder)
    read = spark.read.format("tfrecord").schema("x long").load(str(folder))
    assert sorted((row.x for row in read.collect()), key=str) == [7, None]


def test_null_and_empty_features_do_not_break_inference(spark, folder):
    rows = [(1, None, []), (2, None, [])]
    write(spark.createDataFrame(rows, "id long, gone long, none array<long>"), folder)
    read = spark.read.format("tfrecord").load(str(folder))
    assert sorted(row.id for row in read.collect()) == [1, 2]


def test_empty_partitions_leave_no_file(spark, folder):
    write(spark.range(2).repartition(4), folder)
    assert 1 <= len(shards(folder)) <= 2
    assert all(path.stat().st_size for path in shards(folder))
    write(spark.range(0), folder)
    assert shards(folder) == []
    assert (folder / "_SUCCESS").exists()


def test_a_file_cut_inside_a_length_header_is_refused(spark, folder):
    write(spark.range(10).coalesce(1), folder)
    [shard] = shards(folder)
    record_bytes = shard.stat().st_size // 10
    for cut in (record_bytes - 5, record_bytes - 1):  # 5 bytes, then 1 byte of the last header
        broken = folder / "broken.tfrecord"
        broken.write_bytes(shard.read_bytes()[:-cut])
        reader = spark.read.format("tfrecord").schema("id long")
        with pytest.raises(Exception, match=r"broken\.tfrecord.*truncated"):
            reader.load(str(broken)).collect()


def test_ignore_corrupt_files_drops_nothing_silently(spark, folder):
    write(spark.range(10).coalesce(1), folder)
    [shard] = shards(folder)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with pytest.raises(Exception, match=r"checksum|truncated|longer"):
            spark.read.format("tfrecord").schema("id long").load(str(folder)).collect()
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")


@pytest.mark.parametrize(
    "options",
    some_of(
        [
            ({"codec": "gzip"},),
            ({"codec": "org.apache.hadoop.io.compress.GzipCodec"},),
            ({"compression": "gzip"},),
            ({"compression": "GZIP"},),
        ],
        [({"codec": "org.apache.hadoop.io.compress.GzipCodec"},), ({"compression": "GZIP"},)],
    ),
)
def test_gzip_by_any_of_its_names_is_gzip(spark, folder, options):
    frame = spark.range(10).coalesce(1)
    assert round_trip(frame, folder, **options) == [(k,) for k in range(10)]
    [shard] = shards(folder)
    assert shard.name.endswith(".tfrecord.gz")
    assert shard.read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("options", [{"codec": "gzi"}, {"compresion": "gzip"}])
def test_a_misspelt_codec_or_option_is_refused(spark, folder, options):
    with pytest.raises(Exception, match="did you mean"):
        write(spark.range(1), folder, **options)
    assert not folder.exists()
