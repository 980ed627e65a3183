"""Streams in pieces, to the last byte before their damage."""

from __future__ import annotations

import gzip
import io
import zlib

import numpy as np
import pytest

from etl.tfrecord.byte_source import ByteSource, is_intact

DATA = np.random.default_rng(1).bytes(5000)


def read_all(source: ByteSource, limit: int = 700) -> bytes:
    pieces = list(iter(lambda: source.read(limit), b""))
    assert all(len(piece) <= limit for piece in pieces)
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("compression", "data"),
    [(None, DATA), ("GZIP", gzip.compress(DATA)), ("ZLIB", zlib.compress(DATA)),
     ("GZIP", gzip.compress(DATA[:7]) + gzip.compress(DATA[7:]))],
)  # fmt: skip
def test_stream_comes_whole(compression, data: bytes) -> None:
    source = ByteSource(io.BytesIO(data), compression)
    assert read_all(source) == DATA
    assert source.failure is None


def test_limit_ends_a_range() -> None:
    file = io.BytesIO(DATA)
    file.seek(100)
    assert read_all(ByteSource(file, None, limit=1234)) == DATA[100:1334]


@pytest.mark.parametrize("is_salvaging", [False, True])
def test_damage_ends_a_stream_early(is_salvaging: bool) -> None:
    whole = zlib.compress(DATA, 0)
    for data in (whole[:2000], whole[:-1] + b"\x00" + whole[-1:], whole[:-1] + b"\x01"):
        source = ByteSource(io.BytesIO(data), "ZLIB", is_salvaging=is_salvaging)
        found = b"".join(iter(lambda s=source: s.read(10_000), b""))
        assert DATA.startswith(found)
        assert "damaged compressed stream" in str(source.failure)
        if is_salvaging:
            assert len(found) >= min(len(data) - 20, 4990)


def test_intact_is_what_inflates_to_its_end(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(gzip.compress(DATA))
    assert is_intact(path, "GZIP")
    assert not is_intact(path, "ZLIB")
    path.write_bytes(gzip.compress(DATA)[:-1])
    assert not is_intact(path, "GZIP")
    assert is_intact(path, None)
