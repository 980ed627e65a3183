"""Building blocks of the compiled codec: the `kernel` decorator and raw memory access.

Modules with compiled code import it as `etl.tfrecord.codec.kernels`; the cache of compiled
code finds the sources it depends on by that name (see `jit_cache.digest_kernels`).

Addresses and sizes are signed 64-bit integers throughout the kernels; values whose bits matter
are unsigned. Mixing the two in one expression would make numba fall back to float64.
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

from etl.tfrecord.codec import jit_cache

if sys.byteorder != "little":  # pragma: no cover - no such host in reach
    raise ImportError(
        f"etl.tfrecord needs a little-endian host (x86-64, AArch64); this one is {sys.byteorder}"
    )

intrinsic: Any = _intrinsic  # what it returns is called with other arguments than declared

WORD_BYTES = 8
LINE_BYTES = 64  # of a cache line
_LONG_BYTES = 64  # from here on a call of memcpy pays


def _compile(function: Callable[..., Any], **options: bool) -> Any:
    compiled: Any = njit  # takes more options than it declares
    return compiled(nogil=True, error_model="numpy", boundscheck=False, **options)(function)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point with numba: no GIL, cached on disk as `jit_cache` says."""
    compiled = _compile(function)
    if jit_cache.is_enabled():
        # No directory for it, or another numba: compile in every process.
        with contextlib.suppress(RuntimeError, OSError, AttributeError, TypeError):
            compiled._cache = jit_cache.KernelCache(function)
    return compiled


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a small helper that LLVM always inlines into the kernels that call it."""
    return _compile(function, forceinline=True)


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a larger helper once, to be called: what is inlined is compiled in each caller."""
    return _compile(function)


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
store_i32 = _build_store(ir.IntType(32), types.int32)
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
def count_ones(typingctx: Any, value: Any) -> Any:
    """Set bits of a uint64, as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def leading_zeros(typingctx: Any, value: Any) -> Any:
    """Leading zero bits of a non-zero uint64, as uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Asks for the cache line of an address, which may be any number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        )
        # To read, from as near as possible, data.
        builder.call(function, [builder.inttoptr(args[0], byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _copy_long(typingctx: Any, target: Any, source: Any, length: Any) -> Any:
    """The C library's memcpy: the widest moves that the CPU has."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _build_move(size: int) -> Callable[..., Any]:
    @intrinsic
    def move(typingctx: Any, target: Any, source: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            block = ir.VectorType(ir.IntType(8), size).as_pointer()
            target, source = (builder.inttoptr(arg, block) for arg in args)
            builder.store(builder.load(source, align=1), target, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return move


_move_4, _move_8, _move_16, _move_32 = (_build_move(size) for size in (4, 8, 16, 32))


@inlined
def copy_bytes(target: int, source: int, length: int) -> None:
    """Copies `length` bytes, reading and writing nothing outside the two ranges.

    Short ranges take two moves of the widest size that fits, which overlap where they must.
    """
    if length >= _LONG_BYTES:
        _copy_long(target, source, length)
    elif length >= 32:
        _move_32(target, source)
        _move_32(target + length - 32, source + length - 32)
    elif length >= 16:
        _move_16(target, source)
        _move_16(target + length - 16, source + length - 16)
    elif length >= 8:
        _move_8(target, source)
        _move_8(target + length - 8, source + length - 8)
    elif length >= 4:
        _move_4(target, source)
        _move_4(target + length - 4, source + length - 4)
    else:
        for i in range(length):
            store_u8(target + i, load_u8(source + i))


@intrinsic
def _stream_line(typingctx: Any, target: Any, source: Any) -> Any:
    """Copies a line to an address that is a multiple of `LINE_BYTES`, past the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE_BYTES // WORD_BYTES).as_pointer()
        target, source = (builder.inttoptr(arg, line) for arg in args)
        stored = builder.store(builder.load(source, align=1), target, align=LINE_BYTES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Lets all threads see what has been stored, past the cache too."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@inlined
def stream_bytes(target: int, source: int, length: int) -> None:
    """As `copy_bytes`, whole lines past the cache; `fence` must follow before others read them."""
    lead = min(-target & (LINE_BYTES - 1), length)
    copy_bytes(target, source, lead)
    whole = lead + ((length - lead) & -LINE_BYTES)
    for at in range(lead, whole, LINE_BYTES):
        _stream_line(target + at, source + at)
    copy_bytes(target + whole, source + whole, length - whole)


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
