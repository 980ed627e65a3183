from __future__ import annotations

import gzip

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.conversion.formats import LibsvmColumns
from etl.conversion.libsvm import (
    check_libsvm_schema,
    format_libsvm,
    has_query_ids,
    libsvm_schema,
    read_libsvm,
)

COLUMNS = LibsvmColumns()


def read(path, **kwargs):
    return pa.Table.from_batches(read_libsvm(path, COLUMNS, **kwargs), libsvm_schema(COLUMNS))


def test_reads_lines_comments_and_blanks(tmp_path):
    path = tmp_path / "a.libsvm"
    path.write_text("# head\n1 3:0.5 7:+2 # tail\r\n\n-1\n+1 0:1e-3\n")
    assert read(path).to_pylist() == [
        {"label": 1.0, "indices": [3, 7], "values": [0.5, 2.0]},
        {"label": -1.0, "indices": [], "values": []},
        {"label": 1.0, "indices": [0], "values": [pytest.approx(1e-3)]},
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_blocks_of_any_size_give_the_same_rows(tmp_path, block_bytes):
    path = tmp_path / "a.libsvm"
    path.write_text("".join(f"{i % 2} {i}:{i}.5 {i + 1}:2\n" for i in range(50)) + "1 9:9")
    table = read(path, block_bytes=block_bytes)
    assert table.num_rows == 51
    assert table.column("indices").to_pylist()[-2:] == [[49, 50], [9]]


def test_gzip(tmp_path):
    path = tmp_path / "a.libsvm.gz"
    path.write_bytes(gzip.compress(b"1 2:3\n"))
    assert read(path).num_rows == 1


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
        read(path)
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
    assert read(path).equals(pa.Table.from_batches([batch]))


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
    for row, line in zip(read(path).to_pylist(), lines, strict=True):
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
