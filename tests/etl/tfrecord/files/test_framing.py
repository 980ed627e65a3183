"""Framing against an independent framer, TensorFlow's writer, and damage at every byte."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.tfrecord.codec import framing
from etl.tfrecord.codec.framing import (
    BadRange,
    CorruptRecordError,
    detect_compression,
    find_starts,
    index_records,
    read_record_blocks,
)
from tests.tfrecord_files import read_records

PAYLOADS = [b"alpha", b"", b"\x00" * 40, b"omega" * 7]


def test_huge_length_with_a_valid_checksum_is_refused_without_allocating(frame) -> None:
    from etl.tfrecord.codec.crc32c import crc32c

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
    path.write_bytes(gzip.compress(frame(PAYLOADS[:2])) + gzip.compress(frame(PAYLOADS[2:])))
    assert list(read_records(path)) == PAYLOADS


def test_detects_compression() -> None:
    assert detect_compression(gzip.compress(b"x" * 100)[:12]) == "GZIP"
    for level in (1, 6, 9):
        assert detect_compression(zlib.compress(b"x" * 100, level)[:12]) == "ZLIB"
    assert detect_compression(b"") is None


def test_verification_of_payloads_can_be_left_out(frame, tmp_path: Path) -> None:
    data = bytearray(frame([b"abc"]))
    data[12] ^= 1
    path = tmp_path / "file"
    path.write_bytes(bytes(data))
    (block,) = read_record_blocks(path, verify=False)
    assert len(block.index) == 1


def test_starts_are_found_up_to_an_unsound_header(frame, monkeypatch) -> None:
    payloads = [bytes(k % 29) for k in range(60)]
    data = np.frombuffer(bytearray(frame(payloads)), np.uint8)
    starts = np.cumsum([0] + [len(p) + 16 for p in payloads])[:-1].tolist()
    for at_once in (13, 50, 1 << 20):
        monkeypatch.setattr(framing, "_AT_ONCE_BYTES", at_once)
        assert find_starts(data).tolist() == starts
        assert find_starts(data[: starts[41] + 14]).tolist() == starts[:42]
    data[starts[40]] ^= 1
    assert find_starts(data).tolist() == starts[:40]


RECOVERY_PAYLOADS = [b"alpha", b"", b"\x00" * 40, b"omega" * 7, b"z"]
ENDS = np.cumsum([0] + [len(p) + 16 for p in RECOVERY_PAYLOADS]).tolist()


def recover(path: Path, **options) -> tuple[list[bytes], list[BadRange], bytes]:
    """Payloads, bad ranges with their pieces joined, and all bytes seen in order."""
    bad: list[BadRange] = []
    payloads, seen = [], {}
    for block in read_record_blocks(path, on_corrupt=bad.append, **options):
        payloads += [block.data[s : s + n].tobytes() for s, n in block.index.tolist()]
        seen[block.offset] = block.data.tobytes()
    joined: list[BadRange] = []
    for piece in bad:
        seen[piece.offset] = seen.get(piece.offset, b"") + piece.data.tobytes()
        if piece.continues:
            last = joined.pop()
            assert piece.offset == last.offset + last.data.size
            whole = np.concatenate([last.data, piece.data])
            joined.append(BadRange(last.offset, whole, last.record, last.reason))
        else:
            joined.append(piece)
    return payloads, joined, b"".join(seen[offset] for offset in sorted(seen))


@pytest.mark.parametrize("block_bytes", [1, 37, 1 << 20])
def test_a_flipped_bit_costs_one_record(frame, tmp_path: Path, block_bytes: int) -> None:
    whole = frame(RECOVERY_PAYLOADS)
    path = tmp_path / "file"
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        hit = int(np.searchsorted(ENDS, position, side="right")) - 1
        payloads, bad, seen = recover(path, block_bytes=block_bytes, compression=None)
        assert payloads == RECOVERY_PAYLOADS[:hit] + RECOVERY_PAYLOADS[hit + 1 :]
        assert [(b.offset, b.data.size, b.record) for b in bad] == [
            (ENDS[hit], ENDS[hit + 1] - ENDS[hit], hit)
        ]
        assert seen == bytes(data)
        with pytest.raises(CorruptRecordError, match=rf"byte offset {ENDS[hit]} \(record {hit}\)"):
            list(read_record_blocks(path, block_bytes=block_bytes, compression=None))


def test_truncation_at_every_byte_is_told(frame, tmp_path: Path) -> None:
    """Also inside a length, which other readers take for a regular end."""
    whole = frame(RECOVERY_PAYLOADS)
    path = tmp_path / "file"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        complete = int(np.searchsorted(ENDS, cut, side="right")) - 1
        payloads, bad, seen = recover(path, compression=None)
        assert payloads == RECOVERY_PAYLOADS[:complete]
        assert seen == whole[:cut]
        assert len(bad) == (cut not in ENDS)
        assert all("truncated" in b.reason for b in bad)
        if bad:
            with pytest.raises(
                CorruptRecordError, match=f"truncated.* byte offset {ENDS[complete]} "
            ):
                list(read_record_blocks(path, compression=None))


@given(st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_lost_or_added_anywhere(frame, tmp_path: Path, data) -> None:
    payloads = data.draw(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8))
    pieces = [frame([payload]) for payload in payloads]
    whole = b"".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    path = tmp_path / "file"
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=30)) + whole[stop:])
    found, bad, seen = recover(path, block_bytes=data.draw(st.integers(1, 200)), compression=None)
    ends = np.cumsum([len(piece) for piece in pieces])
    before = [p for p, end in zip(payloads, ends, strict=True) if end <= start]
    after = [
        p for p, piece, end in zip(payloads, pieces, ends, strict=True) if end - len(piece) >= stop
    ]
    assert found[: len(before)] == before
    assert seen == path.read_bytes()
    # A length that happens to lead from a cut record to a later one takes what is between.
    if not any("of the payload" in b.reason for b in bad):
        assert len(found) >= len(before) + len(after)
        assert found[len(found) - len(after) :] == after


def test_numbers_are_given_as_long_as_they_are_known(frame, tmp_path: Path) -> None:
    data = bytearray(frame(RECOVERY_PAYLOADS))
    data[ENDS[0] + 13] ^= 1  # payload: one record
    data[ENDS[2]] ^= 1  # length: who knows how many
    data[ENDS[4] + 12] ^= 1
    path = tmp_path / "file"
    path.write_bytes(data)
    payloads, bad, _ = recover(path)
    assert payloads == [b"", b"omega" * 7]
    assert [b.record for b in bad] == [0, 2, None]


def test_long_garbage_arrives_in_pieces_of_a_block(frame, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(frame([b"a"]) + bytes(100_000) + frame([b"b"]))
    pieces: list[BadRange] = []
    blocks = list(
        read_record_blocks(path, block_bytes=4096, compression=None, on_corrupt=pieces.append)
    )
    assert [b.data[s : s + n].tobytes() for b in blocks for s, n in b.index] == [b"a", b"b"]
    assert max(piece.data.size for piece in pieces) <= 4096
    assert sum(piece.data.size for piece in pieces) == 100_000


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damaged_stream_gives_what_comes_before(frame, tmp_path: Path, compress) -> None:
    rng = np.random.default_rng(3)
    payloads = [rng.bytes(100) for _ in range(2000)]
    data = bytearray(compress(frame(payloads)))
    path = tmp_path / "file"
    path.write_bytes(data[: len(data) // 2])
    found, bad, _ = recover(path)
    assert found == payloads[: len(found)]
    assert len(found) > 900
    assert [("ends early" in b.reason, "lost" in b.reason) for b in bad] == [(True, True)]
    data[-2] ^= 1  # the checksum of the whole stream: the records prove themselves sound
    path.write_bytes(data)
    found, bad, _ = recover(path)
    assert found == payloads
    assert len(bad) == 1


def test_damage_inside_a_compressed_stream_keeps_the_start(frame, tmp_path: Path) -> None:
    payloads = [b"%06d" % k for k in range(5000)]  # which the damage repeats, checksums and all
    data = bytearray(gzip.compress(frame(payloads)))
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    path = tmp_path / "file.gz"
    path.write_bytes(data)
    found, bad, _ = recover(path)
    assert found == payloads[: len(found)]
    assert len(found) > 1000
    assert ["compressed stream" in b.reason for b in bad] == [True]


def test_ranges_at_record_boundaries_are_the_file(frame, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(frame(RECOVERY_PAYLOADS))
    for first, last in ((0, 2), (2, 4), (1, 1), (3, None)):
        stop = None if last is None else ENDS[last]
        blocks = list(read_record_blocks(path, start=ENDS[first], stop=stop, block_bytes=7))
        found = [b.data[s : s + n].tobytes() for b in blocks for s, n in b.index.tolist()]
        assert found == RECOVERY_PAYLOADS[first:last]
        assert [b.offset for b in blocks][:1] == [ENDS[first]][: len(blocks)]


def test_range_off_a_boundary_is_noticed(frame, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(frame(RECOVERY_PAYLOADS))
    with pytest.raises(CorruptRecordError, match=r"from byte 3 on.*checksum of the length"):
        list(read_record_blocks(path, start=3))
    with pytest.raises(CorruptRecordError, match="truncated"):
        list(read_record_blocks(path, stop=ENDS[2] + 5))
    with pytest.raises(ConfigError, match="SNAPPY"):
        list(read_record_blocks(path, compression="SNAPPY"))
    with pytest.raises(ConfigError, match="range"):
        list(read_record_blocks(path, start=ENDS[1], compression="GZIP"))


@pytest.mark.parametrize("compression", ["auto", None, "GZIP", "ZLIB"])
def test_file_without_a_byte_has_no_records_and_no_damage(tmp_path: Path, compression) -> None:
    (tmp_path / "empty").touch()
    assert recover(tmp_path / "empty", compression=compression) == ([], [], b"")
