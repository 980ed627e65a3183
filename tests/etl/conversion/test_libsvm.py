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
