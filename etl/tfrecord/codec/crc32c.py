"""CRC-32C (Castagnoli) and the masked form that TFRecord stores.

The polynomial is that of RFC 3720, appendix B.4. The instruction used (SSE4.2 `crc32`, AArch64
`crc32c*`, or a table) follows the features of the CPU that runs the code; long buffers are folded
where it can.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from conf.manifest import FileInfo
from etl.tfrecord.codec.kernels import (
    BYTE,
    HOST,
    INDEX,
    WORD,
    call,
    emitted,
    inlined,
    kernel,
    load_u8,
    load_u64,
)

_POLYNOMIAL = 0x82F63B78  # bit-reflected, so that bit 0 of a register is x**31
_MASK_DELTA = np.uint32(0xA282EAD8)  # tensorflow/core/lib/hash/crc32c.h

# Long buffers are hashed in three interleaved lanes: the instruction takes one word per cycle but
# answers after three. A lane is at most this many words: longer ones are faster in the cache, but
# prefetching takes three far-away streams for no stream at all.
_LANE_WORDS = 32
_NEVER = 1 << 62  # bytes


def _shift(register: int, bits: int) -> int:
    """A register past so many zero bits: times x**bits modulo the polynomial."""
    for _ in range(bits):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


_BYTE_TABLE = np.array([_shift(byte, 8) for byte in range(256)], np.uint32)
# Constants that move a register past so many words of zeros, none for no word. A carry-less
# product of two bit-reflected registers, fed to the CRC of a word, is their product times x**33
# modulo the polynomial; so constant k is x**(64 k - 33), for k from 1 on (Gopal et al., Fast CRC
# Computation for iSCSI Polynomial Using CRC32 Instruction, Intel, 2011).
_LANE_SHIFTS = np.zeros(_LANE_WORDS + 1, np.uint64)
_LANE_SHIFTS[1:] = [*accumulate(range(_LANE_WORDS - 1), lambda r, _: _shift(r, 64), initial=1)]


def _build_instruction(name: str, bits: int) -> Callable[..., Any]:
    """Wraps an LLVM CRC intrinsic, taking a data word of so many bits, as uint32 -> uint32."""
    # SSE4.2 keeps the register in 64 bits for 64-bit data; AArch64 takes bytes in 32.
    register = WORD if name.endswith("32.64.64") else INDEX
    operand = INDEX if "aarch64" in name and bits == 8 else ir.IntType(bits)

    @emitted(types.uint32, types.uint32, types.uint64 if bits == 64 else types.uint8)
    def advance(builder: Any, crc: Any, data: Any) -> Any:
        crc = crc if register is INDEX else builder.zext(crc, register)
        data = data if operand.width == bits else builder.zext(data, operand)
        result = call(builder, name, register, crc, data)
        return result if register is INDEX else builder.trunc(result, INDEX)

    return advance


@inlined
def _advance_byte_by_table(crc: np.uint32, data: np.uint8) -> np.uint32:
    return np.uint32(_BYTE_TABLE[(crc ^ np.uint32(data)) & np.uint32(0xFF)] ^ (crc >> np.uint32(8)))


@inlined
def _advance_word_by_table(crc: np.uint32, data: np.uint64) -> np.uint32:
    for k in range(8):
        byte = np.uint8((data >> np.uint64(8 * k)) & np.uint64(0xFF))
        crc = _advance_byte_by_table(crc, byte)
    return crc


def _build_multiply(name: str) -> Callable[..., Any]:
    """Wraps an LLVM intrinsic that multiplies 32-bit polynomials (in uint64) without carries."""
    pair, wide = ir.VectorType(WORD, 2), ir.VectorType(BYTE, 16)

    @emitted(types.uint64, types.uint64, types.uint64)
    def multiply(builder: Any, left: Any, right: Any) -> Any:
        if "x86" in name:
            empty = ir.Constant(pair, None)
            places = (builder.insert_element(empty, word, INDEX(0)) for word in (left, right))
            product = call(builder, name, pair, *places, BYTE(0))
        else:
            product = builder.bitcast(call(builder, name, wide, left, right), pair)
        return builder.extract_element(product, INDEX(0))

    return multiply


@inlined
def _never_multiplied(left: np.uint64, right: np.uint64) -> np.uint64:
    return left & right


def select_advance(
    triple: str, features: dict[str, bool]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Picks for a CPU what advances a CRC register, uint32: by a byte, and by eight, uint64."""
    machine = triple.partition("-")[0]
    if machine == "x86_64" and features.get("sse4.2"):
        return (
            _build_instruction("llvm.x86.sse42.crc32.32.8", 8),
            _build_instruction("llvm.x86.sse42.crc32.64.64", 64),
        )
    if machine in ("aarch64", "arm64") and features.get("crc"):
        return (
            _build_instruction("llvm.aarch64.crc32cb", 8),
            _build_instruction("llvm.aarch64.crc32cx", 64),
        )
    return _advance_byte_by_table, _advance_word_by_table


def select_multiply(triple: str, features: dict[str, bool]) -> tuple[Callable[..., Any], int]:
    """Picks a CPU's carry-less multiplication, and the bytes from which on lanes are worth it."""
    machine = triple.partition("-")[0]
    if machine == "x86_64" and features.get("pclmul"):
        return _build_multiply("llvm.x86.pclmulqdq"), 144
    if machine in ("aarch64", "arm64") and features.get("aes"):
        return _build_multiply("llvm.aarch64.neon.pmull64"), 144
    return _never_multiplied, _NEVER


_advance_byte, _advance_word = select_advance(*HOST)
_multiply, _MIN_LANED_BYTES = select_multiply(*HOST)


@inlined
def _skip_words(register: np.uint32, words: int) -> np.uint32:
    """Advances the register past `words` words of zeros, 1 to `_LANE_WORDS`."""
    return _advance_word(np.uint32(0), _multiply(np.uint64(register), _LANE_SHIFTS[words]))


@inlined
def advance_crc(crc: np.uint32, address: int, length: int) -> np.uint32:
    """CRC-32C of `length` bytes at `address`, continuing the CRC `crc` of what precedes."""
    register = np.uint32(crc) ^ np.uint32(0xFFFFFFFF)
    i = 0
    if length >= MIN_FOLDED_BYTES:
        blocks = length // BLOCK_BYTES
        register = fold_blocks(register, address, blocks)
        i = BLOCK_BYTES * blocks
    while length - i >= _MIN_LANED_BYTES:
        words = min((length - i) // 24, _LANE_WORDS)
        lane = 8 * words
        second, third = np.uint32(0), np.uint32(0)
        for p in range(address + i, address + i + lane, 8):
            register = _advance_word(register, load_u64(p))
            second = _advance_word(second, load_u64(p + lane))
            third = _advance_word(third, load_u64(p + 2 * lane))
        register = _skip_words(np.uint32(_skip_words(register, words) ^ second), words) ^ third
        i += 3 * lane
    while i + 8 <= length:
        register = _advance_word(register, load_u64(address + i))
        i += 8
    while i < length:
        register = _advance_byte(register, load_u8(address + i))
        i += 1
    return np.uint32(register ^ np.uint32(0xFFFFFFFF))


@kernel
def hash_memory(crc: np.uint32, address: int, length: int) -> np.uint32:
    """As `advance_crc`, callable from Python."""
    return advance_crc(np.uint32(crc), address, length)


@inlined
def mask_crc(crc: np.uint32) -> np.uint32:
    """TFRecord's masking of a CRC, which keeps the CRC of data that embeds CRCs useful."""
    crc = np.uint32(crc)
    rotated = np.uint32((crc >> np.uint32(15)) | (crc << np.uint32(17)))
    return np.uint32(rotated + _MASK_DELTA)


@inlined
def masked_crc(address: int, length: int) -> np.uint32:
    """Masked CRC-32C of `length` bytes at `address`."""
    return mask_crc(advance_crc(np.uint32(0), address, length))


def crc32c(data: bytes | bytearray | memoryview | np.ndarray, crc: int = 0) -> int:
    """CRC-32C, in [0, 2**32), of a C-contiguous buffer that follows bytes with the CRC `crc`."""
    view = memoryview(data)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError("crc32c needs a contiguous buffer; pass a copy of the data instead")
    buffer = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return int(hash_memory(np.uint32(crc), buffer.ctypes.data, buffer.size))


BLOCK_BYTES = 64
_NEEDED = ("avx512f", "vpclmulqdq", "sse4.2")
_CHAINS = 4

_WORDS = ir.VectorType(WORD, 8)


def _power(exponent: int) -> int:
    """x**exponent modulo the polynomial, in a reflected 64-bit word."""
    return _shift(1 << 31, exponent) << 32


def _factors(*distances: int) -> Any:
    """A register of the factors that move each of four lanes by so many bits; 0 for none."""
    # A product of reflected words is one bit short of a lane: hence the exponents' - 1.
    pairs = [(_power(d + 63), _power(d - 1)) if d else (0, 0) for d in distances]
    return ir.Constant(_WORDS, [word for pair in pairs for word in pair])


def _fold(builder: Any, register: Any, factors: Any) -> Any:
    name = "llvm.x86.pclmulqdq.512"
    low, high = (call(builder, name, _WORDS, register, factors, BYTE(i)) for i in (0x00, 0x11))
    return builder.xor(low, high)


def _finish(builder: Any, register: Any) -> Any:
    """The CRC register, uint32, that a register of four lanes stands for."""
    moved = _fold(builder, register, _factors(384, 256, 128, 0))
    crc = WORD(0)
    for half in (0, 1):
        word = builder.extract_element(register, INDEX(6 + half))
        for lane in (0, 1, 2):
            word = builder.xor(word, builder.extract_element(moved, INDEX(2 * lane + half)))
        crc = call(builder, "llvm.x86.sse42.crc32.64.64", WORD, crc, word)
    return builder.trunc(crc, INDEX)


@emitted(types.uint32, types.uint32, types.int64, types.int64)
def _fold_blocks(builder: Any, crc: Any, address: Any, blocks: Any) -> Any:
    source = builder.inttoptr(address, _WORDS.as_pointer())

    def load(index: Any) -> Any:
        return builder.load(builder.gep(source, [index]), align=1)

    seed = builder.insert_element(ir.Constant(_WORDS, None), builder.zext(crc, WORD), INDEX(0))
    chains = [load(WORD(i)) for i in range(_CHAINS)]
    chains[0] = builder.xor(chains[0], seed)
    places = [cgutils.alloca_once_value(builder, chain) for chain in chains]
    far, near = _factors(*[512 * _CHAINS] * 4), _factors(*[512] * 4)
    rounds = builder.udiv(blocks, WORD(_CHAINS))
    with cgutils.for_range(builder, rounds, start=WORD(1)) as loop:
        first = builder.mul(loop.index, WORD(_CHAINS))
        for i, place in enumerate(places):
            moved = _fold(builder, builder.load(place), far)
            data = load(builder.add(first, WORD(i)))
            builder.store(builder.xor(moved, data), place)
    joined = builder.load(places[0])
    for place in places[1:]:
        joined = builder.xor(_fold(builder, joined, near), builder.load(place))
    last = cgutils.alloca_once_value(builder, joined)
    done = builder.mul(rounds, WORD(_CHAINS))
    with cgutils.for_range(builder, blocks, start=done) as loop:
        moved = _fold(builder, builder.load(last), near)
        builder.store(builder.xor(moved, load(loop.index)), last)
    return _finish(builder, builder.load(last))


@inlined
def _keep(crc, address, blocks):
    return np.uint32(crc)


def select_fold(triple: str, features: dict[str, bool]) -> tuple[Callable[..., Any], int]:
    """Picks what advances a CRC register past blocks of `BLOCK_BYTES`, and from how many bytes on.

    The kernel is `(register, address, blocks) -> register`.
    """
    if triple.startswith("x86_64") and all(features.get(name) for name in _NEEDED):
        return _fold_blocks, 16 * BLOCK_BYTES
    return _keep, _NEVER


fold_blocks, MIN_FOLDED_BYTES = select_fold(*HOST)

_READ_BYTES = 4 << 20


def describe_file(root: Path, path: Path) -> FileInfo:
    """Describes a file for the manifest in a directory."""
    checksum = size = 0
    with path.open("rb") as handle:
        while piece := handle.read(_READ_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return FileInfo(str(path.relative_to(root)), size, f"{checksum:08x}")
