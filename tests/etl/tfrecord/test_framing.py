"""Framing against an independent framer, TensorFlow's writer, and damage at every byte."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.tfrecord.framing import (
    CorruptRecordError,
    detect_compression,
    index_records,
    read_record_blocks,
    read_records,
)

PAYLOADS = [b"alpha", b"", b"\x00" * 40, b"omega" * 7]


@given(st.lists(st.binary(max_size=80), max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_index_finds_every_payload(frame, payloads: list[bytes]) -> None:
    data = frame(payloads)
    index = index_records(data)
    assert [data[start : start + length] for start, length in index] == payloads


def test_truncation_at_every_byte_is_noticed(frame, tmp_path: Path) -> None:
    data = frame(PAYLOADS)
    ends = np.cumsum([0] + [len(p) + 16 for p in PAYLOADS])
    for cut in range(len(data)):
        path = tmp_path / "cut.tfrecord"
        path.write_bytes(data[:cut])
        if cut in ends:  # a record border: nothing on the wire says that more was to come
            assert len(list(read_records(path))) == list(ends).index(cut)
            continue
        start = int(ends[ends <= cut].max())
        with pytest.raises(CorruptRecordError, match="truncated") as caught:
            list(read_records(path))
        assert str(path) in str(caught.value)
        assert f"byte offset {start} " in str(caught.value)


def test_a_flipped_bit_at_any_byte_is_noticed(frame) -> None:
    data = bytearray(frame(PAYLOADS))
    for position in range(len(data)):
        data[position] ^= 0x10
        with pytest.raises(CorruptRecordError):
            index_records(bytes(data))
        data[position] ^= 0x10
    assert len(index_records(bytes(data))) == len(PAYLOADS)


def test_reasons_are_told_apart(frame) -> None:
    data = bytearray(frame(PAYLOADS))
    data[-1] ^= 1
    with pytest.raises(CorruptRecordError, match=r"checksum of the payload.*record 3"):
        index_records(bytes(data))
    data[0] ^= 1
    with pytest.raises(CorruptRecordError, match=r"checksum of the length.*record 0"):
        index_records(bytes(data))


def test_huge_length_with_a_valid_checksum_is_refused_without_allocating(frame) -> None:
    from etl.tfrecord.crc32c import crc32c

    length = (2**62).to_bytes(8, "little")
    crc = crc32c(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    with pytest.raises(CorruptRecordError, match="longer than"):
        index_records(length + masked.to_bytes(4, "little") + b"x" * 100)


@pytest.mark.parametrize("block_bytes", [1, 13, 64, 1 << 20])
@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_blocks_of_any_size_give_the_same_records(frame, tmp_path, block_bytes, compression):
    path = tmp_path / "file"
    options = tf.io.TFRecordOptions(compression_type=compression or "")
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for payload in PAYLOADS:
            writer.write(payload)
    blocks = list(read_record_blocks(path, block_bytes=block_bytes))
    found = [b.data[s : s + n].tobytes() for b in blocks for s, n in b.index.tolist()]
    assert found == PAYLOADS
    firsts = [block.first_record for block in blocks]
    assert firsts == list(np.cumsum([0] + [len(b.index) for b in blocks])[:-1])
    plain = frame(PAYLOADS)
    for block in blocks:
        assert plain[block.offset : block.offset + block.data.size] == block.data.tobytes()


def test_concatenated_gzip_members_are_one_stream(frame, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(frame(PAYLOADS[:2])) + gzip.compress(frame(PAYLOADS[2:])))
    assert list(read_records(path)) == PAYLOADS


def test_highly_compressible_stream_stays_within_blocks(frame, tmp_path: Path) -> None:
    payloads = [bytes(1000)] * 200
    path = tmp_path / "file.z"
    path.write_bytes(zlib.compress(frame(payloads)))
    blocks = list(read_record_blocks(path, block_bytes=4096))
    assert max(block.data.size for block in blocks) <= 4096
    assert sum(len(block.index) for block in blocks) == 200


def test_truncated_and_damaged_gzip_name_the_file(frame, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    whole = gzip.compress(frame(PAYLOADS))
    for data in (whole[:-9], whole[:20], whole[:30] + b"\xff\xff" + whole[32:]):
        path.write_bytes(data)
        with pytest.raises(CorruptRecordError, match=r"file\.gz.*uncompressed stream"):
            list(read_records(path))


def test_plain_file_whose_length_looks_like_gzip_is_read(frame, tmp_path: Path) -> None:
    payload = bytes(0x088B1F)
    data = frame([payload])
    assert data[:3] == b"\x1f\x8b\x08"
    path = tmp_path / "file"
    path.write_bytes(data)
    assert list(read_records(path)) == [payload]


def test_detects_compression() -> None:
    assert detect_compression(gzip.compress(b"x" * 100)[:12]) == "GZIP"
    for level in (1, 6, 9):
        assert detect_compression(zlib.compress(b"x" * 100, level)[:12]) == "ZLIB"
    assert detect_compression(b"") is None


def test_empty_file_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(b"")
    assert list(read_record_blocks(path)) == []


def test_unknown_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SNAPPY"):
        list(read_record_blocks(tmp_path / "x", compression="SNAPPY"))


def test_verification_of_payloads_can_be_left_out(frame, tmp_path: Path) -> None:
    data = bytearray(frame([b"abc"]))
    data[12] ^= 1
    path = tmp_path / "file"
    path.write_bytes(bytes(data))
    (block,) = read_record_blocks(path, verify=False)
    assert len(block.index) == 1
