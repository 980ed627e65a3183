"""Compiled scans over framed records: every length and checksum is checked before it is used."""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np

from etl.tfrecord.crc32c import masked_crc
from etl.tfrecord.kernels import inlined, kernel, load_u32, load_u64

HEADER_BYTES = 12
FOOTER_BYTES = 4
MAX_RECORD_BYTES = 2**31 - 1  # what a protobuf message may hold

# Why a record is not whole and sound.
SOUND, CUT_HEADER, BAD_LENGTH, CUT_PAYLOAD, BAD_PAYLOAD, TOO_LONG = 0, 1, 2, 3, 4, 5


@inlined
def _is_sound_header(header):
    return load_u32(header + 8) == masked_crc(header, 8)


@kernel
def scan_records(address, length, verify, index):
    """Fills `index` record by record; stops at the first that is not whole and sound.

    Returns:
        Records found, position of the first byte not covered, reason (`SOUND` at the end of the
        data), and the payload length that the record there claims.
    """
    position: Any = 0
    n = 0
    while position < length:
        if length - position < HEADER_BYTES:
            return n, position, CUT_HEADER, 0
        header = address + position
        if not _is_sound_header(header):
            return n, position, BAD_LENGTH, 0
        claimed = load_u64(header)
        if claimed > np.uint64(MAX_RECORD_BYTES):
            return n, position, TOO_LONG, 0
        payload = np.int64(claimed)
        if payload > length - position - (HEADER_BYTES + FOOTER_BYTES):
            return n, position, CUT_PAYLOAD, payload
        start = header + HEADER_BYTES
        if verify and load_u32(start + payload) != masked_crc(start, payload):
            return n, position, BAD_PAYLOAD, payload
        index[n, 0] = position + HEADER_BYTES
        index[n, 1] = payload
        n += 1
        position += HEADER_BYTES + payload + FOOTER_BYTES
    return n, position, SOUND, 0


@kernel
def find_record(address, length, ended):
    """Finds the first position at which a whole record stands, both of its checksums holding.

    Args:
        address: Where to search from.
        length: Bytes there.
        ended: Whether nothing follows them.

    Returns:
        Position (`length` where there is none), and the bytes that must be there from it on
        before it can be judged, or 0 where it is decided.
    """
    position = 0
    while position + HEADER_BYTES <= length:
        header = address + position
        # The upper half of a possible length is zero, which is quicker to see than a checksum.
        if load_u32(header + 4) == np.uint32(0) and _is_sound_header(header):
            payload = np.int64(load_u32(header))
            if payload <= length - position - (HEADER_BYTES + FOOTER_BYTES):
                start = header + HEADER_BYTES
                if load_u32(start + payload) == masked_crc(start, payload):
                    return position, 0
            elif not ended and payload <= MAX_RECORD_BYTES:
                return position, HEADER_BYTES + payload + FOOTER_BYTES
        position += 1
    if ended:
        return length, 0
    return position, HEADER_BYTES


@kernel
def is_header(address, length):
    """Whether a sound header stands at an address with `length` bytes."""
    return length >= HEADER_BYTES and _is_sound_header(address)


@kernel
def walk_headers(address, length, every, offsets):
    """Fills `offsets` with the first record start at or after each multiple of `every` bytes.

    Returns:
        Offsets found; what follows an unsound header belongs to the last of them.
    """
    position: Any = 0
    wanted: Any = every
    n = 0
    while length - position >= HEADER_BYTES and _is_sound_header(address + position):
        claimed = load_u64(address + position)
        if claimed > np.uint64(MAX_RECORD_BYTES):
            return n
        position += HEADER_BYTES + np.int64(claimed) + FOOTER_BYTES
        if position >= length:
            return n
        if position >= wanted:
            # Only a sound header may begin a part: what is damaged stays with what is before it.
            if length - position < HEADER_BYTES or not _is_sound_header(address + position):
                return n
            offsets[n] = position
            n += 1
            wanted = (position // every + 1) * every
    return n
