"""Shard files: atomic, deterministic, and what their ShardInfo says of them."""

from __future__ import annotations

import itertools
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.codec.framing import index_records
from etl.tfrecord.files import writer
from etl.tfrecord.files.data_files import ShardLimits, index_path
from etl.tfrecord.files.writer import RollingPlan, RollingWriter, ShardOptions
from etl.tfrecord.table import TableWriter
from tests.tfrecord_files import read_index, read_records

BATCH = pa.record_batch({"a": list(range(5000)), "s": [f"v{k}" for k in range(5000)]})


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_tensorflow_reads_what_was_written(tmp_path: Path, compression) -> None:
    path = tmp_path / "shard"
    with TableWriter(path, BATCH.schema, ShardOptions(compression=compression)) as writer:
        writer.write(BATCH.slice(0, 3000))
        writer.write(BATCH.slice(3000))
    dataset = tf.data.TFRecordDataset(str(path), compression_type=compression or "").batch(5000)
    parsed = tf.io.parse_example(
        next(iter(dataset)),
        {"a": tf.io.FixedLenFeature([], tf.int64), "s": tf.io.FixedLenFeature([], tf.string)},
    )
    assert parsed["a"].numpy().tolist() == list(range(5000))
    assert parsed["s"].numpy()[4999] == b"v4999"
    data = path.read_bytes()
    assert writer.info.rows == 5000
    assert writer.info.bytes == len(data)
    assert writer.info.crc32c == f"{crc32c(data):08x}"
    assert writer.info.path == "shard"
    assert [p.name for p in tmp_path.iterdir()] == ["shard"]


def test_an_exception_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"earlier")
    schema = pa.schema([("x", pa.float64())])
    with pytest.raises(InputDataError), TableWriter(path, schema) as writer:  # noqa: PT012
        writer.write(pa.record_batch({"x": [1.0] * 5000}))
        writer.write(pa.record_batch({"x": [1e300]}))
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["shard"]
    with pytest.raises(RuntimeError, match="not finished"):
        _ = writer.info


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_equal_batches_give_equal_bytes_at_any_time(tmp_path: Path, compression, monkeypatch):
    rng = np.random.default_rng(0)
    batch = pa.record_batch({"l": [rng.integers(0, 9, k % 20).tolist() for k in range(1000)]})
    path, files = tmp_path / "shard", []
    for chunk_rows in (7, 4096):
        monkeypatch.setattr(time, "time", lambda now=1e6 * chunk_rows: now)
        options = ShardOptions(compression=compression, chunk_rows=chunk_rows)
        with TableWriter(path, batch.schema, options) as writer:
            writer.write(batch)
            assert all(p.name.startswith(".") for p in tmp_path.iterdir())
        files.append(path.read_bytes())
        path.unlink()
    assert files[0] == files[1]


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression_level": 0}])
def test_bad_options_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShardOptions(**options)


def test_a_full_disk_at_close_leaves_no_temporary_file(tmp_path: Path) -> None:
    class FullAtClose:
        """A file whose buffered bytes do not fit any more."""

        def __init__(self, file) -> None:
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def close(self) -> None:
            self._file.close()
            raise OSError(28, "No space left on device")

    writer = TableWriter(tmp_path / "shard", BATCH.schema)
    with pytest.raises(OSError, match="No space"), writer:  # noqa: PT012
        output = writer._file._outputs[0]
        output.stream = FullAtClose(output.stream)
        writer.write(BATCH)
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def write(root: Path, batches: list[pa.RecordBatch], limits: ShardLimits, **options) -> list:
    index = options.pop("index", False)
    accumulator = options.pop("build_statistics", None)
    plan = RollingPlan(root, ShardOptions(**options), limits, index, accumulator)
    numbers = itertools.count()
    encoder = build_encoder(batches[0].schema)
    writer = RollingWriter(plan, encoder, lambda: f"d=1/part-c{next(numbers):03d}")
    for batch in batches:
        raw = {"raw": [f"raw {value}" for value in batch.column(0).to_pylist()]}
        writer.write(batch, pa.record_batch(raw))
    writer.finish_file()
    return writer.shards


def payloads(root: Path, shards: list) -> list[list[bytes]]:
    return [list(read_records(root / shard.info.path)) for shard in shards]


def batch_of(lengths: list[int], seed: int = 0) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    return pa.record_batch({"b": pa.array([rng.bytes(n) for n in lengths], pa.binary())})


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.lists(st.integers(0, 300), max_size=30), min_size=1, max_size=4),
    rows=st.none() | st.integers(1, 20),
    bytes_=st.none() | st.integers(1, 3000),
    chunk_rows=st.integers(1, 8),
    compression=st.sampled_from([None, "GZIP", "ZLIB"]),
)
def test_limits_hold_and_nothing_is_lost(
    tmp_path_factory, lengths, rows, bytes_, chunk_rows, compression
):
    root = tmp_path_factory.mktemp("roll")
    batches = [batch_of(item, seed) for seed, item in enumerate(lengths)]
    limits = ShardLimits(rows, bytes_)
    shards = write(root, batches, limits, chunk_rows=chunk_rows, compression=compression)
    found = payloads(root, shards)
    expected = [p for b in batches for p in _encode(b)]
    assert list(itertools.chain.from_iterable(found)) == expected
    assert all(found), "no file is empty"
    for shard, records in zip(shards, found, strict=True):
        assert (root / shard.info.path).stat().st_size == shard.info.bytes
        assert shard.info.rows == len(records)
        if rows is not None:
            assert len(records) <= rows
        if bytes_ is not None:
            assert shard.info.bytes <= bytes_ or len(records) == 1
    for (shard, records), following in zip(
        zip(shards, found, strict=True), found[1:], strict=False
    ):
        is_full = rows is not None and len(records) == rows
        longer = _stored([*records, following[0]], compression)
        assert is_full or longer > bytes_, f"{shard} was closed early"


def _encode(batch: pa.RecordBatch) -> list[bytes]:
    if not batch.num_rows:
        return []
    data = build_encoder(batch.schema).encode(batch)
    return [data[s : s + n].tobytes() for s, n in index_records(data)]


def _stored(records: list[bytes], compression: str | None) -> int:
    """Size of a file with these records; its framing is 16 bytes each."""
    if compression is None:
        return sum(len(r) + 16 for r in records)
    framed = b"".join(
        len(r).to_bytes(8, "little") + b"crc1" + r + b"crc2" for r in records
    )  # checksums compress like any four bytes, or nearly
    wbits = {"GZIP": 31, "ZLIB": 15}[compression]
    compress = zlib.compressobj(6, zlib.DEFLATED, wbits)
    return len(compress.compress(framed)) + len(compress.flush()) + 8 * len(records) + 16


def test_split_offsets_and_index_point_at_records(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "SPLIT_POINT_BYTES", 1000)
    batches = [batch_of([90] * 50, seed) for seed in range(3)]
    shards = write(tmp_path, batches, ShardLimits(rows=100), chunk_rows=7, index=True)
    assert [shard.info.rows for shard in shards] == [100, 50]
    for shard in shards:
        data = (tmp_path / shard.info.path).read_bytes()
        places = list(read_index(tmp_path / index_path(shard.info.path)))
        starts = [start for start, _ in places]
        assert starts[0] == 0
        assert [s + n for s, n in places] == [*starts[1:], len(data)]
        for start, size in places:
            assert int.from_bytes(data[start : start + 8], "little") + 16 == size
        assert set(shard.split_offsets) <= set(starts)
        gaps = np.diff([0, *shard.split_offsets, len(data)])
        assert (gaps[:-1] >= 1000).all()
        assert gaps.max() < 1000 + 2 * max(size for _, size in places)
