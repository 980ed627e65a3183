from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.conversion.formats import detect_format, list_inputs, parse_type


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
