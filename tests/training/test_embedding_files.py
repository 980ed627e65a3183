from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from training.embedding_files import EmbeddingWriter

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
UNESCAPED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n", "\\r": "\r"}


def _unescape(text: str) -> str:
    parts, position = [], 0
    while position < len(text):
        step = 2 if text[position] == "\\" else 1
        part = text[position : position + step]
        parts.append(UNESCAPED.get(part, part))
        position += step
    return "".join(parts)


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=FLOATS),
    st.data(),
)
def test_both_files_hold_the_same_keys_and_bits(vectors: np.ndarray, data: st.DataObject) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\\\t\n\rtn"))
    keys = data.draw(st.lists(text, min_size=len(vectors), max_size=len(vectors)))
    with tempfile.TemporaryDirectory() as name:
        with EmbeddingWriter(Path(name), "items", pa.string()) as writer:
            writer.write(pa.array(keys, pa.string()), np.arange(len(keys)), vectors)
        table = pq.read_table(Path(name) / "items.parquet")
        lines = (Path(name) / "items.txt").read_bytes().decode().split("\n")
    assert table["key"].to_pylist() == keys
    assert table["id"].to_pylist() == list(range(len(keys)))
    stored = np.array(table["vector"].to_pylist(), np.float32)
    assert stored.tobytes() == vectors.tobytes()
    assert lines.pop() == ""
    read = [line.split("\t") for line in lines]
    assert [_unescape(key) for key, _ in read] == keys
    parsed = np.array([[np.float32(v) for v in numbers.split(",")] for _, numbers in read])
    assert parsed.astype(np.float32).tobytes() == vectors.tobytes()


def test_rows_are_appended_and_integer_keys_stay_integers(tmp_path: Path) -> None:
    with EmbeddingWriter(tmp_path, "users", pa.int64()) as writer:
        for start in (0, 2):
            writer.write(pa.array([start, start + 1]), np.arange(2), np.ones((2, 3), np.float32))
        writer.write(pa.array([], pa.int64()), np.arange(0), np.ones((0, 3), np.float32))
        assert writer.rows == 4
    table = pq.read_table(tmp_path / "users.parquet")
    assert table.schema.field("key").type == pa.int64()
    assert table["key"].to_pylist() == [0, 1, 2, 3]
    assert (tmp_path / "users.txt").read_text().startswith("0\t1,1,1\n")
