"""CRC-32C against RFC 3720's vectors, a bitwise implementation, and every code path."""

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from etl.tfrecord.codec import crc32c as crc32c_module
from etl.tfrecord.codec.crc32c import crc32c, select_advance, select_multiply
from etl.tfrecord.codec.kernels import load_u64

_TARGET = llvm.get_process_triple(), dict(llvm.get_host_cpu_features())
_multiply, _least = select_multiply(*_TARGET)


@njit
def multiply(left, right):
    return _multiply(left, right)


def bitwise_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_matches_rfc_3720_vectors(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize(
    "size", [1, 7, 8, 9, 143, 144, 145, 167, 168, 3071, 3073, 12_287, 12_288, 12_289, 40_000]
)
def test_lanes_match_bitwise_reference(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    assert crc32c(data) == bitwise_crc(data)


@given(st.binary(max_size=300), st.integers(0, 300))
@settings(deadline=None)
def test_streaming_equals_one_piece(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data) == bitwise_crc(data)


def test_table_fallback_matches_reference() -> None:
    advance_byte, advance_word = select_advance("riscv64-unknown-linux-gnu", {})

    @njit
    def run(words: np.ndarray, tail: np.ndarray) -> np.uint32:
        crc = np.uint32(0xFFFFFFFF)
        for word in words:
            crc = advance_word(crc, word)
        for byte in tail:
            crc = advance_byte(crc, byte)
        return np.uint32(crc ^ np.uint32(0xFFFFFFFF))

    data = np.random.default_rng(1).integers(0, 256, 101, dtype=np.uint8)
    assert run(data[:96].view(np.uint64), data[96:]) == bitwise_crc(data.tobytes())


@pytest.mark.skipif(_least > 1 << 40, reason="the CPU does not multiply")
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_multiplication_is_without_carries(left: int, right: int) -> None:
    expected = 0
    for bit in range(32):
        expected ^= (left << bit) * (right >> bit & 1)
    assert int(multiply(np.uint64(left), np.uint64(right))) == expected


def test_x86_without_sse42_uses_tables() -> None:
    fallback = select_advance("riscv64-unknown-linux-gnu", {})
    assert select_advance("x86_64-unknown-linux-gnu", {"sse4.2": False}) == fallback
    assert select_advance("x86_64-unknown-linux-gnu", {"sse4.2": True}) != fallback
    assert select_advance("aarch64-unknown-linux-gnu", {"crc": True}) != fallback


_, _advance = select_advance(*_TARGET)


@pytest.mark.skipif(crc32c_module.MIN_FOLDED_BYTES > 1 << 40, reason="the CPU does not fold")
@pytest.mark.parametrize("register", [0, 1, 0xFFFFFFFF, 0x8A9136AA])
def test_folding_gives_what_word_by_word_does(register: int) -> None:
    fold = crc32c_module.fold_blocks

    @njit
    def by_folding(register, address, blocks):
        return fold(np.uint32(register), address, blocks)

    @njit
    def by_words(register, address, blocks):
        register = np.uint32(register)
        for i in range(8 * blocks):
            register = _advance(register, load_u64(address + 8 * i))
        return register

    data = np.random.default_rng(0).integers(0, 256, 64 * 40 + 3, dtype=np.uint8)
    for blocks in range(4, 41):
        place = (register, data.ctypes.data + 3, blocks)
        assert by_folding(*place) == by_words(*place), blocks
