"""Files with columns: wider types by checked casts, drift from day to day, damage."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql.types import LongType, StructField, StructType

from conf.errors import ConfigError, InputDataError
from etl.sources.bad_rows import check_columns, count_rows
from etl.sources.source import Source
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, reasons

DECIMAL = pa.decimal128(25, 1)
INSTANT = datetime.datetime(2024, 3, 1, 0, 0, 1, tzinfo=datetime.UTC)


def write(folder: Path, name: str = "a.parquet", **columns: Any) -> None:
    (folder / "in").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "in" / name)


def column(kind: str, name: str = "x", **options: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **options}


def parquet(spark: Any, folder: Path, *columns: dict[str, Any], **options: Any) -> Source:
    return read(spark, folder, declare(*columns, format="parquet", **options))


def test_wider_types_are_cast_and_what_does_not_fit_is_counted(spark, tmp_path):
    day = datetime.date(2024, 3, 1)
    write(
        tmp_path,
        small=pa.array([1, 2, 3, 4], pa.int8()),
        big=pa.array([Decimal(7), Decimal(2**63), Decimal("8.5"), Decimal(9)], DECIMAL),
        real=pa.array([2.0, 3.0, 4.0, 2.0**63]),
        flag=[True, False, True, True],
        code=pa.array([Decimal("1.50")] * 4, pa.decimal128(5, 2)),
        blob=pa.array([b"caf\xc3\xa9"] * 4),
        day=[day] * 4,
        at=pa.array([INSTANT] * 4, pa.timestamp("us", "UTC")),
        text=["1"] * 4,
        w=pa.array([[1.5, 2.0]] * 4, pa.list_(pa.float64())),
    )
    kinds = {"small": "int64", "big": "int64", "real": "int64", "flag": "int64", "code": "string"}
    kinds |= {"blob": "string", "day": "timestamp", "at": "timestamp", "text": "float64"}
    columns = [column(kind, name) for name, kind in {**kinds, "w": "list<float32>"}.items()]
    ms = 1_709_251_200_000
    assert outcomes(parquet(spark, tmp_path, *columns)) == [
        (1, 7, 2, 1, "1.50", "café", ms, ms + 1000, 1.0, [1.5, 2.0]),
        "not_int64:big",
        "not_int64:big",
        "not_int64:real",
    ]


UNREAD: dict[str, pa.Array] = {
    "ns": pa.array([1], pa.timestamp("ns")),
    "half": pa.array(np.array([1], np.float16)),
    "time": pa.array([1], pa.time64("us")),
    "time_ms": pa.array([1], pa.time32("ms")),
    "uuid": pa.array([b"0" * 16], pa.uuid()),
    "wide": pa.array([Decimal(1)], pa.decimal256(60, 2)),
    "times": pa.array([[1]], pa.list_(pa.time64("us"))),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.time64("us"))),
}
"""Values of types that Spark does not read."""


def test_types_that_spark_does_not_read_are_no_matter_where_no_column_is_declared(spark, tmp_path):
    view = pa.array(["a"], pa.string_view())
    nested = pa.array(
        [{"id": 7, "ns": 1}], pa.struct([("id", pa.int64()), ("ns", pa.timestamp("ns"))])
    )
    for number, (kind, values) in enumerate(UNREAD.items()):
        part = {"id": [number], kind: values, "s": view, "a.b": [1.5], "user": nested}
        write(tmp_path, f"{kind}.parquet", **part)
    columns = [INT, column("string", "s"), column("float64", field="a.b")]
    columns.append(column("int64", "user", field="user.id"))
    source = parquet(spark, tmp_path, *columns)
    assert sorted(outcomes(source)) == [(n, "a", 1.5, 7) for n in range(len(UNREAD))]
    with pytest.raises(InputDataError) as error:
        parquet(spark, tmp_path, *columns, new_columns="fail")
    assert all(kind in str(error.value.received) for kind in UNREAD)


def write_decimals(spark: Any, path: Path, cents: list[int | None]) -> None:
    """A file of decimals in byte arrays, as other writers make them."""
    jvm = spark._jvm
    parquet = jvm.org.apache.parquet
    text = "message m { optional binary x (DECIMAL(4,2)); }"
    schema = parquet.schema.MessageTypeParser.parseMessageType(text)
    target = jvm.org.apache.hadoop.fs.Path(str(path))
    writer = parquet.hadoop.example.ExampleParquetWriter.builder(target).withType(schema).build()
    for value in cents:
        group = parquet.example.data.simple.SimpleGroup(schema)
        if value is not None:
            binary = parquet.io.api.Binary.fromConstantByteArray(value.to_bytes(3, signed=True))
            group.append("x", binary)
        writer.write(group)
    writer.close()


def test_decimals_in_byte_arrays_are_read(spark, tmp_path):
    write_decimals(spark, tmp_path / "in" / "a.parquet", [150, -225, None])
    for kind, expected in (("float64", [1.5, -2.25, None]), ("string", ["1.50", "-2.25", None])):
        source = parquet(spark, tmp_path, column(kind, nullable=True))
        assert outcomes(source) == [(value,) for value in expected]


def test_fractions_of_epochs_are_cut_and_nan_is_missing_where_a_number_may_be(spark, tmp_path):
    times = [1593878903.438, -0.0005, float("nan"), 5.0, 5.0]
    exact = [Decimal("1593878903.4389"), None, Decimal(5), Decimal(5), Decimal(5)]
    x = [1.5, float("nan"), 2.0, float("inf"), 1.0]
    y = [1.0, 2.0, 3.0, 4.0, float("nan")]
    write(tmp_path, at=times, exact=pa.array(exact, pa.decimal128(20, 4)), x=x, y=y)
    columns = [
        column("timestamp", name, timestamp_format="epoch_s", nullable=True)
        for name in ("at", "exact")
    ]
    columns += [column("float32", nullable=True, maximum=9), column("float32", "y")]
    moment = 1_593_878_903_438
    assert outcomes(parquet(spark, tmp_path, *columns)) == [
        (moment, moment, 1.5, 1.0),
        (-1, None, None, 2.0),
        "not_timestamp:at",
        "not_finite:x",
        "not_finite:y",
    ]


def test_text_in_files_is_checked_as_text_in_lines_is(spark, tmp_path):
    bytes_ = pa.array([b"ok", b"\xff", None], pa.binary())
    write(tmp_path, x=bytes_, id=["1", "2", "3"], n=pa.array(["12_3 4", "_3", "5"]))
    clicks = column("list<int64>", "n", separator=" ", pair="c", pair_default=0)
    source = parquet(spark, tmp_path, INT, column("string"), clicks)
    assert good(source) == [(1, "ok", [12, 4], [3, 0])]
    assert reasons(source) == ["not_utf8:x", "null:x"]
    assert '"id":"3"' in source.bad.where("reason = 'null:x'").first()["line"]


def test_bytes_are_read_as_they_are(spark, tmp_path):
    vector = np.array([0.1, -2.5]).tobytes()
    write(tmp_path, id=["1", "2", "3"], x=pa.array([vector, b"", None], pa.binary()))
    source = parquet(spark, tmp_path, INT, column("bytes"))
    assert good(source) == [(1, vector), (2, b"")]
    assert reasons(source) == ["null:x"]
    with pytest.raises(ValidationError):
        declare(column("bytes"), format="csv")
    with pytest.raises(ValidationError):
        declare(column("bytes", one_of=["a"]), format="parquet")


def test_lists_of_texts_are_read_value_by_value(spark, tmp_path):
    texts = [["a", "é"], [], None, ["b"], ["b", None], ["b"]]
    write(tmp_path, x=texts, id=[["1", "2"], [], ["4"], ["3", "x"], ["5"], None])
    columns = [column("list<string>", nullable=True), column("list<int64>", "id")]
    source = parquet(spark, tmp_path, *columns)
    # An empty list is no null list, and a list holds no null.
    whole = [(["a", "é"], [1, 2]), ([], []), (None, [4])]
    bad = ["not_list<int64>:id", "not_list<string>:x", "null:id"]
    assert outcomes(source) == [*whole, *bad]


def test_vectors_of_spark_ml_are_lists_of_their_numbers(spark, tmp_path):
    vectors = [Vectors.dense(1.5, 0.0, -2.0), Vectors.sparse(3, {1: 4.0}), None]
    rows = [(i, vector) for i, vector in enumerate(vectors)]
    schema = StructType([StructField("id", LongType()), StructField("x", VectorUDT())])
    frame = spark.createDataFrame(rows, schema)
    frame.coalesce(1).write.parquet(str(tmp_path / "in"))
    source = parquet(spark, tmp_path, INT, column("list<float32>"))
    assert outcomes(source) == [(0, [1.5, 0.0, -2.0]), (1, [0.0, 4.0, 0.0]), "null:x"]
    with pytest.raises(InputDataError):
        parquet(spark, tmp_path, INT, column("float32"))


NESTED = pa.array([{"ns": 1}], pa.struct([("ns", pa.timestamp("ns"))]))


def test_columns_that_cannot_be_read_as_declared_are_refused(spark, tmp_path):
    read_as = [
        (pa.array([[1]]), column("int64")),
        (pa.array([1.5]), column("string")),
        (pa.array([1]), column("timestamp")),
        (pa.array([1]), column("bytes")),
        (pa.array([{"a": 1}]), column("string")),
        (pa.array([datetime.date(2024, 3, 1)]), column("int64")),
        (pa.array(["1 2"]), column("list<int64>")),
        (pa.array([1]), column("int64", "y")),
        (NESTED, column("string", field="x.ns")),
        *((values, column("string")) for values in UNREAD.values()),
    ]
    for values, declared in read_as:
        write(tmp_path, id=[1], x=values)
        with pytest.raises(InputDataError):
            parquet(spark, tmp_path, INT, declared)
    # A value that Spark does not read is no null, though another file has one that it reads.
    write(tmp_path, id=[1], x=NESTED)
    write(tmp_path, "b.parquet", id=[2], x=[{"ns": 1}])
    with pytest.raises(InputDataError):
        parquet(spark, tmp_path, INT, column("int64", field="x.ns", nullable=True))
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(InputDataError):
        parquet(spark, tmp_path, INT)


def test_a_column_whose_type_changes_from_file_to_file(spark, tmp_path):
    write(tmp_path, "1.parquet", id=pa.array([1, 2], pa.int32()))
    write(tmp_path, "2.parquet", id=pa.array(["3", "x"]), more=[1, 1])
    write(tmp_path, "3.parquet", id=pa.array([5], pa.int64()))
    source = parquet(spark, tmp_path, INT)
    assert outcomes(source) == [(1,), (2,), (3,), "not_int64:id", (5,)]


def test_a_column_that_some_files_lack_is_null_there(spark, tmp_path):
    kinds = ("int64", "float32", "string")
    write(tmp_path, "1.parquet", id=[1])
    write(tmp_path, "2.parquet", id=[2], x=["a"], **{kind: [["7"]] for kind in kinds})
    lists = [column(f"list<{kind}>", kind, nullable=True) for kind in kinds]
    source = parquet(spark, tmp_path, INT, column("string", nullable=True), *lists)
    assert good(source) == [(1, None, None, None, None), (2, "a", [7], [7.0], ["7"])]
    assert reasons(parquet(spark, tmp_path, INT, column("string"))) == ["null:x"]


def test_new_and_empty_columns_are_reported_by_policy(spark, tmp_path, caplog):
    write(tmp_path, id=[1], x=pa.array([None], pa.string()), y=[1])
    columns = [INT, column("string", nullable=True)]
    counts = count_rows(parquet(spark, tmp_path, *columns))
    check_columns("log", declare(*columns, format="parquet"), counts.new, counts.empty)
    assert "not declared: y" in caplog.text
    assert "single value: x" in caplog.text
    with pytest.raises(InputDataError):
        parquet(spark, tmp_path, *columns, new_columns="fail")


def test_names_in_the_input_paths_into_structs_and_orc(spark, tmp_path):
    frame = spark.createDataFrame(
        [(1, {"id": "a"}, 2.0)], "`user.id` int, `Who` struct<id string>, odd double"
    )
    frame.write.orc(str(tmp_path / "in"))
    columns = [{**INT, "field": "user.id"}, column("string", field="Who.id")]
    assert good(read(spark, tmp_path, declare(*columns, format="orc"))) == [(1, "a")]


def test_names_inside_of_structs_may_have_dots(spark, tmp_path):
    info = [{"more.info": {"age": 3}, "age": 4}]
    write(tmp_path, **{"id": [1], "user": info, "user.id": ["a"], "a.b": [{"c": 2}]})
    fields = {"name": "user.id", "age": "user.more.info.age", "c": "a.b.c"}
    columns = [column("string", name, field=field) for name, field in fields.items()]
    source = parquet(spark, tmp_path, INT, *columns, new_columns="fail")
    assert good(source) == [(1, "a", "3", "2")]


def test_avro_is_read_or_what_it_needs_is_said(spark, tmp_path):
    frame = spark.createDataFrame([(1,), (2,)], "id int")
    try:
        frame.coalesce(1).write.format("avro").save(str(tmp_path / "in"))
    except Exception:
        (tmp_path / "in").write_bytes(b"Obj\x01")
        with pytest.raises(ConfigError) as refused:
            read(spark, tmp_path, declare(INT, format="avro"))
        assert refused.value.exit_code == 2
        assert "spark-avro" in str(refused.value)
    else:
        assert good(read(spark, tmp_path, declare(INT, format="avro"))) == [(1,), (2,)]
