"""Building blocks of the compiled codec: the `kernel` decorator and raw memory access.

Modules with compiled code import it as `etl.tfrecord.kernels`; the cache of compiled code goes by
that (see `jit_cache.digest_kernels`).

Addresses and sizes are signed 64-bit integers throughout the kernels; values whose bits matter are
unsigned. Mixing the two in one expression would make numba fall back to float64.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from etl.tfrecord import jit_cache

if sys.byteorder != "little":  # pragma: no cover - no such host in reach
    raise ImportError(
        f"etl.tfrecord needs a little-endian host (x86-64, AArch64); this one is {sys.byteorder}"
    )

intrinsic: Any = _intrinsic  # what it returns is called with other arguments than declared

WORD_BYTES = 8
_LONG_BYTES = 64  # from here on a call of memcpy pays


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point with numba: no GIL, cached on disk as `jit_cache` says."""
    compiled: Any = njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    if jit_cache.is_enabled():
        # No directory for it, or another numba: compile in every process.
        with contextlib.suppress(RuntimeError, OSError, AttributeError, TypeError):
            compiled._cache = jit_cache.KernelCache(function)
    return compiled


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a small helper that LLVM always inlines into the kernels that call it."""
    return njit(nogil=True, error_model="numpy", boundscheck=False, forceinline=True)(function)


def _build_load(element: ir.Type, result: types.Type) -> Callable[..., Any]:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], element.as_pointer()), align=1)

        return result(types.int64), codegen

    return load


def _build_store(element: ir.Type, value_type: types.Type) -> Callable[..., Any]:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], element.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), codegen

    return store


load_u8 = _build_load(ir.IntType(8), types.uint8)
load_u32 = _build_load(ir.IntType(32), types.uint32)
load_u64 = _build_load(ir.IntType(64), types.uint64)
load_i32 = _build_load(ir.IntType(32), types.int32)
load_i64 = _build_load(ir.IntType(64), types.int64)
load_f32 = _build_load(ir.FloatType(), types.float32)
load_f64 = _build_load(ir.DoubleType(), types.float64)
store_u8 = _build_store(ir.IntType(8), types.uint8)
store_u32 = _build_store(ir.IntType(32), types.uint32)
store_u64 = _build_store(ir.IntType(64), types.uint64)


@intrinsic
def float_bits(typingctx: Any, value: Any) -> Any:
    """The 32 bits of a float32 as uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Trailing zero bits of a non-zero uint64, as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), codegen


@intrinsic
def leading_zeros(typingctx: Any, value: Any) -> Any:
    """Leading zero bits of a non-zero uint64, as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), codegen


@intrinsic
def _copy_long(typingctx: Any, target: Any, source: Any, length: Any) -> Any:
    """The C library's memcpy: the widest moves that the CPU has."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@inlined
def copy_bytes(target: int, source: int, length: int) -> None:
    """Copies `length` bytes, reading and writing nothing outside the two ranges."""
    if length >= _LONG_BYTES:
        _copy_long(target, source, length)
    elif length >= WORD_BYTES:
        last = length - WORD_BYTES
        i = 0
        while i < last:
            store_u64(target + i, load_u64(source + i))
            i += WORD_BYTES
        store_u64(target + last, load_u64(source + last))  # overlaps the word before
    else:
        for i in range(length):
            store_u8(target + i, load_u8(source + i))


@inlined
def same_bytes(left: int, right: int, length: int) -> bool:
    """Whether two ranges hold the same bytes; reads nothing outside them."""
    if length < WORD_BYTES:
        i = 0
        while i < length and load_u8(left + i) == load_u8(right + i):
            i += 1
        return i == length
    last = length - WORD_BYTES
    for i in range(0, last, WORD_BYTES):
        if load_u64(left + i) != load_u64(right + i):
            return False
    return load_u64(left + last) == load_u64(right + last)


@inlined
def is_valid(bitmap: int, position: int) -> bool:
    """Bit `position` of an Arrow validity bitmap; an absent bitmap (0) means all valid."""
    if bitmap == 0:
        return True
    byte = np.int64(load_u8(bitmap + (position >> 3)))
    return ((byte >> (position & 7)) & 1) != 0
