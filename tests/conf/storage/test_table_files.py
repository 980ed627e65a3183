"""Parquet and CSV as all readers of rows open them."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.storage.table_files import (
    CsvForm,
    OtherNumberError,
    open_csv,
    open_parquet,
    plain_columns,
    read_csv_names,
    read_parquet,
)

HASHES = ["12345678901234567890", "12345678901234567891"]
ROOT = Path(__file__).parents[3]


def read(path: Path, **form) -> pa.Table:
    rows = open_csv(path, read_csv_names(path), CsvForm(**form))
    return pa.Table.from_batches(rows.batches, rows.schema)


def write(folder: Path, text: str) -> Path:
    path = folder / "a.csv"
    path.write_text(text, newline="")
    return path


def test_nothing_else_opens_parquet() -> None:
    opens = re.compile(r"\bpq\.(ParquetFile|read_table|read_schema|read_metadata)\(")
    files = [
        p for folder in ("conf", "etl", "jobs", "training") for p in ROOT.glob(f"{folder}/**/*.py")
    ]
    assert [p.name for p in files if opens.search(p.read_text())] == ["table_files.py"]


def test_int96_times_of_any_year_are_as_written(tmp_path) -> None:
    times = [datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1, 0, 0, 0, 7), None]
    table = pa.table({"at": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert read_parquet(tmp_path / "a.parquet")["at"].to_pylist() == times
    with open_parquet(tmp_path / "a.parquet") as file:
        assert file.schema_arrow.types == [pa.timestamp("us")]


def test_views_and_dictionaries_are_plain_values(tmp_path) -> None:
    codes = pa.array(["a", None]).dictionary_encode()
    columns = [
        (codes, pa.string()),
        (pa.ListArray.from_arrays([0, 2, 2], codes), pa.list_(pa.string())),
        (pa.array([["a"], []], pa.large_list(pa.string_view())), pa.large_list(pa.string())),
        (pa.array([b"a", None], pa.binary_view()), pa.binary()),
    ]
    views = pa.table([column for column, _ in columns], names=list("abcd"))
    pq.write_table(views, tmp_path / "a.parquet")
    table = read_parquet(tmp_path / "a.parquet")
    assert table.schema.types == [kind for _, kind in columns]
    assert table.to_pylist() == views.to_pylist()
    assert plain_columns(table) is table


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_whole_numbers_that_no_float_holds_are_text(tmp_path, end) -> None:
    rows = [f"0,{HASHES[0]},1.5,0.5, 1.5", f"1,{HASHES[1]},,9007199254740993,{2**53 - 1}"]
    table = read(write(tmp_path, "\n".join(["id,hash,x,a,b", *rows]) + end))
    assert table.to_pydict() == {
        "id": [0, 1], "hash": HASHES, "x": [1.5, None],
        "a": ["0.5", "9007199254740993"], "b": [1.5, 2.0**53 - 1],
    }  # fmt: skip
    given = read(write(tmp_path, f"a\n{HASHES[0]}\n"), types={"a": pa.float64()})
    assert given["a"].to_pylist() == [float(HASHES[0])]
    late = write(tmp_path, "a,b\n" + ",1\n" * 500 + f"{HASHES[0]},2\n")
    assert read(late, block_bytes=1000)["a"].to_pylist()[-1] == HASHES[0]
    with pytest.raises(OtherNumberError) as error:
        read(write(tmp_path, "a\n" + "0.5\n" * 500 + HASHES[0] + "\n"), block_bytes=1000)
    assert error.value.column == "a"


@pytest.mark.parametrize(
    "text", ["0xDEADBEEF00000001", "-0X1", "47583311587E590003", "-1e-400", "007"]
)
@pytest.mark.parametrize("others", [["1"], ["0.5"]])
def test_text_that_would_become_another_number_is_text(tmp_path, others, text) -> None:
    found = read(write(tmp_path, "\n".join(["a", *others, text, ""])))
    assert found["a"].to_pylist() == [*others, text]
    late = write(tmp_path, "a\n" + f"{others[0]}\n" * 500 + f"{text}\n")
    with pytest.raises(pa.ArrowInvalid):
        read(late, block_bytes=1000)


def test_numbers_stay_numbers(tmp_path) -> None:
    found = read(write(tmp_path, "a,b,c\n 7 ,12E12,07:30\n,-0.0,\n-8,inf,\n"))
    inf = float("inf")
    assert list(found.to_pydict().values()) == [
        [7, None, -8], [12e12, -0.0, inf], ["07:30", None, None],
    ]  # fmt: skip
    with pytest.raises(pa.ArrowInvalid, match="Row #3: CSV conversion error to int64"):
        read(write(tmp_path, "id\n1\nx\n"), types={"id": pa.int64()})


@pytest.mark.parametrize("text", ['1,x\n2,"abc\n', '1,x\n2,"', '"1,x', '1,x\n"2,x\n\n'])
@pytest.mark.parametrize("columns", [None, ("id",), ("name",)])
def test_a_quote_without_an_end_is_refused(tmp_path, text, columns) -> None:
    with pytest.raises(pa.ArrowInvalid):
        read(write(tmp_path, f"id,name\n{text}"), types={"id": pa.string()}, columns=columns)


@pytest.mark.parametrize("block_bytes", [32, 1 << 20])
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('1,"a\nb"', [("1", "a\nb")]),
        ('1,""\n', [("1", "")]),
        ('1,"say ""hi"""\r\n', [("1", 'say "hi"')]),
        ('1,5" pipe\n2,\n', [("1", '5" pipe'), ("2", None)]),
        (",\n", [(None, None)]),
        ("", []),
        ("".join(f"{n},x\n" for n in range(99)), [(str(n), "x") for n in range(99)]),
    ],
)
def test_rows_are_those_of_the_file(tmp_path, text, rows, block_bytes) -> None:
    path = write(tmp_path, f"id,name\n{text}")
    types = {"id": pa.string(), "name": pa.string()}
    found = read(path, types=types, block_bytes=block_bytes)
    assert list(zip(*found.to_pydict().values(), strict=True)) == rows
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(path.with_suffix(".csv.gz"), types=types, block_bytes=block_bytes) == found


@pytest.mark.parametrize(("empty_lines", "rows"), [(True, ["a", None, "b"]), (False, ["a", "b"])])
def test_an_only_column(tmp_path, empty_lines, rows) -> None:
    assert read(write(tmp_path, "x\na\n\nb"), empty_lines=empty_lines)["x"].to_pylist() == rows
    with pytest.raises(pa.ArrowInvalid, match="within quotes"):
        read(write(tmp_path, 'x\na\n"b\n'), empty_lines=empty_lines)


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("separator", "lines", "wrong"),
    [
        (",", ['1,5" pipe', '2,"a ""b"", c"', '"3",""', "4,"], None),
        (",", ["1,x", '2,"x', '3,y"', "4,z"], "line 43"),
        (",", ["1,x", '2,"x"y'], "line 43"),
        ("\t", ['1\t5" pipe', "2\t", "3\tx,y"], None),
        ("\t", ['1\tsay "x', '2\ty"'], None),
        ("\t", ["1\tx", '2\t"x"'], "line 43"),
    ],
)
def test_a_row_of_a_line_wise_file_is_a_line(
    tmp_path, separator, lines, wrong, block_bytes
) -> None:
    path = write(tmp_path, "\r\n".join([f"id{separator}name", *["0" + separator] * 40, *lines]))
    names = read_csv_names(path, separator, is_line_wise=True)
    types = dict.fromkeys(names, pa.string())
    form = CsvForm(separator, types, ["id"], is_line_wise=True, block_bytes=block_bytes)

    refused = pytest.raises(pa.ArrowInvalid, match=wrong) if wrong else contextlib.nullcontext()
    with refused:
        ids = [one for rows in open_csv(path, names, form).batches for one in rows[0].to_pylist()]
        assert ids[40:] == [line.split(separator)[0].strip('"') for line in lines]
