"""Scores and lists as files: the same content from each format, by other people's readers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from conf.errors import ConfigError
from conf.storage.table_files import to_arrow
from jobs.predict import RowFormat
from training.apply.results import ROW_FORMATS, ResultWriter, check_format
from training.evaluation.prediction_files import read_entries

TOKENS = pa.array(["a", 'say "b"', "\u65e5\u672c", "d"])


def build_batches() -> list[dict[str, pa.Array]]:
    """Two batches of scores and lists, one of them without an item."""
    random, batches = np.random.default_rng(0), []
    for first, lengths in ((1, [2, 0, 3]), (4, [1])):
        ends = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
        entries = random.integers(0, 4, sum(lengths)).astype(np.int32)
        items = pa.DictionaryArray.from_arrays(pa.array(entries), TOKENS)
        scores = pa.array(random.normal(size=sum(lengths)).astype(np.float32))
        batches.append(
            {
                "user": pa.array(np.arange(first, first + len(lengths))),
                "click": to_arrow(random.random(len(lengths)).astype(np.float32)),
                "items": pa.ListArray.from_arrays(ends, items),
                "scores": pa.ListArray.from_arrays(ends, scores),
            }
        )
    return batches


def write(path: Path) -> Path:
    with ResultWriter(path, path.name) as writer:
        for batch in build_batches():
            writer.write(batch)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """By pandas where it is Parquet, by `json` else; numbers as float32."""
    if path.suffix == ".parquet":
        rows = pd.read_parquet(path).to_dict("records")
    else:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [json.loads(line) for line in text.splitlines()]
    return [
        {**row, "click": np.float32(row["click"]), "items": list(row["items"]),
         "scores": np.float32(row["scores"]).tolist()}
        for row in rows
    ]  # fmt: skip


def test_each_format_holds_the_same(tmp_path):
    expected = [row for batch in build_batches() for row in pa.table(batch).to_pylist()]
    for ending in ROW_FORMATS:
        path = write(tmp_path / f"a{ending}")
        assert read(path) == expected
        assert [entry["items"] for _, entry in read_entries(path)] == [r["items"] for r in expected]
        assert path.read_bytes() == write(tmp_path / f"b{ending}").read_bytes()
    with ResultWriter(tmp_path / "x.json", "x.json") as writer:
        writer.write({"id": pa.array([b"a\xff"]), "click": to_arrow(np.float32([0.5]))})
    assert (tmp_path / "x.json").read_text() == '{"id": "a\ufffd", "click": 0.5}\n'


def test_a_name_that_says_no_format_is_refused():
    for name in ("scores.csv", "lists", "a.parquet.gz"):
        with pytest.raises(ConfigError, match="not known by the file's name"):
            check_format(Path(name))
    assert {f".{one}" for one in RowFormat} == set(ROW_FORMATS)  # Spark has the same.
