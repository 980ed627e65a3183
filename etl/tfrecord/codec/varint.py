"""Protobuf's variable-length integers, one at a time and many (encoding guide, "Base 128").

The 7-bit groups of a varint are taken together from eight bytes, and spread over eight bytes:
BMI2's `pext` and `pdep` do either at once, elsewhere three steps of masks and shifts do. Where
packed varints end is read off a bit mask of 64 bytes, so that no value waits for the one before
it. With AVX-512 eight go at a time, each in a lane of a 64-byte register: byte compression (VBMI2)
closes the gaps between values on the way out and finds where values end on the way in; byte
permutation (VBMI) brings each value into its lane. Longer ones than eight bytes go one by one.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from etl.tfrecord.codec.kernels import (
    BIT,
    BYTE,
    HOST,
    INDEX,
    WORD,
    call,
    count_ones,
    emitted,
    inlined,
    leading_zeros,
    load_i32,
    load_i64,
    load_u8,
    load_u64,
    outlined,
    store_u8,
    store_u64,
    trailing_zeros,
)

LANES = 8
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "bmi2")

_ALIGN = INDEX(1)
_BYTES64, _WORDS8 = ir.VectorType(BYTE, 64), ir.VectorType(WORD, LANES)
_ZERO = ir.Constant(_BYTES64, None)


def repeat(width: int, *values: int) -> Any:
    """A constant register that repeats values of some bits each."""
    count = 512 // width
    return ir.Constant(
        ir.VectorType(ir.IntType(width), count), list(values) * (count // len(values))
    )


def _emit_low_bits(builder: Any, count: Any) -> Any:
    """A word of which the low 1 to 64 bits are set."""
    return builder.lshr(WORD(2**64 - 1), builder.sub(WORD(64), count))


def _as_mask(builder: Any, bits: Any, lanes: int) -> Any:
    if lanes < 64:
        bits = builder.trunc(bits, ir.IntType(lanes))
    return builder.bitcast(bits, ir.VectorType(BIT, lanes))


def _is_used(builder: Any, words: Any) -> Any:
    """Which bytes are not zero."""
    return builder.icmp_unsigned("!=", builder.bitcast(words, _BYTES64), _ZERO)


def _compress(builder: Any, source: Any, bits: Any) -> Any:
    """The bytes whose bits are set, one after another."""
    chosen = _as_mask(builder, bits, 64)
    return call(builder, "llvm.x86.avx512.mask.compress.v64i8", _BYTES64, source, _ZERO, chosen)


def _split_groups(builder: Any, words: Any) -> Any:
    """The low 56 bits of each lane, seven to a byte."""
    places = repeat(8, *range(0, 56, 7))
    data = builder.bitcast(words, _BYTES64)
    data = call(builder, "llvm.x86.avx512.pmultishift.qb.512", _BYTES64, places, data)
    return builder.bitcast(builder.and_(data, repeat(8, 0x7F)), _WORDS8)


def _join_groups(builder: Any, data: Any) -> Any:
    """The low seven bits of each byte of a lane together, the top bits being zero."""
    pairs, fours = ir.VectorType(ir.IntType(16), 32), ir.VectorType(ir.IntType(32), 16)
    data = call(builder, "llvm.x86.avx512.pmaddubs.w.512", pairs, repeat(8, 1, 1 << 7), data)
    data = call(builder, "llvm.x86.avx512.pmaddw.d.512", fours, data, repeat(16, 1, 1 << 14))
    words = builder.bitcast(data, _WORDS8)
    high = builder.and_(builder.lshr(words, repeat(64, 4)), repeat(64, 0x00FF_FFFF_F000_0000))
    return builder.or_(builder.and_(words, repeat(64, 0x0FFF_FFFF)), high)


def _load_integers(builder: Any, address: Any, bits: int, lanes: Any) -> Any:
    """Lanes of a register from integers of so many bits, sign-extended; zero for other lanes."""
    given = ir.VectorType(ir.IntType(bits), LANES)
    source, zeros = builder.inttoptr(address, given.as_pointer()), ir.Constant(given, None)
    name = f"llvm.masked.load.v8i{bits}.p0"
    loaded = call(builder, name, given, source, _ALIGN, lanes, zeros)
    return loaded if bits == 64 else builder.sext(loaded, _WORDS8)


def _build_pack(bits: int) -> Callable[..., Any]:
    """Packs integers of so many bits, each as the int64 that it equals."""

    @emitted(types.int64, types.int64, types.int64, types.int64)
    def pack(builder: Any, address: Any, values: Any, count: Any) -> Any:
        lanes = _as_mask(builder, _emit_low_bits(builder, count), LANES)
        words = _load_integers(builder, values, bits, lanes)
        groups = _split_groups(builder, words)
        some = builder.or_(groups, repeat(64, 1))
        zeros = call(builder, "llvm.ctlz.v8i64", _WORDS8, some, BIT(1))
        covered = builder.lshr(repeat(64, 2**64 - 1), zeros)  # up to the highest bit set
        is_followed = _is_used(builder, builder.lshr(covered, repeat(64, 8)))
        flags = builder.select(is_followed, repeat(8, 0x80), _ZERO)
        used = builder.bitcast(_is_used(builder, covered), WORD)
        used = builder.and_(used, _emit_low_bits(builder, builder.mul(count, WORD(8))))
        data = _compress(builder, builder.or_(builder.bitcast(groups, _BYTES64), flags), used)
        size = builder.ctpop(used)
        target = builder.inttoptr(address, _BYTES64.as_pointer())
        stored = _as_mask(builder, _emit_low_bits(builder, size), 64)
        name = "llvm.masked.store.v64i8.p0"
        call(builder, name, ir.VoidType(), data, target, _ALIGN, stored)
        is_long = builder.icmp_unsigned(">", words, repeat(64, 2**56 - 1))
        is_long = builder.bitcast(is_long, ir.IntType(LANES))
        is_any = builder.icmp_unsigned("!=", is_long, ir.IntType(LANES)(0))
        return builder.select(is_any, WORD(0), size)

    return pack


_pack, _pack_int32 = _build_pack(64), _build_pack(32)


@emitted(types.int64, types.int64, types.uint64, types.int64, types.int64)
def _unpack(builder: Any, block: Any, ends: Any, count: Any, target: Any) -> Any:
    packed = _compress(builder, repeat(8, *range(64)), ends)

    def spread(first: int) -> Any:
        """End `first + k` in all bytes of lane k."""
        numbers = [first + k // 8 for k in range(64)]
        numbers = ir.Constant(ir.VectorType(INDEX, 64), numbers)
        return builder.shuffle_vector(packed, packed, numbers)

    # A value begins after the end of the one before it.
    places = builder.add(spread(0), repeat(8, *range(1, 9)))
    is_inside = builder.icmp_unsigned("<=", places, spread(1))
    data = builder.load(builder.inttoptr(block, _BYTES64.as_pointer()), align=1)
    data = call(builder, "llvm.x86.avx512.permvar.qi.512", _BYTES64, data, places)
    data = builder.select(is_inside, builder.and_(data, repeat(8, 0x7F)), _ZERO)
    words = _join_groups(builder, data)
    place = builder.inttoptr(target, _WORDS8.as_pointer())
    lanes = _as_mask(builder, _emit_low_bits(builder, count), LANES)
    call(builder, "llvm.masked.store.v8i64.p0", ir.VoidType(), words, place, _ALIGN, lanes)
    return count


@emitted(types.uint64, types.uint64)
def _deposit_ninth(builder: Any, bits: Any) -> Any:
    return call(builder, "llvm.x86.bmi.pdep.64", WORD, WORD(1 << LANES), bits)


@inlined
def _drop(bits):
    return bits & (np.uint64(0) - _deposit_ninth(bits))


@inlined
def _do_nothing(*_):
    return np.int64(0)


@inlined
def _drop_nothing(bits):
    return np.uint64(bits)


def select_lanes(
    triple: str, features: dict[str, bool]
) -> tuple[bool, Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Picks what a CPU can do: whether there are lanes, and four kernels, idle without them.

    `pack(address, values, count)` stores 1 to 8 int64 as varints, touching nothing past them, and
    returns their bytes; 0 if one takes more than eight. `pack_int32` does so with int32.
    `drop(ends)` clears the lowest eight bits that are set. `unpack(block, ends, count, target)`
    reads 1 to 8 varints of at most eight bytes, and returns `count`: bits of `ends` are set where
    they end in the 64 bytes at `block`, the lowest one where the value before them ends.
    """
    if triple.startswith("x86_64") and all(features.get(name) for name in _NEEDED):
        return True, _pack, _pack_int32, _drop, _unpack
    return False, _do_nothing, _do_nothing, _drop_nothing, _do_nothing


HAS_LANES, pack_lanes, pack_int32_lanes, drop_lanes, unpack_lanes = select_lanes(*HOST)


_GROUPS = 0x7F7F7F7F7F7F7F7F
# Their `pext` and `pdep` are microcode of up to some hundred steps.
_SLOW_CPUS = ("znver1", "znver2", "bdver4")


def _build_instruction(name: str) -> Any:
    """Wraps an LLVM intrinsic of a word and a mask, the mask being that of the groups."""

    @emitted(types.uint64, types.uint64)
    def apply(builder: Any, word: Any) -> Any:
        return call(builder, name, WORD, word, WORD(_GROUPS))

    return apply


@inlined
def _gather_by_shifts(word):
    word &= np.uint64(_GROUPS)
    word = (word & np.uint64(0x007F007F007F007F)) | (
        (word & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    )
    word = (word & np.uint64(0x00003FFF00003FFF)) | (
        (word & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    return (word & np.uint64(0x000000000FFFFFFF)) | (
        (word & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )


@inlined
def _spread_by_shifts(value):
    value &= np.uint64(0x00FFFFFFFFFFFFFF)
    value = (value & np.uint64(0x000000000FFFFFFF)) | (
        (value & np.uint64(0x00FFFFFFF0000000)) << np.uint64(4)
    )
    value = (value & np.uint64(0x00003FFF00003FFF)) | (
        (value & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2)
    )
    return (value & np.uint64(0x007F007F007F007F)) | (
        (value & np.uint64(0x3F803F803F803F80)) << np.uint64(1)
    )


def select_groups(
    triple: str, features: dict[str, bool], cpu: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Picks what a CPU, by its name, is fastest at: two kernels uint64 -> uint64.

    They join the low seven bits of each byte to 56 bits, and spread these over eight bytes.
    """
    if triple.startswith("x86_64") and features.get("bmi2") and cpu not in _SLOW_CPUS:
        return (
            _build_instruction("llvm.x86.bmi.pext.64"),
            _build_instruction("llvm.x86.bmi.pdep.64"),
        )
    return _gather_by_shifts, _spread_by_shifts


gather_groups, spread_groups = select_groups(*HOST, llvm.get_host_cpu_name())

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


_BLOCK_BYTES = 64
# What `read_packed` may load past a list: a block that begins at its last byte, and a word past it.
_REACH_BYTES = _BLOCK_BYTES + 8


@emitted(types.uint64, types.int64)
def _load_ends(builder: Any, address: Any) -> Any:
    """Bit i is set where byte i of the 64 at an address ends a varint, as uint64."""
    block = ir.VectorType(BYTE, _BLOCK_BYTES)
    loaded = builder.load(builder.inttoptr(address, block.as_pointer()), align=1)
    ends = builder.icmp_signed(">=", loaded, ir.Constant(block, None))
    return builder.bitcast(ends, ir.IntType(_BLOCK_BYTES))


def _build_sum(bits: int) -> Any:
    """A kernel that adds up what 8 * blocks integers at an address take; see `varint_bytes`."""
    given, words = ir.VectorType(ir.IntType(bits), 8), ir.VectorType(WORD, 8)

    @emitted(types.int64, types.int64, types.int64)
    def sum_bytes(builder: Any, address: Any, blocks: Any) -> Any:
        pointer = builder.inttoptr(address, given.as_pointer())
        sums = cgutils.alloca_once_value(builder, repeat(64, 0))
        with cgutils.for_range(builder, blocks) as loop:
            loaded = builder.load(builder.gep(pointer, [loop.index]), align=1)
            loaded = loaded if bits == 64 else builder.sext(loaded, words)
            some = builder.or_(loaded, repeat(64, 1))
            zeros = call(builder, "llvm.ctlz.v8i64", words, some, BIT(1))
            nines = builder.add(builder.shl(zeros, repeat(64, 3)), zeros)  # 9 * (64 - bits)
            sizes = builder.lshr(builder.sub(repeat(64, 64 + 9 * 64), nines), repeat(64, 6))
            builder.store(builder.add(builder.load(sums), sizes), sums)
        return call(builder, "llvm.vector.reduce.add.v8i64", WORD, builder.load(sums))

    return sum_bytes


_sum_bytes, _sum_int32_bytes = _build_sum(64), _build_sum(32)


@inlined
def load_int(is_wide, values, i):
    """Integer `i` of an int64 (wide) or int32 array, sign-extended, as uint64."""
    if is_wide:
        return np.uint64(load_i64(values + 8 * i))
    return np.uint64(np.int64(load_i32(values + 4 * i)))


@inlined
def packed_bytes(is_wide, values, first, last):
    """Bytes that the int64 (wide) or int32 [first, last) at an address take as varints."""
    blocks = (last - first) >> 3
    if is_wide:
        size = _sum_bytes(values + 8 * first, blocks)
    else:
        size = _sum_int32_bytes(values + 4 * first, blocks)
    for i in range(first + 8 * blocks, last):
        size += varint_bytes(load_int(is_wide, values, i))
    return size


@inlined
def _low_bits(count):
    """A mask of 1 to 64 bits."""
    return ~np.uint64(0) >> np.uint64(64 - count)


@inlined
def count_packed(p, end):
    """Varints in [p, end), or `FAILED` if the last one is cut; reads nothing outside."""
    if p < end and load_u8(end - 1) >= np.uint8(0x80):
        return np.int64(FAILED)
    count = np.int64(0)
    if end - p >= _BLOCK_BYTES:
        while end - p >= _BLOCK_BYTES:
            count += np.int64(count_ones(_load_ends(p)))
            p += _BLOCK_BYTES
        if p < end:  # the last block overlaps the one before
            rest = _load_ends(end - _BLOCK_BYTES) >> np.uint64(_BLOCK_BYTES - (end - p))
            count += np.int64(count_ones(rest))
        return count
    while p < end:
        count += np.int64(load_u8(p) < np.uint8(0x80))
        p += 1
    return count


@inlined
def _read_exactly(p, end, target):
    """As `read_packed`, reading nothing outside [p, end)."""
    while p < end:
        value, p = read_varint(p, end)
        if p < 0:
            return np.int64(FAILED)
        store_u64(target, value)
        target += 8
    return np.int64(target)


@inlined
def _has_long(ends):
    """Whether eight bytes in a row end no varint."""
    runs = ~ends
    runs &= runs >> np.uint64(1)
    runs &= runs >> np.uint64(2)
    return runs & (runs >> np.uint64(4)) != np.uint64(0)


@inlined
def read_lanes(p, end, target):
    """Reads varints, `LANES` at a time, up to a block that holds one of more than eight bytes.

    Loads from the byte before the list up to `_REACH_BYTES` past it. Returns the addresses past the
    last varint that was read, and past its value.
    """
    last = p - 1  # where the value before the next one ends
    block, fresh = last, ~np.uint64(1)
    while block + 8 < end or block + 1 == p:
        ends = _load_ends(block)
        beyond = np.uint64(0)
        if end - block < _BLOCK_BYTES:
            beyond = ~_low_bits(end - block)
        if _has_long(ends | beyond):
            break
        ends = (ends & fresh & ~beyond) | (np.uint64(1) << np.uint64(last - block))
        left = np.int64(count_ones(ends)) - 1
        last = block + 63 - np.int64(leading_zeros(ends))
        while left > 0:
            target += 8 * unpack_lanes(block, ends, min(left, LANES), target)
            left -= LANES
            ends = drop_lanes(ends)
        # Blocks overlap by what may belong to a value that ends in the next one.
        block += _BLOCK_BYTES - 8
        fresh = ~np.uint64(0xFF)
    return last + 1, target


@inlined
def read_words(p, end, target):
    """As `read_packed`, value by value; reads up to `_REACH_BYTES` past the list."""
    start = p
    while p < end:
        ends = _load_ends(p)
        if end - p < _BLOCK_BYTES:
            ends &= _low_bits(end - p)
        while ends != np.uint64(0):
            after = p + np.int64(trailing_zeros(ends)) + 1
            ends &= ends - np.uint64(1)
            size = after - start
            word = load_u64(start)
            if size <= 8:
                store_u64(target, gather_groups(word & _low_bits(8 * size)))
            elif size <= 10:
                rest = load_u64(start + 8) & _low_bits(8 * (size - 8))
                value = gather_groups(word) | (gather_groups(rest) << np.uint64(56))
                store_u64(target, value)
            else:
                return np.int64(FAILED)
            target += 8
            start = after
        p += _BLOCK_BYTES
    return np.int64(target) if start == end else np.int64(FAILED)


@outlined
def read_packed(p, end, limit, target):
    """Decodes the varints in [p, end) to int64 at an address.

    A byte of their buffer precedes them; it ends at `limit`. Returns the address past the values,
    or `FAILED` for a varint that is cut or over ten bytes long.
    """
    if limit - end < _REACH_BYTES:
        return _read_exactly(p, end, target)
    if HAS_LANES and p < end:
        p, target = read_lanes(p, end, target)
    return read_words(p, end, target)


@inlined
def write_words(is_wide, values, first, last, address):
    """As `write_packed`, value by value."""
    for i in range(first, last):
        address = store_varint(address, load_int(is_wide, values, i))
    return address


@outlined
def write_packed(is_wide, values, first, last, address):
    """Stores the int64 (wide) or int32 [first, last) at an address as varints.

    Returns the address past the varints, of which at most seven bytes are touched.
    """
    while HAS_LANES and first < last:
        count = min(LANES, last - first)
        if is_wide:
            size = pack_lanes(address, values + 8 * first, count)
        else:
            size = pack_int32_lanes(address, values + 4 * first, count)
        if size == 0:
            break
        address += size
        first += count
    return write_words(is_wide, values, first, last, address)
