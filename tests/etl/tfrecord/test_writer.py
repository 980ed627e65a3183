"""Shard files: atomic, deterministic, and what their ShardInfo says of them."""

import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.crc32c import crc32c
from etl.tfrecord.writer import ShardOptions, ShardWriter

BATCH = pa.record_batch({"a": list(range(5000)), "s": [f"v{k}" for k in range(5000)]})


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_tensorflow_reads_what_was_written(tmp_path: Path, compression) -> None:
    path = tmp_path / "shard"
    with ShardWriter(path, BATCH.schema, ShardOptions(compression=compression)) as writer:
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


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_equal_batches_give_equal_bytes_at_any_time(tmp_path: Path, compression, monkeypatch):
    files = []
    for name, now in (("one", 1e9), ("two", 2e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        options = ShardOptions(compression=compression)
        with ShardWriter(tmp_path / name, BATCH.schema, options) as writer:
            writer.write(BATCH)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_gzip_header_has_neither_time_nor_name(tmp_path: Path) -> None:
    path = tmp_path / "shard.gz"
    with ShardWriter(path, BATCH.schema, ShardOptions(compression="GZIP")) as writer:
        writer.write(BATCH)
    head = path.read_bytes()[:10]
    assert head[3] == 0  # no flags: no name, no comment
    assert head[4:8] == bytes(4)  # no time
    assert zlib.decompress(path.read_bytes(), 31)


def test_an_exception_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"earlier")
    schema = pa.schema([("x", pa.float64())])
    with pytest.raises(InputDataError), ShardWriter(path, schema) as writer:  # noqa: PT012
        writer.write(pa.record_batch({"x": [1.0] * 5000}))
        writer.write(pa.record_batch({"x": [1e300]}))
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["shard"]
    with pytest.raises(RuntimeError, match="not finished"):
        _ = writer.info


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with ShardWriter(path, BATCH.schema) as writer:
        writer.write(BATCH)
        assert not path.exists()
        assert all(p.name.startswith(".") for p in tmp_path.iterdir())
    assert path.exists()


def test_bad_schema_touches_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ShardWriter(tmp_path / "shard", pa.schema([("t", pa.timestamp("s"))]))
    assert list(tmp_path.iterdir()) == []


def test_no_batch_gives_an_empty_file(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shard", BATCH.schema) as writer:
        pass
    assert (writer.info.rows, writer.info.bytes, writer.info.crc32c) == (0, 0, "00000000")


def test_chunk_size_does_not_change_the_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = pa.record_batch({"l": [rng.integers(0, 9, k % 20).tolist() for k in range(1000)]})
    infos = set()
    for chunk_rows in (1, 7, 1000, 4096):
        options = ShardOptions(chunk_rows=chunk_rows)
        with ShardWriter(tmp_path / "shard", batch.schema, options) as writer:
            writer.write(batch)
        infos.add(writer.info)
    assert len(infos) == 1


@pytest.mark.parametrize(
    "options", [{"compression": "gzip"}, {"compression_level": 0}, {"chunk_rows": 0}]
)
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

    writer = ShardWriter(tmp_path / "shard", BATCH.schema)
    with pytest.raises(OSError, match="No space"), writer:  # noqa: PT012
        target = writer._file._target
        target._file = FullAtClose(target._file)
        writer.write(BATCH)
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
