from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError
from etl.conversion.csv import CsvReader, check_csv_schema, choose_separator, flatten_lists
from etl.conversion.formats import TextOptions


def read(path, types=None, **options):
    reader = CsvReader(path, TextOptions(**options), types)
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
    with pytest.raises(ConfigError, match="idd"):
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


def test_an_empty_line_is_the_null_of_an_only_column(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("flag\ntrue\n\nfalse\n")
    assert read(path).column("flag").to_pylist() == [True, None, False]
    path.write_text("flag,x\ntrue,1\n\nfalse,2\n")
    assert read(path).column("flag").to_pylist() == [True, False]


def test_words_are_no_nulls_unless_they_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('country,x\nNA,nan\nNO,1.5\n,"NA"\n')
    assert read(path).column("country").to_pylist() == ["NA", "NO", None]
    path.write_text("country,x\nNA,nan\nNO,1.5\n,\n")
    x = read(path).column("x").to_pylist()
    assert (x[0] != x[0], x[1:]) == (True, [1.5, None])
    assert read(path, nulls=("NA", "nan")).to_pylist()[0] == {"country": None, "x": None}


def test_a_header_that_is_not_utf8_or_names_a_column_twice_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("né,b\n1,2\n".encode("latin1"))
    with pytest.raises(InputDataError, match="UTF-8"):
        read(path)
    path.write_text("a,b,a\n1,2,3\n")
    with pytest.raises(InputDataError, match="'a'"):
        read(path)


@pytest.mark.parametrize(
    ("lists", "what"),
    [([["a", None]], "a null"), ([[1, None]], "a null"), ([["a"], [""]], "empty")],
)
def test_lists_that_would_come_back_as_others_are_refused(lists, what):
    with pytest.raises(InputDataError, match=f"'l' holds .*{what}"):
        flatten_lists(pa.record_batch({"l": lists}), "|")


def test_lists_of_any_layout_become_text():
    large = pa.array([["a"]], pa.large_list(pa.large_string()))
    batch = pa.record_batch({"a": large, "b": pa.array([[1, 2]], pa.list_(pa.int64(), 2))})
    check_csv_schema(batch.schema)
    assert flatten_lists(batch, "|").to_pylist() == [{"a": "a", "b": "1|2"}]


def test_columns_without_a_text_form_are_all_named():
    types = {"s": pa.struct({"x": pa.int64()}), "m": pa.map_(pa.string(), pa.int64())}
    nested = pa.list_(pa.list_(pa.int64()))
    with pytest.raises(ConfigError, match=r"(?s)3 column.*s \(struct.*m \(map.*n \(list"):
        check_csv_schema(pa.schema({**types, "n": nested, "ok": pa.int64()}))
