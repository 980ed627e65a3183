from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError
from etl.conversion.csv import CsvReader, choose_separator, flatten_lists
from etl.conversion.formats import TextOptions


def read(path, **options):
    reader = CsvReader(path, TextOptions(**options))
    return pa.Table.from_batches(reader.read(), reader.schema)


def test_types_are_inferred_and_lists_given(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,price,name,tags\n1,0.5,"a, b",x|y\n2,,c,\n3,1,"",""\n')
    table = read(path, types={"tags": pa.list_(pa.string())})
    assert table.schema.types == [pa.int64(), pa.float64(), pa.string(), pa.list_(pa.string())]
    assert table.to_pylist() == [
        {"id": 1, "price": 0.5, "name": "a, b", "tags": ["x", "y"]},
        {"id": 2, "price": None, "name": "c", "tags": None},
        {"id": 3, "price": 1.0, "name": "", "tags": []},
    ]


def test_a_tab_goes_with_tsv(tmp_path):
    assert choose_separator(tmp_path / "a.tsv.gz", TextOptions()) == "\t"
    assert choose_separator(tmp_path / "a.csv", TextOptions()) == ","
    assert choose_separator(tmp_path / "a.csv", TextOptions(";")) == ";"


def test_a_value_of_another_type_names_the_row_and_the_way_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id\n1\nx\n")
    with pytest.raises(InputDataError, match="'x'") as caught:
        read(path, types={"id": pa.int64()})
    assert "--types" in str(caught.value)
    with pytest.raises(InputDataError, match="'x'"):
        read(path, types={"id": pa.list_(pa.int64())})


def test_a_type_for_a_column_that_is_not_there(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id\n1\n")
    with pytest.raises(ConfigError, match="'idd'"):
        read(path, types={"idd": pa.int64()})


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("")
    with pytest.raises(InputDataError, match="CSV"):
        read(path)


def test_lists_become_text():
    batch = pa.record_batch({"n": [[1, 2], []], "s": [["a"], None], "b": [b"x", b"y"]})
    flat = flatten_lists(batch, "|")
    assert flat.to_pylist() == [
        {"n": "1|2", "s": "a", "b": "x"},
        {"n": "", "s": None, "b": "y"},
    ]


def test_a_value_that_holds_the_separator_is_refused():
    with pytest.raises(InputDataError, match="list separator"):
        flatten_lists(pa.record_batch({"s": [["a|b"]]}), "|")


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(InputDataError, match="'b'"):
        flatten_lists(pa.record_batch({"b": [b"\xff"]}), "|")
