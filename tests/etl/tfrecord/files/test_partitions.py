"""Partition directories, against Spark's own writer and reader."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.files.data_files import (
    NULL_PARTITION,
    check_partition_columns,
    infer_partition_types,
    parse_names,
    parse_partition_path,
    partition_path,
    split_partitions,
)

AWKWARD = [
    "a b", "a/b", "a=b", "50%", "x:y", "é", "it's", "[1]", "{x}", "~&;|<>", "q?", "tab\t", "",
]  # fmt: skip
TEXTS = st.text() | st.sampled_from([NULL_PARTITION, f"{NULL_PARTITION}x", "%5F", "."])


@given(st.lists(st.tuples(st.text(min_size=1), TEXTS | st.none()), unique_by=lambda t: t[0]))
def test_paths_round_trip(columns: list[tuple[str, str | None]]) -> None:
    names, values = [n for n, _ in columns], [v for _, v in columns]
    path = partition_path(names, values)
    assert path.count("/") == max(0, len(columns) - 1)
    assert parse_partition_path(path) == {n: v or None for n, v in columns}


def test_the_text_of_null_is_not_null(spark, tmp_path: Path) -> None:
    (text,) = (partition_path(["p"], [value]) for value in [NULL_PARTITION])
    assert text != partition_path(["p"], [None]) == f"p={NULL_PARTITION}"
    for k, folder in enumerate([text, f"p={NULL_PARTITION}", "p=x"]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f").write_text(f"{k}\n")
    rows = {int(row.value): row.p for row in spark.read.text(str(tmp_path)).collect()}
    assert rows == {0: NULL_PARTITION, 1: None, 2: "x"}


def test_escapes_as_spark_does(spark, tmp_path: Path) -> None:
    rows = [(k, value) for k, value in enumerate([*AWKWARD, None])]
    frame = spark.createDataFrame(rows, "k int, `p:q` string").coalesce(1)
    frame.write.partitionBy("p:q").parquet(str(tmp_path / "out"))
    written = {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()}
    assert written == {partition_path(["p:q"], [value]) for _, value in rows}


def test_escapes_of_pyarrow_are_read(tmp_path: Path) -> None:
    values = [
        *(value for value in AWKWARD if value not in ("", NULL_PARTITION)),
        "Köln",
        "日本/%C3%BC",
        "Ã¼",
    ]
    table = pa.table({"p": values, "k": range(len(values))})
    ds.write_dataset(
        table, tmp_path, format="parquet", partitioning=["p"], partitioning_flavor="hive"
    )
    folders = [parse_partition_path(path.name)["p"] for path in tmp_path.iterdir()]
    assert sorted(map(str, folders)) == sorted(values)
    assert parse_partition_path("p=%FFx") == {"p": "\xffx"}


@pytest.mark.parametrize(
    "values",
    [
        ["1", "-7"], ["+5", "007"], ["1", "3000000000"], ["9" * 19, "1"], ["9" * 30, "3000000000"],
        ["9" * 30, "x"], ["9" * 39], ["1.5", "1"], ["1.5", "3000000000"], ["2026-01-01"],
        ["2026-01-01", "1"], ["2026-02-30"], ["2026-01-01 10:00:00"],
        ["2026-01-01 10:00:00.25", "2026-01-01"], ["2026-01"], ["2026-1-5"], ["true"],
        ["NaN"], ["2026-01-01T10"], [None, "3"], ["a", "1"], ["12:30"], ["20260101"],
        ["1d"], [" 1"], ["0x10"], ["2026-01-01 1:2:3"], ["."], ["1e3"], ["1e-3"], ["1.50e2"],
        ["1e400"], ["1.0"], ["2026-01-01 25:00:00"], ["2026-01-01 10:00:00.5"],
    ],
)  # fmt: skip
def test_types_as_spark_infers_them(spark, tmp_path: Path, values: list[str | None]) -> None:
    for value in values:
        folder = tmp_path / partition_path(["p"], [value])
        folder.mkdir()
        (folder / "f.txt").write_text("x\n")
    expected = spark.read.text(str(tmp_path)).schema["p"].dataType.simpleString()
    found = infer_partition_types(parse_partition_path(p.name) for p in tmp_path.iterdir())
    assert found == (("p", expected),)


def test_directories_must_agree() -> None:
    with pytest.raises(InputDataError, match="differ"):
        infer_partition_types([{"a": "1"}, {"a": "1", "b": "2"}])
    assert infer_partition_types([{"a": None}]) == (("a", "string"),)
    assert infer_partition_types([]) == ()
    assert infer_partition_types([{}, {}]) == ()


@pytest.mark.parametrize("path", ["=1", "a=", "a=1/a=2"])
def test_malformed_directories_are_refused(path: str) -> None:
    with pytest.raises(InputDataError, match="not a partition"):
        parse_partition_path(path)
    assert parse_partition_path("logs/a=1") == {"a": "1"}


@given(
    keys=st.lists(
        st.tuples(st.none() | st.integers(-2, 2), st.none() | st.sampled_from("xy")), max_size=60
    )
)
def test_every_row_lands_in_its_partition_in_order(keys) -> None:
    batch = pa.record_batch({"row": pa.array(range(len(keys)), pa.int64())})
    columns = [
        pa.array([k[0] for k in keys], pa.int64()), pa.array([k[1] for k in keys], pa.string())
    ]  # fmt: skip
    found = {}
    for values, rows, numbers in split_partitions(batch, columns):
        found[values] = rows["row"].to_pylist()
        assert found[values] == numbers.tolist()
    expected: dict[tuple, list[int]] = {}
    for row, (number, letter) in enumerate(keys):
        text = None if number is None else str(number)
        expected.setdefault((text, letter), []).append(row)
    assert found == expected


@pytest.mark.parametrize("columns", [1, 2, 5, 6, 40])
def test_keys_of_many_columns_and_values_stay_apart(columns: int) -> None:
    rows = 7000
    keys = [np.random.default_rng(k).permutation(rows) for k in range(columns)]
    batch = pa.record_batch({"row": list(range(rows))})
    found = {
        values: rows["row"].to_pylist()
        for values, rows, _ in split_partitions(batch, as_text(keys))
    }
    assert found == {tuple(str(key[row]) for key in keys): [row] for row in range(rows)}


def as_text(keys: list[np.ndarray]) -> list[pa.Array]:
    return [pa.array(key).cast(pa.string()) for key in keys]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([True]), "true"),
        (pa.array([datetime.date(26, 1, 2)]), "0026-01-02"),
        (pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)], pa.timestamp("us")),
         "2026-01-02 03:04:05"),
        (pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5, 120)], pa.timestamp("us")),
         "2026-01-02 03:04:05.00012"),
        (pa.array([1767322800000000], pa.timestamp("us", "Europe/Oslo")), "2026-01-02 03:00:00"),
        (pa.array([decimal.Decimal("1E+3")], pa.decimal128(10, 2)), "1000.00"),
        (pa.array(["ü/="], pa.large_string()), "ü/="),
    ],
)  # fmt: skip
def test_values_as_text(array: pa.Array, text: str) -> None:
    batch = pa.record_batch({"row": [0]})
    ((values, *_),) = split_partitions(batch, [array])
    assert values == (text,)


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(InputDataError, match="empty string"):
        list(split_partitions(pa.record_batch({"r": [1]}), [pa.array([""])]))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("d", ("d",)), (" d , c", ("d", "c")), ('["a,b", "c"]', ("a,b", "c")),
        *((bad, None) for bad in ("", "a,,b", "a,a", "[1]", "[", "[]")),
    ],
)  # fmt: skip
def test_names(text: str, names: tuple[str, ...] | None) -> None:
    if names is not None:
        assert parse_names(text) == names
        return
    with pytest.raises(ConfigError, match="partitionBy"):
        parse_names(text)


def test_every_bad_column_is_named() -> None:
    schema = pa.schema([("x", pa.float64()), ("l", pa.list_(pa.int64())), ("i", pa.int8())])
    with pytest.raises(ConfigError, match=r"(?s)2 column.*x \(double\), l \(list"):
        check_partition_columns(schema, ("x", "l", "i"))
    with pytest.raises(ConfigError, match="every column"):
        check_partition_columns(pa.schema([("i", pa.int8())]), ("i",))
    check_partition_columns(schema, ("i",))
