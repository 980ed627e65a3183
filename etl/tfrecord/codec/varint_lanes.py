"""Packed varints eight at a time, each in a lane of a 64-byte register (AVX-512).

Byte compression (VBMI2) closes the gaps between values on the way out and finds where values end
on the way in; byte permutation (VBMI) brings each value into its lane.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from etl.tfrecord.codec.kernels import BIT, BYTE, HOST, INDEX, WORD, call, emitted, inlined

LANES = 8
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "bmi2")

_ALIGN = INDEX(1)
_BYTES, _WORDS = ir.VectorType(BYTE, 64), ir.VectorType(WORD, LANES)
_ZERO = ir.Constant(_BYTES, None)


def repeat(width: int, *values: int) -> Any:
    """A constant register that repeats values of some bits each."""
    count = 512 // width
    return ir.Constant(
        ir.VectorType(ir.IntType(width), count), list(values) * (count // len(values))
    )


def _low_bits(builder: Any, count: Any) -> Any:
    """A word of which the low 1 to 64 bits are set."""
    return builder.lshr(WORD(2**64 - 1), builder.sub(WORD(64), count))


def _as_mask(builder: Any, bits: Any, lanes: int) -> Any:
    if lanes < 64:
        bits = builder.trunc(bits, ir.IntType(lanes))
    return builder.bitcast(bits, ir.VectorType(BIT, lanes))


def _is_used(builder: Any, words: Any) -> Any:
    """Which bytes are not zero."""
    return builder.icmp_unsigned("!=", builder.bitcast(words, _BYTES), _ZERO)


def _compress(builder: Any, source: Any, bits: Any) -> Any:
    """The bytes whose bits are set, one after another."""
    chosen = _as_mask(builder, bits, 64)
    return call(builder, "llvm.x86.avx512.mask.compress.v64i8", _BYTES, source, _ZERO, chosen)


def _split_groups(builder: Any, words: Any) -> Any:
    """The low 56 bits of each lane, seven to a byte."""
    places = repeat(8, *range(0, 56, 7))
    data = builder.bitcast(words, _BYTES)
    data = call(builder, "llvm.x86.avx512.pmultishift.qb.512", _BYTES, places, data)
    return builder.bitcast(builder.and_(data, repeat(8, 0x7F)), _WORDS)


def _join_groups(builder: Any, data: Any) -> Any:
    """The low seven bits of each byte of a lane together, the top bits being zero."""
    pairs, fours = ir.VectorType(ir.IntType(16), 32), ir.VectorType(ir.IntType(32), 16)
    data = call(builder, "llvm.x86.avx512.pmaddubs.w.512", pairs, repeat(8, 1, 1 << 7), data)
    data = call(builder, "llvm.x86.avx512.pmaddw.d.512", fours, data, repeat(16, 1, 1 << 14))
    words = builder.bitcast(data, _WORDS)
    high = builder.and_(builder.lshr(words, repeat(64, 4)), repeat(64, 0x00FF_FFFF_F000_0000))
    return builder.or_(builder.and_(words, repeat(64, 0x0FFF_FFFF)), high)


def _load_integers(builder: Any, address: Any, bits: int, lanes: Any) -> Any:
    """Lanes of a register from integers of so many bits, sign-extended; zero for other lanes."""
    given = ir.VectorType(ir.IntType(bits), LANES)
    source, zeros = builder.inttoptr(address, given.as_pointer()), ir.Constant(given, None)
    name = f"llvm.masked.load.v8i{bits}.p0"
    loaded = call(builder, name, given, source, _ALIGN, lanes, zeros)
    return loaded if bits == 64 else builder.sext(loaded, _WORDS)


def _build_pack(bits: int) -> Callable[..., Any]:
    """Packs integers of so many bits, each as the int64 that it equals."""

    @emitted(types.int64, types.int64, types.int64, types.int64)
    def pack(builder: Any, address: Any, values: Any, count: Any) -> Any:
        lanes = _as_mask(builder, _low_bits(builder, count), LANES)
        words = _load_integers(builder, values, bits, lanes)
        groups = _split_groups(builder, words)
        some = builder.or_(groups, repeat(64, 1))
        zeros = call(builder, "llvm.ctlz.v8i64", _WORDS, some, BIT(1))
        covered = builder.lshr(repeat(64, 2**64 - 1), zeros)  # up to the highest bit set
        is_followed = _is_used(builder, builder.lshr(covered, repeat(64, 8)))
        flags = builder.select(is_followed, repeat(8, 0x80), _ZERO)
        used = builder.bitcast(_is_used(builder, covered), WORD)
        used = builder.and_(used, _low_bits(builder, builder.mul(count, WORD(8))))
        data = _compress(builder, builder.or_(builder.bitcast(groups, _BYTES), flags), used)
        size = builder.ctpop(used)
        target = builder.inttoptr(address, _BYTES.as_pointer())
        stored = _as_mask(builder, _low_bits(builder, size), 64)
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
    data = builder.load(builder.inttoptr(block, _BYTES.as_pointer()), align=1)
    data = call(builder, "llvm.x86.avx512.permvar.qi.512", _BYTES, data, places)
    data = builder.select(is_inside, builder.and_(data, repeat(8, 0x7F)), _ZERO)
    words = _join_groups(builder, data)
    place = builder.inttoptr(target, _WORDS.as_pointer())
    lanes = _as_mask(builder, _low_bits(builder, count), LANES)
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
    """Picks what a CPU can do.

    Returns:
        Whether there are lanes, and four kernels, which do nothing where there are none:
        `pack(address, values, count)` stores 1 to 8 int64 as varints, touching nothing past
        them, and returns their bytes; 0 if one takes more than eight.
        `pack_int32` is the same for int32.
        `drop(ends)` clears the lowest eight bits that are set.
        `unpack(block, ends, count, target)` reads 1 to 8 varints of at most eight bytes: bits of
        `ends` are set where they end in the 64 bytes at `block`, the lowest one where the value
        before them ends. Returns `count`.
    """
    if triple.startswith("x86_64") and all(features.get(name) for name in _NEEDED):
        return True, _pack, _pack_int32, _drop, _unpack
    return False, _do_nothing, _do_nothing, _drop_nothing, _do_nothing


HAS_LANES, pack_lanes, pack_int32_lanes, drop_lanes, unpack_lanes = select_lanes(*HOST)
