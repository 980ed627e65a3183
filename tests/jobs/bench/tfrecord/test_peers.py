"""A peer that is not there is left out with a word on how to get it."""

from __future__ import annotations

import sys

import pyarrow as pa
import pytest

from jobs.bench.tfrecord.peers import (
    CONNECTOR_JAR_VARIABLE,
    TFX_PYTHON_VARIABLE,
    PeerMissingError,
    TfxBsl,
    find_connector,
    find_tfx_bsl,
)
from jobs.bench.tfrecord.tfx_peer import as_lists, read_batch, write_batch


def test_an_environment_that_is_not_named_or_not_there_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv(TFX_PYTHON_VARIABLE, raising=False)
    with pytest.raises(PeerMissingError, match="pip install tfx-bsl"):
        find_tfx_bsl()
    with pytest.raises(PeerMissingError, match="there is no"):
        find_tfx_bsl(str(tmp_path / "python"))


def test_an_environment_without_tfx_bsl_is_a_missing_peer(tmp_path):
    batch = pa.record_batch({"id": [1]})
    tfx = TfxBsl(tmp_path.__class__(sys.executable))
    with pytest.raises(PeerMissingError, match="tfx_bsl"):
        tfx.time(batch, 1)


def test_the_connector_comes_by_jar_or_by_coordinates(monkeypatch, tmp_path):
    monkeypatch.delenv(CONNECTOR_JAR_VARIABLE, raising=False)
    assert find_connector(package="g:a:1").conf == {"spark.jars.packages": "g:a:1"}
    conf = find_connector(package="g:a:1", ivy=str(tmp_path)).conf
    assert conf["spark.jars.ivy"] == str(tmp_path)
    jar = tmp_path / "connector.jar"
    with pytest.raises(PeerMissingError):
        find_connector(str(jar))
    jar.touch()
    monkeypatch.setenv(CONNECTOR_JAR_VARIABLE, str(jar))
    assert find_connector().conf == {"spark.jars": str(jar)}


def test_scalars_become_lists_of_one_and_nulls_stay_null(tmp_path):
    batch = pa.RecordBatch.from_pylist(
        [
            {"a": 1, "s": "x", "l": [1]},
            {"a": None, "s": None, "l": None},
            {"a": 3, "s": "", "l": []},
        ]
    )
    write_batch(str(tmp_path / "rows.arrow"), batch)
    lists = as_lists(read_batch(str(tmp_path / "rows.arrow")))
    assert lists.to_pylist() == [
        {"a": [1], "s": [b"x"], "l": [1]},
        {"a": None, "s": None, "l": None},
        {"a": [3], "s": [b""], "l": []},
    ]
