"""Protobuf's variable-length integers, a machine word at a time (encoding guide, "Base 128")."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from etl.tfrecord.bit_groups import spread_groups
from etl.tfrecord.kernels import (
    inlined,
    leading_zeros,
    load_u8,
    store_u8,
    store_u64,
)

# The bit of each byte that says that more bytes follow.
CONTINUATION = 0x8080_8080_8080_8080
FAILED = -1


@inlined
def varint_bytes(value):
    """Bytes of a varint, 1 to 10: ceil(bits / 7) without a division."""
    bits = np.uint64(64) - leading_zeros(np.uint64(value) | np.uint64(1))
    return np.int64((bits * np.uint64(9) + np.uint64(64)) >> np.uint64(6))


@inlined
def store_varint(address, value):
    """Stores a varint in whole words; returns the address past it."""
    value = np.uint64(value)
    spread = spread_groups(value)
    if value < np.uint64(1 << 56):
        # Bit at which the last byte begins: below it, all bytes are followed by another.
        last = (np.uint64(63) - leading_zeros(spread | np.uint64(1))) & np.uint64(0x38)
        store_u64(address, spread | (np.uint64(CONTINUATION) & ~(~np.uint64(0) << last)))
        return address + np.int64(last >> np.uint64(3)) + 1
    store_u64(address, spread | np.uint64(CONTINUATION))
    rest = value >> np.uint64(56)
    if rest < np.uint64(0x80):
        store_u64(address + 8, rest)
        return address + 9
    store_u64(address + 8, (rest & np.uint64(0x7F)) | np.uint64(0x180))
    return address + 10


@inlined
def store_exact_varint(address, value):
    """Stores a varint byte by byte, touching nothing past it."""
    while value >= 128:
        store_u8(address, np.uint8((value & 127) | 128))
        value >>= 7
        address += 1
    store_u8(address, np.uint8(value))
    return address + 1


@inlined
def read_varint(p, end):
    """Value and address past it, or `FAILED` for a varint that is cut or over ten bytes long."""
    value, shift = np.uint64(0), np.uint64(0)
    while p < end and shift < np.uint64(70):
        byte = load_u8(p)
        p += 1
        value |= np.uint64(byte & np.uint8(0x7F)) << shift
        if byte < np.uint8(0x80):
            return value, p
        shift += np.uint64(7)
    return value, FAILED
