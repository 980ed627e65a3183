"""Reading past damage: what is sound survives, what is not is told, byte for byte."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.tfrecord.framing import BadRange, CorruptRecordError, read_record_blocks

PAYLOADS = [b"alpha", b"", b"\x00" * 40, b"omega" * 7, b"z"]
ENDS = np.cumsum([0] + [len(p) + 16 for p in PAYLOADS]).tolist()


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
    whole = frame(PAYLOADS)
    path = tmp_path / "file"
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        hit = int(np.searchsorted(ENDS, position, side="right")) - 1
        payloads, bad, seen = recover(path, block_bytes=block_bytes, compression=None)
        assert payloads == PAYLOADS[:hit] + PAYLOADS[hit + 1 :]
        assert [(b.offset, b.data.size, b.record) for b in bad] == [
            (ENDS[hit], ENDS[hit + 1] - ENDS[hit], hit)
        ]
        assert seen == bytes(data)


def test_truncation_at_every_byte_is_told(frame, tmp_path: Path) -> None:
    """Also inside a length, which other readers take for a regular end."""
    whole = frame(PAYLOADS)
    path = tmp_path / "file"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        complete = int(np.searchsorted(ENDS, cut, side="right")) - 1
        payloads, bad, seen = recover(path, compression=None)
        assert payloads == PAYLOADS[:complete]
        assert seen == whole[:cut]
        assert len(bad) == (cut not in ENDS)
        assert all("truncated" in b.reason for b in bad)


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
    data = bytearray(frame(PAYLOADS))
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


def test_damage_before_compression_is_passed_over(frame, tmp_path: Path) -> None:
    data = bytearray(frame(PAYLOADS))
    data[ENDS[2]] ^= 1
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(data))
    found, bad, _ = recover(path)
    assert found == PAYLOADS[:2] + PAYLOADS[3:]
    assert [(b.offset, b.data.size) for b in bad] == [(ENDS[2], ENDS[3] - ENDS[2])]


def test_ranges_at_record_boundaries_are_the_file(frame, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(frame(PAYLOADS))
    for first, last in ((0, 2), (2, 4), (1, 1), (3, None)):
        stop = None if last is None else ENDS[last]
        blocks = list(read_record_blocks(path, start=ENDS[first], stop=stop, block_bytes=7))
        found = [b.data[s : s + n].tobytes() for b in blocks for s, n in b.index.tolist()]
        assert found == PAYLOADS[first:last]
        assert [b.offset for b in blocks][:1] == [ENDS[first]][: len(blocks)]


def test_range_off_a_boundary_is_noticed(frame, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(frame(PAYLOADS))
    with pytest.raises(CorruptRecordError, match=r"from byte 3 on.*checksum of the length"):
        list(read_record_blocks(path, start=3))
    with pytest.raises(CorruptRecordError, match="truncated"):
        list(read_record_blocks(path, stop=ENDS[2] + 5))
    with pytest.raises(ConfigError, match="range"):
        list(read_record_blocks(path, start=ENDS[1], compression="GZIP"))


@pytest.mark.parametrize("compression", ["auto", None, "GZIP", "ZLIB"])
def test_file_without_a_byte_has_no_records_and_no_damage(tmp_path: Path, compression) -> None:
    (tmp_path / "empty").touch()
    assert recover(tmp_path / "empty", compression=compression) == ([], [], b"")
