"""CRC-32C against RFC 3720's vectors, a bitwise implementation, and every code path."""

import subprocess
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from etl.tfrecord.codec import crc32c as crc32c_module
from etl.tfrecord.codec.crc32c import crc32c, select_advance, select_multiply
from etl.tfrecord.codec.kernels import load_u64

_by_shifts, _ = select_multiply("riscv64-unknown-linux-gnu", {})
_on_host, _ = select_multiply(llvm.get_process_triple(), dict(llvm.get_host_cpu_features()))


@njit
def run_fallback(left, right):
    return _by_shifts(left, right)


@njit
def run_hardware(left, right):
    return _on_host(left, right)


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


def test_accepts_any_buffer_and_offset() -> None:
    data = bytearray(range(100))
    expected = bitwise_crc(bytes(data[3:]))
    assert crc32c(memoryview(data)[3:]) == expected
    assert crc32c(np.arange(100, dtype=np.uint8)[3:]) == expected


def test_refuses_strided_buffer() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        crc32c(np.arange(100, dtype=np.uint8)[::2])


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


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_multiplications_agree(left: int, right: int) -> None:
    """The instruction that this CPU has, the loop that stands in for it, and plain integers."""
    expected = 0
    for bit in range(32):
        expected ^= (left << bit) * (right >> bit & 1)
    for multiply in (run_hardware, run_fallback):
        assert int(multiply(np.uint64(left), np.uint64(right))) == expected


def test_x86_without_sse42_uses_tables() -> None:
    fallback = select_advance("riscv64-unknown-linux-gnu", {})
    assert select_advance("x86_64-unknown-linux-gnu", {"sse4.2": False}) == fallback
    assert select_advance("x86_64-unknown-linux-gnu", {"sse4.2": True}) != fallback
    assert select_advance("aarch64-unknown-linux-gnu", {"crc": True}) != fallback


def test_aarch64_intrinsics_compile_to_the_instruction() -> None:
    """The calls that `select_advance` emits there are valid for LLVM's AArch64 back end."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this llvmlite was built without AArch64")
    module = llvm.parse_assembly(
        "declare i32 @llvm.aarch64.crc32cx(i32, i64)\n"
        "declare i32 @llvm.aarch64.crc32cb(i32, i32)\n"
        "define i32 @f(i32 %c, i64 %w, i8 %b) {\n"
        "  %x = call i32 @llvm.aarch64.crc32cx(i32 %c, i64 %w)\n"
        "  %z = zext i8 %b to i32\n"
        "  %y = call i32 @llvm.aarch64.crc32cb(i32 %x, i32 %z)\n"
        "  ret i32 %y\n}\n"
        "declare <16 x i8> @llvm.aarch64.neon.pmull64(i64, i64)\n"
        "define i64 @g(i64 %a, i64 %b) {\n"
        "  %p = call <16 x i8> @llvm.aarch64.neon.pmull64(i64 %a, i64 %b)\n"
        "  %q = bitcast <16 x i8> %p to <2 x i64>\n"
        "  %r = extractelement <2 x i64> %q, i32 0\n"
        "  ret i64 %r\n}\n"
    )
    assembly = target.create_target_machine(features="+crc,+aes").emit_assembly(module)
    assert "crc32cx" in assembly
    assert "crc32cb" in assembly
    assert "pmull" in assembly


def test_works_without_a_writable_cache_directory(tmp_path) -> None:
    program = (
        "import numba.core.caching as c\n"
        "c.CacheImpl.__init__ = lambda self, f: (_ for _ in ()).throw(RuntimeError('no locator'))\n"
        "from etl.tfrecord.codec.crc32c import crc32c\n"
        "print(hex(crc32c(b'123456789')))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "0xe3069283", result.stderr


_ALL = {"avx512f": True, "vpclmulqdq": True, "sse4.2": True}
_crc32c_fold_, _advance = select_advance(
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features())
)


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", _ALL, True),
        ("x86_64-unknown-linux-gnu", {**_ALL, "vpclmulqdq": False}, False),
        ("x86_64-unknown-linux-gnu", {"sse4.2": True}, False),
        ("aarch64-unknown-linux-gnu", _ALL, False),
    ],
)
def test_the_cpu_decides(triple: str, features: dict, expected: bool) -> None:
    _, least = crc32c_module.select_fold(triple, features)
    assert (least < 1 << 40) == expected


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
