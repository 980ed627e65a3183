"""CRC-32C (Castagnoli) and the masked form that TFRecord stores.

The polynomial is that of RFC 3720, appendix B.4. The instruction used (SSE4.2 `crc32`, AArch64
`crc32c*`, or a table) follows the features of the CPU that runs the code. Where that multiplies
without carries, long buffers are folded, 64 or 16 bytes at a time (Gopal et al., Fast CRC
Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel, 2009).
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from conf.errors import InputDataError
from conf.manifest import FileInfo
from conf.paths import ReadablePath
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
_CHAINS = 4  # blocks folded side by side: a product takes some cycles
_LANE = ir.VectorType(WORD, 2)
_X86_BYTE, _X86_WORD = "llvm.x86.sse42.crc32.32.8", "llvm.x86.sse42.crc32.64.64"
_ARM_BYTE, _ARM_WORD = "llvm.aarch64.crc32cb", "llvm.aarch64.crc32cx"


def _shift(register: int, bits: int) -> int:
    """A register past so many zero bits: times x**bits modulo the polynomial."""
    for _ in range(bits):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


_BYTE_TABLE = np.array([_shift(byte, 8) for byte in range(256)], np.uint32)


def _emit_crc(builder: Any, name: str, crc: Any, data: Any) -> Any:
    """Advances an i32 register by a byte or word, by an LLVM intrinsic."""
    # SSE4.2 keeps the register in 64 bits for 64-bit data; AArch64 takes bytes in 32.
    if name == _X86_WORD:
        return builder.trunc(call(builder, name, WORD, builder.zext(crc, WORD), data), INDEX)
    data = builder.zext(data, INDEX) if name == _ARM_BYTE else data
    return call(builder, name, INDEX, crc, data)


def _build_instruction(name: str, data_type: types.Type) -> Callable[..., Any]:
    @emitted(types.uint32, types.uint32, data_type)
    def advance(builder: Any, crc: Any, data: Any) -> Any:
        return _emit_crc(builder, name, crc, data)

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


def _power(exponent: int) -> int:
    """x**exponent modulo the polynomial, in a reflected 64-bit word."""
    return _shift(1 << 31, exponent) << 32


def _factors(*distances: int) -> Any:
    """A register of the factors that move each lane by so many bits; 0 for none."""
    # A product of reflected words is one bit short of a lane: hence the exponents' - 1.
    pairs = [(_power(d + 63), _power(d - 1)) if d else (0, 0) for d in distances]
    words = [word for pair in pairs for word in pair]
    return ir.Constant(ir.VectorType(WORD, len(words)), words)


def _multiply(builder: Any, name: str, left: Any, right: Any, half: int) -> Any:
    """Products of the low or the high words of each lane, without carries."""
    if "x86" in name:
        return call(builder, name, left.type, left, right, BYTE(0x11 * half))
    words = [builder.extract_element(factor, INDEX(half)) for factor in (left, right)]
    return builder.bitcast(call(builder, name, ir.VectorType(BYTE, 16), *words), _LANE)


def _build_fold(name: str, lanes: int, word_name: str) -> Callable[..., Any]:
    """Advances a CRC register past blocks of so many lanes: `(register, address, blocks)`."""
    block, bits = ir.VectorType(WORD, 2 * lanes), 128 * lanes
    far, near = _factors(*[bits * _CHAINS] * lanes), _factors(*[bits] * lanes)
    to_last = _factors(*range(bits - 128, -1, -128))

    def fold(builder: Any, register: Any, factors: Any) -> Any:
        low, high = (_multiply(builder, name, register, factors, half) for half in (0, 1))
        return builder.xor(low, high)

    def finish(builder: Any, register: Any) -> Any:
        moved, crc = fold(builder, register, to_last), INDEX(0)
        for half in (0, 1):
            word = builder.extract_element(register, INDEX(2 * lanes - 2 + half))
            for lane in range(lanes - 1):
                word = builder.xor(word, builder.extract_element(moved, INDEX(2 * lane + half)))
            crc = _emit_crc(builder, word_name, crc, word)
        return crc

    @emitted(types.uint32, types.uint32, types.int64, types.int64)
    def fold_blocks(builder: Any, crc: Any, address: Any, blocks: Any) -> Any:
        source = builder.inttoptr(address, block.as_pointer())

        def load(index: Any) -> Any:
            return builder.load(builder.gep(source, [index]), align=1)

        seed = builder.insert_element(ir.Constant(block, None), builder.zext(crc, WORD), INDEX(0))
        chains = [load(WORD(i)) for i in range(_CHAINS)]
        chains[0] = builder.xor(chains[0], seed)
        places = [cgutils.alloca_once_value(builder, chain) for chain in chains]
        rounds = builder.udiv(blocks, WORD(_CHAINS))
        with cgutils.for_range(builder, rounds, start=WORD(1)) as loop:
            first = builder.mul(loop.index, WORD(_CHAINS))
            for i, place in enumerate(places):
                moved = fold(builder, builder.load(place), far)
                builder.store(builder.xor(moved, load(builder.add(first, WORD(i)))), place)
        joined = builder.load(places[0])
        for place in places[1:]:
            joined = builder.xor(fold(builder, joined, near), builder.load(place))
        last = cgutils.alloca_once_value(builder, joined)
        done = builder.mul(rounds, WORD(_CHAINS))
        with cgutils.for_range(builder, blocks, start=done) as loop:
            moved = fold(builder, builder.load(last), near)
            builder.store(builder.xor(moved, load(loop.index)), last)
        return finish(builder, builder.load(last))

    return fold_blocks


@inlined
def _keep(crc, address, blocks):
    return np.uint32(crc)


def select_crc(triple: str, features: dict[str, bool]) -> tuple[Any, Any, Any, int]:
    """Picks for a CPU what advances a CRC register, uint32.

    By a byte, by a word (uint64), and past at least `_CHAINS` blocks; and the bytes of a block, 0
    where it does not fold.
    """
    machine, is_wide = triple.partition("-")[0], features.get("avx512f")
    if machine == "x86_64" and features.get("sse4.2"):
        names, fold, lanes = (_X86_BYTE, _X86_WORD), "llvm.x86.pclmulqdq", 1
        if is_wide and features.get("vpclmulqdq"):
            fold, lanes = f"{fold}.512", 4
        can_fold = lanes > 1 or features.get("pclmul")
    elif machine in ("aarch64", "arm64") and features.get("crc"):
        names, fold, lanes = (_ARM_BYTE, _ARM_WORD), "llvm.aarch64.neon.pmull64", 1
        can_fold = features.get("aes")
    else:
        return _advance_byte_by_table, _advance_word_by_table, _keep, 0
    byte = _build_instruction(names[0], types.uint8)
    word = _build_instruction(names[1], types.uint64)
    if not can_fold:
        return byte, word, _keep, 0
    return byte, word, _build_fold(fold, lanes, names[1]), 16 * lanes


_advance_byte, _advance_word, fold_blocks, BLOCK_BYTES = select_crc(*HOST)
_LEAST_FOLDED = _CHAINS * BLOCK_BYTES or 1 << 62


@inlined
def advance_crc(crc: np.uint32, address: int, length: int) -> np.uint32:
    """CRC-32C of `length` bytes at `address`, continuing the CRC `crc` of what precedes."""
    register = np.uint32(crc) ^ np.uint32(0xFFFFFFFF)
    i = 0
    if length >= _LEAST_FOLDED:
        blocks = length // max(BLOCK_BYTES, 1)
        register = fold_blocks(register, address, blocks)
        i = BLOCK_BYTES * blocks
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


_READ_BYTES = 4 << 20


def describe_file(root: Path, path: Path) -> FileInfo:
    """Describes a file for the manifest in a directory."""
    checksum = size = 0
    with path.open("rb") as handle:
        while piece := handle.read(_READ_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return FileInfo(str(path.relative_to(root)), size, f"{checksum:08x}")


def read_described(root: ReadablePath, info: FileInfo) -> bytes:
    """Reads a file that a manifest lists, and refuses another one in its place."""
    content = (root / info.path).read_bytes()
    if (found := f"{crc32c(content):08x}") != info.crc32c:
        raise InputDataError(
            f"{root / info.path} is not the file that the manifest lists",
            received=f"checksum {found}",
            allowed=info.crc32c,
            fix="restore it, roll back to an earlier version, or build again",
        )
    return content
