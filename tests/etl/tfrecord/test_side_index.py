"""Side files in DALI's form, and where records begin."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.framing import index_records
from etl.tfrecord.record_offsets import find_record_starts
from etl.tfrecord.side_index import check_indexable, format_index, index_path, read_index


def test_starts_agree_with_the_verifying_scan() -> None:
    batch = pa.record_batch({"b": [b"x" * n for n in (0, 1, 500, 70_000, 3)]})
    framed = build_encoder(batch.schema).encode(batch)
    starts = find_record_starts(framed)
    assert starts[:-1].tolist() == (index_records(framed)[:, 0] - 12).tolist()
    assert starts[-1] == framed.size
    assert find_record_starts(np.empty(0, np.uint8)).tolist() == [0]


def test_lines_are_offset_and_size(tmp_path: Path) -> None:
    text = format_index(np.array([0, 20, 50]), 100)
    assert text == "100 20\n120 30\n"
    (tmp_path / "x.idx").write_text(text)
    assert list(read_index(tmp_path / "x.idx")) == [(100, 20), (120, 30)]
    assert index_path("d=1/part-0") == "_index/d=1/part-0.idx"


def test_compressed_files_have_no_index() -> None:
    check_indexable(None)
    with pytest.raises(ConfigError, match="uncompressed"):
        check_indexable("GZIP")
