"""Building blocks of the compiled codec: the `kernel` decorator and raw memory access.

Modules with compiled code import it as `etl.tfrecord.kernels`; the cache of compiled code goes by
that (see `digest_kernels`).

Addresses and sizes are signed 64-bit integers throughout the kernels; values whose bits matter are
unsigned. Mixing the two in one expression would make numba fall back to float64.
"""

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import caching
from numba.extending import intrinsic as _intrinsic

if sys.byteorder != "little":  # pragma: no cover - no such host in reach
    raise ImportError(
        f"etl.tfrecord needs a little-endian host (x86-64, AArch64); this one is {sys.byteorder}"
    )

intrinsic: Any = _intrinsic  # what it returns is called with other arguments than declared

WORD_BYTES = 8


@functools.cache
def digest_kernels(folder: Path) -> str:
    """Digest of the sources in a folder that hold compiled code.

    Args:
        folder: Package folder; its modules that import this one are covered.

    Returns:
        Hex SHA-256.
    """
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        text = source.read_bytes()
        if b"etl.tfrecord.kernels" in text:
            digest.update(text)
    return digest.hexdigest()


class _TolerantCache(caching.FunctionCache):
    """Function cache that is an optimisation only: any trouble with it means recompiling.

    Stock numba stamps the cache with the kernel's own source file, and so misses changes in the
    functions it inlines from other files; here the stamp covers all compiled code of the kernel's
    own package and of this one.
    """

    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)
        folders = (Path(__file__).parent, Path(py_func.__code__.co_filename).parent)
        self._cache_file = caching.IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=(self._impl.locator.get_source_stamp(), *map(digest_kernels, folders)),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # truncated, foreign or unreadable: whatever it is, compile afresh
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:  # disk full or directory gone read-only since the check
            self.disable()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point with numba: no GIL, cached on disk where a directory is writable."""
    compiled: Any = njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    # No writable cache directory, or another numba: compile in every process.
    with contextlib.suppress(RuntimeError, OSError, AttributeError, TypeError):
        compiled._cache = _TolerantCache(function)
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


@inlined
def copy_bytes(target: int, source: int, length: int) -> None:
    """Copies `length` bytes, reading and writing nothing outside the two ranges."""
    if length >= WORD_BYTES:
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
