"""The codec's figures come with their limits, and the peers get the same rows."""

from __future__ import annotations

import io
import sys

import pyarrow as pa
import pytest
import tensorflow as tf
from rich.console import Console

from etl.tfrecord.codec.encode import encode
from etl.tfrecord.codec.framing import index_records
from tests.bench.measurements import Measurement
from tests.bench.shapes import SHAPES, build_batch
from tests.bench.tfrecord import codec
from tests.bench.tfrecord.peers import (
    CONNECTOR_JAR_VARIABLE,
    TFX_PYTHON_VARIABLE,
    PeerMissingError,
    TfxBsl,
    find_connector,
    find_tfx_bsl,
)
from tests.bench.tfrecord.spark_driver import generate
from tests.bench.tfrecord.spark_io import (
    SparkSettings,
    build_scale_table,
    estimate_bytes,
    measure_scale,
    time_plain_write,
)
from tests.bench.tfrecord.spark_sources import FeedDataSource
from tests.bench.tfrecord.tfx_peer import as_lists, read_batch, write_batch
from tests.tfrecord_files import read_records


def by_key(payload: bytes) -> dict[str, bytes]:
    features = tf.train.Example.FromString(payload).features.feature
    return {name: features[name].SerializeToString() for name in features}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_protobuf_is_given_the_rows_that_we_encode(shape, tmp_path):
    batch, path = build_batch(shape, 3), tmp_path / "rows.tfrecord"
    data = encode(batch)
    ours = [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]
    codec.write_with_tensorflow(shape, batch.to_pylist(), str(path))
    written = list(read_records(path))
    extended = codec.encode_by_extend(shape, batch.to_pylist())
    for theirs in (written, extended):
        assert [by_key(record) for record in ours] == [by_key(record) for record in theirs]


@pytest.mark.exhaustive
def test_a_shape_gives_every_figure_that_needs_no_other_environment():
    found = list(codec.measure_codec(SHAPES["narrow"], 20, 1, None))
    assert [m.name for m in found] == [
        codec.MEMCPY, codec.COLD_MEMCPY, codec.CRC, codec.ENCODE, codec.DECODE,
        codec.VERIFY_AND_DECODE, codec.PYTHON_EXAMPLE, codec.PYTHON_EXTEND, codec.PARSE_EXAMPLE,
    ]  # fmt: skip
    assert all(m.wall_s > 0 and m.rows == 20 for m in found)
    size = encode(build_batch(SHAPES["narrow"], 20)).size
    assert {m.bytes for m in found[:7]} == {size}
    assert {m.bytes for m in found[7:]} == {size - 20 * 16}  # payloads without their framing


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


def test_the_estimate_is_close_to_what_is_written():
    shape = SHAPES["narrow"]
    written = encode(build_batch(shape, 5000, seed=9)).size
    assert abs(estimate_bytes(shape, 5000) / written - 1) < 0.02


def test_a_table_beyond_the_disk_is_left_out(tmp_path):
    skipped: list[str] = []
    settings = SparkSettings(tmp_path, 1, 1)
    assert list(measure_scale("ctr", [10**15], settings, skipped.append)) == []
    assert "1,000,000,000,000,000 rows" in skipped[0]


def test_a_plain_write_leaves_nothing_behind(tmp_path):
    times = time_plain_write(tmp_path / "plain", 8 << 20)
    assert times.wall_s > 0
    assert list(tmp_path.iterdir()) == []


def test_the_table_marks_a_drift_beyond_the_tolerance():
    start_s, plain_s = 2.0, 7.0
    figures = [
        Measurement("scale", "narrow", "a", start_s, start_s + plain + cpu, rows, 1,
                    {"peak_rss_bytes": {"python_worker": 300_000_000},
                     "plain_write": {"wall_s": plain, "cpu_s": plain}})
        for rows, cpu, plain in (
            (8, 0.0, 0.0), (10**6, 1.0, plain_s), (10**7, 10.5, plain_s), (10**8, 150.0, plain_s)
        )
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    console.print(build_scale_table(figures))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "start of a write 2.00 s" in lines[0]
    assert "+5.0% " in next(line for line in lines if "10,000,000" in line)
    assert "+50.0% (!)" in next(line for line in lines if "100,000,000" in line)
    assert sum("300" in line for line in lines) == 3


@pytest.mark.parametrize("rows", [0, 1, 30_001])
def test_it_gives_so_many_rows_in_several_batches(spark, rows):
    schema = generate(spark, "strings", 0, 1).schema
    reader = FeedDataSource({"shape": "strings", "rows": str(rows), "tasks": "2"}).reader(schema)
    batches = [list(reader.read(partition)) for partition in reader.partitions()]
    assert sum(batch.num_rows for task in batches for batch in task) == rows
    assert len(batches) == 2
    assert max((len(task) for task in batches), default=0) == (3 if rows > 1 else rows)


@pytest.mark.parametrize("name", ["strings", "vectors"])
@pytest.mark.exhaustive
def test_spark_takes_its_batches(spark, name):
    spark.dataSource.register(FeedDataSource)
    schema = generate(spark, name, 0, 1).schema
    options = {"shape": name, "rows": 21, "tasks": 2}
    rows = spark.read.format("sluice_bench_feed").schema(schema).options(**options).load()
    assert rows.count() == 21
    column = next(c.name for c in SHAPES[name].columns if c.length)
    assert len(rows.first()[column]) == next(c.length for c in SHAPES[name].columns if c.length)
