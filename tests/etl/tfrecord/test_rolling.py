"""Files that roll over: exact limits, no empty file, the same records in the same order."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.tfrecord import shard_file
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.framing import read_records
from etl.tfrecord.rolling import RollingWriter, ShardLimits, ShardPlan
from etl.tfrecord.shard_file import ShardOptions
from etl.tfrecord.side_index import index_path, read_index


def write(root: Path, batches: list[pa.RecordBatch], limits: ShardLimits, **options) -> list:
    index = options.pop("index", False)
    accumulator = options.pop("build_accumulator", None)
    plan = ShardPlan(root, ShardOptions(**options), limits, index, accumulator)
    numbers = itertools.count()
    encoder = build_encoder(batches[0].schema)
    writer = RollingWriter(plan, encoder, lambda: f"d=1/part-c{next(numbers):03d}")
    for batch in batches:
        writer.write(batch)
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
    from etl.tfrecord.framing import index_records

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


def test_no_rows_no_file(tmp_path: Path) -> None:
    assert write(tmp_path, [batch_of([])], ShardLimits(rows=1)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_last_file_is_not_followed_by_an_empty_one(tmp_path: Path) -> None:
    shards = write(tmp_path, [batch_of([5] * 4), batch_of([5] * 2)], ShardLimits(rows=3))
    assert [shard.info.rows for shard in shards] == [3, 3]


def test_a_compressed_file_is_filled_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = pa.record_batch({"b": [rng.bytes(50) + b"a" * 200 for _ in range(20000)]})
    shards = write(tmp_path, [batch], ShardLimits(bytes=500_000), compression="GZIP")
    assert len(shards) > 2
    assert all(495_000 < shard.info.bytes <= 500_000 for shard in shards[:-1])


def test_split_offsets_and_index_point_at_records(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shard_file, "SPLIT_BYTES", 1000)
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


def test_each_file_has_statistics_of_its_own(tmp_path: Path) -> None:
    class Total:
        def __init__(self, schema: pa.Schema) -> None:
            self.values: list[int] = []

        def update(self, batch: pa.RecordBatch) -> None:
            self.values += batch["a"].to_pylist()

        def to_dict(self) -> dict:
            return {"values": self.values}

    batches = [pa.record_batch({"a": list(range(k, k + 5))}) for k in (0, 5)]
    shards = write(tmp_path, batches, ShardLimits(rows=3), chunk_rows=2, build_accumulator=Total)
    assert [shard.statistics["values"] for shard in shards] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]


@pytest.mark.parametrize("limits", [{"rows": 0}, {"bytes": -1}])
def test_bad_limits_are_refused(limits) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        ShardLimits(**limits)
