"""Packed varints, many at a time.

Where they end is read off a bit mask of 64 bytes: no value waits for the one before it to be
decoded.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from etl.tfrecord.bit_groups import gather_groups
from etl.tfrecord.kernels import (
    count_ones,
    inlined,
    intrinsic,
    load_i64,
    load_u8,
    load_u64,
    store_u64,
    trailing_zeros,
)
from etl.tfrecord.varint import CONTINUATION, FAILED, read_varint, varint_bytes

_BLOCK_BYTES = 64
# What `read_packed` may load past a list: a block that begins at its last byte, and a word past it.
_REACH_BYTES = _BLOCK_BYTES + 8


@intrinsic
def _load_ends(typingctx: Any, address: Any) -> Any:
    """Bit i is set where byte i of the 64 at an address ends a varint, as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = ir.VectorType(ir.IntType(8), _BLOCK_BYTES)
        loaded = builder.load(builder.inttoptr(args[0], block.as_pointer()), align=1)
        ends = builder.icmp_signed(">=", loaded, ir.Constant(block, None))
        return builder.bitcast(ends, ir.IntType(_BLOCK_BYTES))

    return types.uint64(types.int64), codegen


@intrinsic
def _sum_bytes(typingctx: Any, address: Any) -> Any:
    """Bytes that the eight int64 at an address take as varints; see `varint_bytes`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, flag = ir.VectorType(ir.IntType(64), 8), ir.IntType(1)

        def splat(value: int) -> Any:
            return ir.Constant(words, [value] * 8)

        def call(name: str, result: Any, *arguments: Any) -> Any:
            signature = ir.FunctionType(result, [argument.type for argument in arguments])
            return builder.call(builder.module.declare_intrinsic(name, (), signature), arguments)

        loaded = builder.load(builder.inttoptr(args[0], words.as_pointer()), align=1)
        zeros = call("llvm.ctlz.v8i64", words, builder.or_(loaded, splat(1)), flag(1))
        nines = builder.add(builder.shl(zeros, splat(3)), zeros)  # 9 * (64 - bits)
        sizes = builder.lshr(builder.sub(splat(64 + 9 * 64), nines), splat(6))
        return call("llvm.vector.reduce.add.v8i64", words.element, sizes)

    return types.int64(types.int64), codegen


@inlined
def packed_bytes(values, first, last):
    """Bytes that the int64 [first, last) at an address take as varints."""
    size = np.int64(0)
    i = first
    while i + 8 <= last:
        size += _sum_bytes(values + 8 * i)
        i += 8
    while i < last:
        size += varint_bytes(load_i64(values + 8 * i))
        i += 1
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
    while end - p >= 8:
        count += np.int64(count_ones(~load_u64(p) & np.uint64(CONTINUATION)))
        p += 8
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
def read_packed(p, end, limit, target):
    """Decodes the varints in [p, end).

    Args:
        p: Address of the first.
        end: Address past the last.
        limit: Address past the buffer.
        target: Address of the output, int64.

    Returns:
        The address past the values, or `FAILED` for a varint that is cut or over ten bytes long.
    """
    if limit - end < _REACH_BYTES:
        return _read_exactly(p, end, target)
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
