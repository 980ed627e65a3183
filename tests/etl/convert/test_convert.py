"""Conversions: every format to every other, and what each refuses."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.convert.convert import convert_files
from etl.convert.csv_and_libsvm import (
    CsvReader,
    check_csv_schema,
    check_libsvm_schema,
    choose_separator,
    format_libsvm,
    has_query_ids,
    join_list_columns,
    libsvm_schema,
    read_libsvm,
)
from etl.convert.formats import (
    ConvertOptions,
    LibsvmColumns,
    TextOptions,
    detect_format,
    list_inputs,
    open_text_input,
    open_text_output,
    parse_type,
    refuse_damage,
)
from etl.tfrecord.table import read_table, write_table


def test_names_decide_on_compression(tmp_path):
    with open_text_output(tmp_path / "a.csv.gz") as file:
        file.write(b"a\n1\n")
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == b"a\n1\n"
    with open_text_input(tmp_path / "a.csv.gz") as file:
        assert file.read() == b"a\n1\n"
    for opens in (open_text_input, open_text_output):
        with pytest.raises(ConfigError, match=r"a\.csv\.zlib"):
            opens(tmp_path / "a.csv.zlib")


@pytest.mark.parametrize(
    "data", [b"no gzip", gzip.compress(b"a,b\n" * 9)[:-9]], ids=["no gzip", "cut short"]
)
def test_damage_names_the_file(tmp_path, data):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(data)
    with (
        pytest.raises(InputDataError, match=r"a\.csv\.gz does not decompress"),
        refuse_damage(path),
        open_text_input(path) as file,
    ):
        file.read()


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    path = tmp_path / "a.csv"
    with pytest.raises(FileNotFoundError), refuse_damage(path):
        open_text_input(path)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.tfrecord", "tfrecord"),
        ("part-0.tfrecord.gz", "tfrecord"),
        ("a.tfrecords.deflate", "tfrecord"),
        ("A.PARQUET", "parquet"),
        ("a.tsv.gz", "csv"),
        ("a.svm", "libsvm"),
    ],
)
def test_the_name_tells_the_format(name, wanted):
    assert detect_format(Path(name)) == wanted


@pytest.mark.parametrize("name", ["a", "a.txt", "a.gz", "tfrecord"])
def test_a_name_that_tells_nothing_is_refused(name):
    with pytest.raises(ConfigError, match="--from"):
        detect_format(Path(name))


def test_hidden_files_are_left_out_and_order_is_by_name(tmp_path):
    for name in ("b.csv", "a.csv", "_SUCCESS", ".x.crc", "_index/a.csv", "d=1/c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [p.name for p in list_inputs(tmp_path, None)] == ["a.csv", "b.csv", "c.csv"]


def test_mixed_and_missing_inputs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to convert"):
        list_inputs(tmp_path / "none", None)
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match="several formats"):
        list_inputs(tmp_path, None)


def test_types_by_name():
    assert parse_type("list<float32>") == pa.list_(pa.float32())
    assert parse_type(" int64 ") == pa.int64()
    with pytest.raises(ConfigError, match="int32"):
        parse_type("int32")


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
    flat = join_list_columns(batch, "|")
    assert flat.to_pylist() == [
        {"n": "1|2", "s": "a", "b": "x"},
        {"n": "", "s": None, "b": "y"},
    ]


def test_a_value_that_holds_the_separator_is_refused():
    with pytest.raises(InputDataError, match="list separator"):
        join_list_columns(pa.record_batch({"s": [["a|b"]]}), "|")


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(InputDataError, match="'b'"):
        join_list_columns(pa.record_batch({"b": [b"\xff"]}), "|")


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
        join_list_columns(pa.record_batch({"l": lists}), "|")


def test_lists_of_any_layout_become_text():
    large = pa.array([["a"]], pa.large_list(pa.large_string()))
    batch = pa.record_batch({"a": large, "b": pa.array([[1, 2]], pa.list_(pa.int64(), 2))})
    check_csv_schema(batch.schema)
    assert join_list_columns(batch, "|").to_pylist() == [{"a": "a", "b": "1|2"}]


def test_columns_without_a_text_form_are_all_named():
    types = {"s": pa.struct({"x": pa.int64()}), "m": pa.map_(pa.string(), pa.int64())}
    nested = pa.list_(pa.list_(pa.int64()))
    with pytest.raises(ConfigError, match=r"(?s)3 column.*s \(struct.*m \(map.*n \(list"):
        check_csv_schema(pa.schema({**types, "n": nested, "ok": pa.int64()}))


COLUMNS = LibsvmColumns()


def libsvm_read(path, **kwargs):
    return pa.Table.from_batches(read_libsvm(path, COLUMNS, **kwargs), libsvm_schema(COLUMNS))


def test_reads_lines_comments_and_blanks(tmp_path):
    path = tmp_path / "a.libsvm"
    path.write_text("# head\n1 3:0.5 7:+2 # tail\r\n\n-1\n+1 0:1e-3\n")
    assert libsvm_read(path).to_pylist() == [
        {"label": 1.0, "indices": [3, 7], "values": [0.5, 2.0]},
        {"label": -1.0, "indices": [], "values": []},
        {"label": 1.0, "indices": [0], "values": [pytest.approx(1e-3)]},
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_blocks_of_any_size_give_the_same_rows(tmp_path, block_bytes):
    path = tmp_path / "a.libsvm"
    path.write_text("".join(f"{i % 2} {i}:{i}.5 {i + 1}:2\n" for i in range(50)) + "1 9:9")
    table = libsvm_read(path, block_bytes=block_bytes)
    assert table.num_rows == 51
    assert table.column("indices").to_pylist()[-2:] == [[49, 50], [9]]


def test_gzip(tmp_path):
    path = tmp_path / "a.libsvm.gz"
    path.write_bytes(gzip.compress(b"1 2:3\n"))
    assert libsvm_read(path).num_rows == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x 1:2", "label"),
        ("1 3", "index:value"),
        ("1 1:2:3", "index:value"),
        ("1 -1:2", "index"),
        ("1 1:two", "value"),
        ("1 1:", "value"),
        ("1 qid:3 1:2", "index"),
        ("1 99999999999999999999:1", "index"),
        ("1 é:1", "ASCII"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, word):
    path = tmp_path / "a.libsvm"
    path.write_text(f"1 1:1\n\n# note\n{line}\n1 2:2\n", encoding="utf-8")
    with pytest.raises(InputDataError, match="line 4") as caught:
        libsvm_read(path)
    assert word in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(-9, 9, width=32),
            st.lists(st.tuples(st.integers(0, 2**60), st.floats(width=32, allow_nan=False))),
        ),
        max_size=8,
    )
)
def test_what_is_written_reads_back(tmp_path_factory, rows):
    batch = pa.RecordBatch.from_pydict(
        {
            "label": pa.array([label for label, _ in rows], pa.float32()),
            "indices": pa.array([[i for i, _ in p] for _, p in rows], pa.list_(pa.int64())),
            "values": pa.array([[v for _, v in p] for _, p in rows], pa.list_(pa.float32())),
        }
    )
    path = tmp_path_factory.mktemp("svm") / "a.libsvm"
    path.write_bytes(format_libsvm(batch, COLUMNS))
    assert libsvm_read(path).equals(pa.Table.from_batches([batch]))


def test_a_slice_with_null_lists_writes_its_own_rows():
    batch = pa.RecordBatch.from_pydict(
        {
            "label": pa.array([1.0, 0.0, 1.0], pa.float32()),
            "indices": pa.array([[1, 2], None, [3]], pa.list_(pa.int64())),
            "values": pa.array([[0.5, 1], None, [2]], pa.list_(pa.float32())),
        }
    )
    assert format_libsvm(batch.slice(1), COLUMNS) == b"0\n1 3:2\n"


def test_lists_of_other_lengths_are_refused():
    batch = pa.RecordBatch.from_pydict({"label": [1.0], "indices": [[1]], "values": [[1.0, 2.0]]})
    with pytest.raises(InputDataError, match="differ in length"):
        format_libsvm(batch, COLUMNS)


def test_columns_without_a_place_are_named():
    schema = pa.schema([("label", pa.float32()), ("user", pa.int64())])
    with pytest.raises(ConfigError, match="user"):
        check_libsvm_schema(schema, COLUMNS)


def test_agrees_with_an_independent_reader(tmp_path):
    path = tmp_path / "a.libsvm"
    rng = np.random.default_rng(0)
    lines = [
        f"{rng.integers(0, 2)} "
        + " ".join(f"{i}:{rng.normal():.6g}" for i in sorted(rng.choice(500, 20, replace=False)))
        for _ in range(200)
    ]
    path.write_text("\n".join(lines))
    for row, line in zip(libsvm_read(path).to_pylist(), lines, strict=True):
        label, *pairs = line.split()
        assert row["label"] == float(label)
        assert row["indices"] == [int(pair.split(":")[0]) for pair in pairs]
        assert row["values"] == [float(np.float32(pair.split(":")[1])) for pair in pairs]


RANKING = "# queries\n2 qid:3 1:0.5 2:1\n0 qid:3\n1  qid:12 7:2 # tail\n"


def test_query_ids_there_and_back(tmp_path):
    path = tmp_path / "a.libsvm"
    path.write_text(RANKING)
    assert has_query_ids(path)
    schema = libsvm_schema(COLUMNS, has_qid=True)
    for block_bytes in (3, 1 << 20):
        batches = read_libsvm(path, COLUMNS, block_bytes, has_qid=True)
        table = pa.Table.from_batches(batches, schema)
        assert table.to_pylist() == [
            {"label": 2.0, "qid": 3, "indices": [1, 2], "values": [0.5, 1.0]},
            {"label": 0.0, "qid": 3, "indices": [], "values": []},
            {"label": 1.0, "qid": 12, "indices": [7], "values": [2.0]},
        ]
    check_libsvm_schema(schema, COLUMNS)
    (batch,) = table.combine_chunks().to_batches()
    assert format_libsvm(batch, COLUMNS) == b"2 qid:3 1:0.5 2:1\n0 qid:3\n1 qid:12 7:2\n"
    nulled = batch.set_column(1, "qid", pa.array([1, None, 2]))
    with pytest.raises(InputDataError, match="'qid' has a null"):
        format_libsvm(nulled, COLUMNS)
    with pytest.raises(ConfigError, match="--qid"):
        check_libsvm_schema(schema.set(1, pa.field("qid", pa.string())), COLUMNS)


@pytest.mark.parametrize(
    ("text", "has_qid", "message"),
    [
        ("1 qid:1 1:1\n1 1:1\n", True, "line 2 .*\n.*no query id"),
        ("1 qid:1 1:1\n1\n", True, "line 2 .*\n.*no query id"),
        ("1 1:1\n1 qid:1 1:1\n", False, "line 2 .*\n.*a query id, which the first line lacks"),
        ("1 qid:x 1:1\n", True, "line 1 .*\n.*a query id that is no whole number"),
        ("1 qid:1 qid:2\n", True, "line 1 .*\n.*index"),
    ],
)
def test_lines_with_and_without_query_ids_do_not_mix(tmp_path, text, has_qid, message):
    path = tmp_path / "a.libsvm"
    path.write_text(text)
    assert has_query_ids(path) == has_qid
    with pytest.raises(InputDataError, match=message):
        list(read_libsvm(path, COLUMNS, has_qid=has_qid))


@pytest.mark.parametrize("text", ["", "# all comment", "1 qid:7", "\n# c\n\n1 qid:7 1:1"])
def test_query_ids_are_told_by_the_first_line(tmp_path, text):
    path = tmp_path / "a.libsvm"
    path.write_text(text)
    assert has_query_ids(path) == ("qid" in text)


def rows_of(indices, values=None, qid=0):
    columns = {"label": [1.0], "indices": [indices], "values": [values or [0.5] * len(indices)]}
    return pa.record_batch({**columns, "qid": [qid]})


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (rows_of([1, None]), "'indices' has a null"),
        (rows_of([1, 2], [0.5, None]), "'values' has a null"),
        (rows_of([-1]), "'indices' holds a negative"),
        (rows_of([1], qid=-3), "'qid' holds a negative"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(batch, what):
    with pytest.raises(InputDataError, match=what):
        format_libsvm(batch, COLUMNS)


@pytest.mark.parametrize(
    ("column", "data_type"),
    [
        ("label", pa.string()),
        ("indices", pa.list_(pa.string())),
        ("indices", pa.list_(pa.float32())),
        ("values", pa.list_(pa.string())),
    ],
)
def test_text_in_the_place_of_numbers_is_refused(column, data_type):
    schema = libsvm_schema(COLUMNS)
    number = schema.get_field_index(column)
    with pytest.raises(ConfigError, match=column):
        check_libsvm_schema(schema.set(number, pa.field(column, data_type)), COLUMNS)


TABLE = pa.table(
    {
        "id": [1, -(2**63), 2**63 - 1],
        "score": pa.array([0.5, None, float("inf")], pa.float32()),
        "name": ["a", "", "ü, \n|"],
        "tags": [["x", ""], [], ["y"]],
    }
)


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(TABLE, path, row_group_size=2)
    return path


def test_parquet_to_tfrecord_and_back(parquet, tmp_path):
    middle, output = tmp_path / "a.tfrecord", tmp_path / "b.parquet"
    seen = []
    rows = convert_files([parquet], "parquet", middle, "tfrecord", ConvertOptions(), seen.append)
    assert rows == sum(seen) == 3
    assert convert_files([middle], "tfrecord", output, "parquet", ConvertOptions()) == 3
    assert pq.read_table(output).equals(TABLE)


def test_csv_with_lists_there_and_back(parquet, tmp_path):
    middle, output = tmp_path / "a.csv", tmp_path / "b.tfrecord"
    text = TextOptions(list_separator=";")
    types = {"score": pa.float32(), "tags": pa.list_(pa.string())}
    convert_files([parquet], "parquet", middle, "csv", ConvertOptions(text=text))
    convert_files([middle], "csv", output, "tfrecord", ConvertOptions(text=text, types=types))
    assert read_table(output, schema=TABLE.schema).equals(TABLE)


def test_libsvm_there_and_back(tmp_path):
    source, middle, output = tmp_path / "a.libsvm", tmp_path / "a.tfrecord", tmp_path / "b.libsvm"
    source.write_text("1 3:0.5 7:2\n0\n1 1:1\n")
    convert_files([source], "libsvm", middle, "tfrecord", ConvertOptions())
    schema = pa.schema(
        [("label", pa.float32()), ("indices", pa.list_(pa.int64())),
         ("values", pa.list_(pa.float32()))]
    )  # fmt: skip
    assert read_table(middle, schema=schema).column("indices").to_pylist() == [[3, 7], [], [1]]
    convert_files([middle], "tfrecord", output, "libsvm", ConvertOptions())
    assert output.read_text() == source.read_text()


def test_several_files_become_one(tmp_path):
    for name, line in (("a", "1"), ("b", "2")):
        (tmp_path / f"{name}.csv").write_text(f"id\n{line}\n")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    convert_files(files, "csv", tmp_path / "out.tfrecord", "tfrecord", ConvertOptions())
    assert read_table(tmp_path / "out.tfrecord").column("id").to_pylist() == [1, 2]


def test_files_with_other_columns_are_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "a.csv").write_text("id\n1\n")
    (tmp_path / "b.csv").write_text("uid\n1\n")
    before = set(tmp_path.iterdir())
    with pytest.raises(InputDataError, match="other columns"):
        convert_files([tmp_path / "a.csv", tmp_path / "b.csv"], "csv", tmp_path / "o.tfrecord",
                      "tfrecord", ConvertOptions())  # fmt: skip
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", ["tfrecord", "parquet", "csv", "libsvm"])
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, target):
    source = tmp_path / "a.libsvm"
    source.write_text("1 1:1\nx\n")
    output = tmp_path / f"o.{target}"
    output.write_text("precious")
    with pytest.raises(InputDataError):
        convert_files([source], "libsvm", output, target, ConvertOptions())
    assert output.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_output_may_not_be_an_input(parquet):
    with pytest.raises(ConfigError, match="one of the inputs"):
        convert_files([parquet], "parquet", parquet, "parquet", ConvertOptions())


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputDataError, match=r"a\.parquet"):
        convert_files([path], "parquet", tmp_path / "o.tfrecord", "tfrecord", ConvertOptions())


def test_bytes_that_are_no_text_come_out_of_tfrecords_by_their_type(tmp_path):
    table = pa.table({"b": [b"\xff\x00", b"a"], "n": [1, 2]})
    source, output = tmp_path / "a.tfrecord", tmp_path / "a.parquet"
    write_table(table, source)
    with pytest.raises(InputDataError, match="'b'"):
        convert_files([source], "tfrecord", output, "parquet", ConvertOptions())
    options = ConvertOptions(types={"b": pa.binary()})
    convert_files([source], "tfrecord", output, "parquet", options)
    assert pq.read_table(output).equals(table)
    with pytest.raises(ConfigError, match=r"(?s)does not have.*received: z"):
        convert_files(
            [source], "tfrecord", output, "parquet", ConvertOptions(types={"z": pa.binary()})
        )


def test_types_are_not_passed_over_where_files_have_their_own(parquet, tmp_path):
    options = ConvertOptions(types={"id": pa.string()})
    with pytest.raises(ConfigError, match="--types"):
        convert_files([parquet], "parquet", tmp_path / "a.csv", "csv", options)


def test_text_is_compressed_where_the_name_says_so(parquet, tmp_path):
    output, back = tmp_path / "a.csv.gz", tmp_path / "b.parquet"
    convert_files([parquet], "parquet", output, "csv", ConvertOptions())
    assert output.read_bytes()[:2] == b"\x1f\x8b"
    options = ConvertOptions(types={"score": pa.float32(), "tags": pa.list_(pa.string())})
    convert_files([output], "csv", back, "parquet", options)
    assert pq.read_table(back).equals(TABLE)
