"""CRC-32C (Castagnoli) and the masked form that TFRecord stores.

The polynomial is that of RFC 3720, appendix B.4. The instruction used (SSE4.2 `crc32`, AArch64
`crc32c*`, or slicing-by-8 tables: Kounavis and Berry, 2005) follows the features of the CPU that
runs the code; long buffers are folded where it can.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from conf.manifest import FileInfo
from etl.tfrecord.codec.kernels import inlined, intrinsic, kernel, load_u8, load_u64

_REFLECTED_POLYNOMIAL = 0x82F63B78  # bit-reflected
_MASK_DELTA = np.uint32(0xA282EAD8)  # tensorflow/core/lib/hash/crc32c.h

# Long buffers are hashed in three interleaved lanes: the instruction takes one word per cycle but
# answers after three. A lane is at most this many words: longer ones are faster in the cache, but
# prefetching takes three far-away streams for no stream at all.
_LANE_WORDS = 32


def _build_byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_REFLECTED_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


def _build_slicing_tables() -> np.ndarray:
    """Tables `[8, 256]`: row k advances a byte past k further zero bytes."""
    tables = np.empty((8, 256), np.uint32)
    tables[0] = _build_byte_table()
    for k in range(1, 8):
        tables[k] = tables[0][tables[k - 1] & 0xFF] ^ (tables[k - 1] >> np.uint32(8))
    return tables


def _build_lane_shifts() -> np.ndarray:
    """Constants `[_LANE_WORDS + 1]` that move a register past so many words of zeros.

    A carry-less product of two bit-reflected registers, fed to the CRC of a word, is their product
    times x**33 modulo the polynomial; so constant k is x**(64 k - 33), for k from 1 on (Gopal et
    al., Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction, Intel, 2011).
    """
    table = _SLICING[0].tolist()
    register, shifts = 1, [0]  # bit 0 of a reflected register is x**31
    for _ in range(_LANE_WORDS):
        shifts.append(register)
        for _ in range(8):
            register = table[register & 0xFF] ^ (register >> 8)
    return np.array(shifts, np.uint64)


_SLICING = _build_slicing_tables()
_LANE_SHIFTS = _build_lane_shifts()


def _build_instruction(name: str, bits: int) -> Callable[..., Any]:
    """Wraps an LLVM CRC intrinsic `name`, taking a data word of `bits` bits, as uint32 -> uint32.

    SSE4.2 keeps the register in 64 bits for 64-bit data, everything else in 32; AArch64 takes
    bytes in a 32-bit operand.
    """
    register_bits = 64 if name.endswith("32.64.64") else 32
    operand_bits = 32 if "aarch64" in name and bits == 8 else bits

    @intrinsic
    def advance(typingctx: Any, crc: Any, data: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            register, operand = ir.IntType(register_bits), ir.IntType(operand_bits)
            function = builder.module.declare_intrinsic(
                name, (), ir.FunctionType(register, [register, operand])
            )
            crc, data = args
            if register_bits == 64:
                crc = builder.zext(crc, register)
            if operand_bits != bits:
                data = builder.zext(data, operand)
            result = builder.call(function, [crc, data])
            return builder.trunc(result, ir.IntType(32)) if register_bits == 64 else result

        return types.uint32(types.uint32, types.uint64 if bits == 64 else types.uint8), codegen

    return advance


@inlined
def _advance_byte_by_table(crc: np.uint32, data: np.uint8) -> np.uint32:
    return np.uint32(_SLICING[0, (crc ^ np.uint32(data)) & np.uint32(0xFF)] ^ (crc >> np.uint32(8)))


@inlined
def _advance_word_by_table(crc: np.uint32, data: np.uint64) -> np.uint32:
    word = data ^ np.uint64(crc)
    result = np.uint32(0)
    for k in range(8):
        byte = (word >> np.uint64(8 * k)) & np.uint64(0xFF)
        result ^= _SLICING[7 - k, byte]
    return result


def _build_multiply(name: str) -> Callable[..., Any]:
    """Wraps an LLVM intrinsic that multiplies 32-bit polynomials (in uint64) without carries."""

    @intrinsic
    def multiply(typingctx: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            pair = ir.VectorType(word, 2)
            if "x86" in name:
                empty, zero = ir.Constant(pair, None), ir.Constant(ir.IntType(32), 0)
                left, right = (builder.insert_element(empty, arg, zero) for arg in args)
                half = ir.IntType(8)
                function = builder.module.declare_intrinsic(
                    name, (), ir.FunctionType(pair, [pair, pair, half])
                )
                product = builder.call(function, [left, right, half(0)])
                return builder.extract_element(product, zero)
            wide = ir.VectorType(ir.IntType(8), 16)
            function = builder.module.declare_intrinsic(
                name, (), ir.FunctionType(wide, [word, word])
            )
            product = builder.bitcast(builder.call(function, list(args)), pair)
            return builder.extract_element(product, ir.Constant(ir.IntType(32), 0))

        return types.uint64(types.uint64, types.uint64), codegen

    return multiply


@inlined
def _multiply_by_shifts(left: np.uint64, right: np.uint64) -> np.uint64:
    product = np.uint64(0)
    for bit in range(32):
        mask = np.uint64(0) - ((right >> np.uint64(bit)) & np.uint64(1))
        product ^= (left << np.uint64(bit)) & mask
    return product


def select_advance(
    triple: str, features: dict[str, bool]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Picks the fastest implementation for a CPU.

    Args:
        triple: LLVM target triple, e.g. `x86_64-unknown-linux-gnu`.
        features: CPU features by LLVM name.

    Returns:
        Two kernels advancing a CRC register: by a byte `(uint32, uint8) -> uint32` and by eight
        bytes `(uint32, uint64) -> uint32`.
    """
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
    """Picks the fastest carry-less multiplication for a CPU.

    Args:
        triple: LLVM target triple.
        features: CPU features by LLVM name.

    Returns:
        The kernel `(uint64, uint64) -> uint64`, for 32-bit operands, and the length in bytes from
        which on hashing in lanes is worth its multiplications.
    """
    machine = triple.partition("-")[0]
    if machine == "x86_64" and features.get("pclmul"):
        return _build_multiply("llvm.x86.pclmulqdq"), 144
    if machine in ("aarch64", "arm64") and features.get("aes"):
        return _build_multiply("llvm.aarch64.neon.pmull64"), 144
    return _multiply_by_shifts, 1 << 62  # never


_advance_byte, _advance_word = select_advance(
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features())
)
_multiply, _MIN_LANED_BYTES = select_multiply(
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features())
)


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
    """CRC-32C of a buffer, or of a longer stream piece by piece.

    Args:
        data: Any C-contiguous buffer.
        crc: Result for the bytes that precede `data`; 0 at the start of a stream.

    Returns:
        The CRC, in [0, 2**32).

    Raises:
        ValueError: If the buffer is not contiguous.
    """
    view = memoryview(data)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError("crc32c needs a contiguous buffer; pass a copy of the data instead")
    buffer = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return int(hash_memory(np.uint32(crc), buffer.ctypes.data, buffer.size))


BLOCK_BYTES = 64
_NEEDED = ("avx512f", "vpclmulqdq", "sse4.2")
_POLYNOMIAL = 0x82F63B78  # bit-reflected
_CHAINS = 4

_WORD, _WORDS = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)


def _power(exponent: int) -> int:
    """x**exponent modulo the polynomial, in a reflected 64-bit word."""
    register = 1 << 31
    for _ in range(exponent):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register << 32


def _factors(*distances: int) -> Any:
    """A register of the factors that move each of four lanes by so many bits; 0 for none."""
    # A product of reflected words is one bit short of a lane: hence the exponents' - 1.
    pairs = [(_power(d + 63), _power(d - 1)) if d else (0, 0) for d in distances]
    return ir.Constant(_WORDS, [word for pair in pairs for word in pair])


def _fold(builder: Any, register: Any, factors: Any) -> Any:
    byte = ir.IntType(8)
    function = builder.module.declare_intrinsic(
        "llvm.x86.pclmulqdq.512", (), ir.FunctionType(_WORDS, [_WORDS, _WORDS, byte])
    )
    low, high = (builder.call(function, [register, factors, byte(i)]) for i in (0x00, 0x11))
    return builder.xor(low, high)


def _finish(builder: Any, register: Any) -> Any:
    """The CRC register, uint32, that a register of four lanes stands for."""
    moved = _fold(builder, register, _factors(384, 256, 128, 0))
    index = ir.IntType(32)
    crc_type = ir.FunctionType(_WORD, [_WORD, _WORD])
    advance = builder.module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), crc_type)
    crc = _WORD(0)
    for half in (0, 1):
        word = builder.extract_element(register, index(6 + half))
        for lane in (0, 1, 2):
            word = builder.xor(word, builder.extract_element(moved, index(2 * lane + half)))
        crc = builder.call(advance, [crc, word])
    return builder.trunc(crc, index)


@intrinsic
def _fold_blocks(typingctx: Any, crc: Any, address: Any, blocks: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        crc, address, blocks = args
        source = builder.inttoptr(address, _WORDS.as_pointer())

        def load(index: Any) -> Any:
            return builder.load(builder.gep(source, [index]), align=1)

        zero = ir.IntType(32)(0)
        seed = builder.insert_element(ir.Constant(_WORDS, None), builder.zext(crc, _WORD), zero)
        chains = [load(_WORD(i)) for i in range(_CHAINS)]
        chains[0] = builder.xor(chains[0], seed)
        places = [cgutils.alloca_once_value(builder, chain) for chain in chains]
        far, near = _factors(*[512 * _CHAINS] * 4), _factors(*[512] * 4)
        rounds = builder.udiv(blocks, _WORD(_CHAINS))
        with cgutils.for_range(builder, rounds, start=_WORD(1)) as loop:
            first = builder.mul(loop.index, _WORD(_CHAINS))
            for i, place in enumerate(places):
                moved = _fold(builder, builder.load(place), far)
                data = load(builder.add(first, _WORD(i)))
                builder.store(builder.xor(moved, data), place)
        joined = builder.load(places[0])
        for place in places[1:]:
            joined = builder.xor(_fold(builder, joined, near), builder.load(place))
        last = cgutils.alloca_once_value(builder, joined)
        done = builder.mul(rounds, _WORD(_CHAINS))
        with cgutils.for_range(builder, blocks, start=done) as loop:
            moved = _fold(builder, builder.load(last), near)
            builder.store(builder.xor(moved, load(loop.index)), last)
        return _finish(builder, builder.load(last))

    return types.uint32(types.uint32, types.int64, types.int64), codegen


@inlined
def _keep(crc, address, blocks):
    return np.uint32(crc)


def select_fold(triple: str, features: dict[str, bool]) -> tuple[Callable[..., Any], int]:
    """Picks what a CPU can do.

    Args:
        triple: LLVM target triple.
        features: CPU features by LLVM name.

    Returns:
        The kernel `(register, address, blocks) -> register`, which advances a CRC register past
        blocks of `BLOCK_BYTES`, and the length in bytes from which on it is to be used.
    """
    if triple.startswith("x86_64") and all(features.get(name) for name in _NEEDED):
        return _fold_blocks, 16 * BLOCK_BYTES
    return _keep, 1 << 62  # never


fold_blocks, MIN_FOLDED_BYTES = select_fold(
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features())
)


_READ_BYTES = 4 << 20


def describe_file(root: Path, path: Path) -> FileInfo:
    """Describes a file for the manifest.

    Args:
        root: Directory that holds the manifest.
        path: The file.
    """
    checksum = size = 0
    with path.open("rb") as handle:
        while piece := handle.read(_READ_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return FileInfo(str(path.relative_to(root)), size, f"{checksum:08x}")
