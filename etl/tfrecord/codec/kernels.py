"""Building blocks of the compiled codec: the `kernel` decorator, raw access to memory, its reuse.

Compiled code is kept by numba's own cache, in a folder named by a digest of the sources: numba
itself misses changes of functions that are inlined from other files. It is code that will run, so
the folder is one that no other user could have written; trouble with it means compiling.

Addresses and sizes are signed 64-bit integers throughout the kernels; values whose bits matter
are unsigned. Mixing the two in one expression would make numba fall back to float64.
"""

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import caching, cgutils
from numba.extending import intrinsic as _intrinsic

if sys.byteorder != "little":  # pragma: no cover - no such host in reach
    raise ImportError(
        f"etl.tfrecord needs a little-endian host (x86-64, AArch64); this one is {sys.byteorder}"
    )

intrinsic: Any = _intrinsic  # what it returns is called with other arguments than declared

# LLVM's target triple, and features of the CPU by LLVM's names.
HOST = llvmlite.binding.get_process_triple(), dict(llvmlite.binding.get_host_cpu_features())
WORD_BYTES = 8
LINE_BYTES = 64  # of a cache line
_LONG_BYTES = 64  # from here on a call of memcpy pays


def _compile(function: Callable[..., Any], **options: bool) -> Any:
    compiled: Any = njit  # takes more options than it declares
    return compiled(nogil=True, error_model="numpy", boundscheck=False, **options)(function)


NO_CACHE = "SLUICE_NO_JIT_CACHE"  # set to 1: compile in memory, touch no cache
_PACKAGES = ("etl.", "training.")  # whose sources the name of the cache covers
_DECORATORS = (b"@kernel", b"@inlined", b"@outlined", b"@emitted")
_ROOT = Path(__file__).absolute().parents[3]
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _name_cache() -> str:
    """Tells the place of the sources, the machine, and all that may end up in a kernel."""
    archive = next((path for path in (_ROOT, *_ROOT.parents) if path.is_file()), None)
    files = [path for package in _PACKAGES for path in (_ROOT / package[:-1]).rglob("*.py")]
    sources = hashlib.sha256()
    for text in (path.read_bytes() for path in sorted([archive] if archive else files)):
        if archive or any(decorator in text for decorator in _DECORATORS):
            sources.update(text)
    cpu = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    machine = repr((cpu, sys.version, numba.__version__, llvmlite.__version__))
    # Spark gives each application a folder of its own for the archives that it ships.
    place = archive.name if archive else str(_ROOT)
    names = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (place, machine)]
    return "-".join([*names, sources.hexdigest()[:16]])


def _candidates() -> Iterator[tuple[Path, int]]:
    """Folders for kernels, best first, and of what mode are those whose writers are trusted."""
    given, caches = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if given:
        yield Path(given).absolute(), 0
    sources = Path(__file__).absolute().parent
    if sources.is_dir():  # who may change the sources may change the cache next to them
        yield sources / "__pycache__", sources.stat().st_mode & stat.S_IWGRP
    with contextlib.suppress(RuntimeError):  # a user without a home
        root = Path(caches) if caches.startswith("/") else Path.home() / ".cache"
        yield root / "sluice" / "kernels", 0
    yield Path(tempfile.gettempdir()) / f"sluice-kernels-{os.getuid()}", 0


def _is_usable(folder: Path, trusted: int = 0) -> bool:
    """Whether it is filled or can be, and nobody else than this user, root and the trusted did."""
    try:
        with contextlib.suppress(OSError):  # sources that this user cannot write to
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o755, exist_ok=True)
        found = [path.lstat() for path in (folder.parent, folder, *folder.iterdir())]
        strangers = _WRITABLE_BY_OTHERS & ~trusted
        if any(f.st_uid not in (os.getuid(), 0) or f.st_mode & strangers for f in found):
            return False
        return os.access(folder, os.W_OK) or any(folder.glob("*.nbi"))
    except OSError:
        return False


@functools.cache
def find_cache() -> Path | None:
    """Finds where compiled kernels are kept.

    Where `NUMBA_CACHE_DIR` says, next to the sources, in the user's cache directory, or in a
    private directory under the system's temporary one: the first that is usable.
    """
    name = _name_cache()
    places = (place / name for place, trusted in _candidates() if _is_usable(place / name, trusted))
    return next(places, None)


class _KernelLocator(caching._CacheLocator):
    """What numba asks of the folder of a cache."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        folder, line = find_cache(), py_func.__code__.co_firstlineno
        return None if folder is None else cls(folder, f"{py_func.__module__}-{line}")

    def get_cache_path(self) -> str:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        """Makes the folder, and removes those of older sources."""
        self._folder.mkdir(mode=0o755, exist_ok=True)
        for folder in self._folder.parent.glob(self._folder.name[:-16] + "*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def get_source_stamp(self) -> str:
        return ""  # the folder is named by it

    def get_disambiguator(self) -> str:
        return self._name


class _KernelCacheFiles(caching.CompileResultCacheImpl):
    _locator_classes = [_KernelLocator]  # noqa: RUF012 - numba's


class KernelCache(caching.FunctionCache):
    """Numba's cache of a function as an optimisation only: any trouble with it means compiling."""

    _impl_class = _KernelCacheFiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns a compiled function, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # damaged: compile afresh, and let that replace it
            with contextlib.suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps a compiled function where that is possible."""
        try:  # one process at a time: two that add signatures to an index would name them alike
            self._impl.locator.ensure_cache_path()
            folder = os.open(self._cache_path, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                super().save_overload(sig, data)
            finally:
                os.close(folder)
        except Exception:  # disk full, or the directory has gone: go on without
            self.disable()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point with numba: no GIL, cached on disk; see `find_cache`."""
    compiled = _compile(function)
    is_off = os.environ.get(NO_CACHE, "").strip().lower() in ("1", "true", "yes", "on")
    if function.__module__.startswith(_PACKAGES) and not is_off:
        # No directory for it, or another numba: compile in every process.
        with contextlib.suppress(RuntimeError, OSError, AttributeError, TypeError):
            compiled._cache = KernelCache(function)
    return compiled


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a small helper that LLVM always inlines into the kernels that call it."""
    return _compile(function, forceinline=True)


def outlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a larger helper once, to be called: what is inlined is compiled in each caller."""
    return _compile(function)


BIT, BYTE, INDEX, WORD = (ir.IntType(bits) for bits in (1, 8, 32, 64))


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emits a call of an intrinsic of LLVM."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(name, (), signature), arguments)


def emitted(result: types.Type, *arguments: types.Type) -> Callable[..., Any]:
    """Makes a function of kernels from one that emits its code: `emit(builder, *values)`."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *_: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = emit(builder, *args)
                return context.get_dummy_value() if value is None else value

            return result(*arguments), codegen

        names = ["typingctx", *list(inspect.signature(emit).parameters)[1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        define.__name__ = emit.__name__
        return intrinsic(define)

    return wrap


def _build_load(element: ir.Type, result: types.Type) -> Any:
    @emitted(result, types.int64)
    def load(builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, element.as_pointer()), align=1)

    return load


def _build_store(element: ir.Type, value_type: types.Type) -> Any:
    @emitted(types.void, types.int64, value_type)
    def store(builder: Any, address: Any, value: Any) -> None:
        builder.store(value, builder.inttoptr(address, element.as_pointer()), align=1)

    return store


load_u8 = _build_load(BYTE, types.uint8)
load_u32 = _build_load(INDEX, types.uint32)
load_u64 = _build_load(WORD, types.uint64)
load_i32 = _build_load(INDEX, types.int32)
load_i64 = _build_load(WORD, types.int64)
load_f32 = _build_load(ir.FloatType(), types.float32)
load_f64 = _build_load(ir.DoubleType(), types.float64)
store_u8 = _build_store(BYTE, types.uint8)
store_i32 = _build_store(INDEX, types.int32)
store_u32 = _build_store(INDEX, types.uint32)
store_u64 = _build_store(WORD, types.uint64)


@emitted(types.uint32, types.float32)
def float_bits(builder: Any, value: Any) -> Any:
    """The 32 bits of a float32 as uint32."""
    return builder.bitcast(value, INDEX)


@emitted(types.uint64, types.uint64)
def trailing_zeros(builder: Any, value: Any) -> Any:
    """Trailing zero bits of a non-zero uint64, as uint64."""
    return builder.cttz(value, BIT(1))


@emitted(types.uint64, types.uint64)
def leading_zeros(builder: Any, value: Any) -> Any:
    """Leading zero bits of a non-zero uint64, as uint64."""
    return builder.ctlz(value, BIT(1))


@emitted(types.uint64, types.uint64)
def count_ones(builder: Any, value: Any) -> Any:
    """Set bits of a uint64, as uint64."""
    return builder.ctpop(value)


@emitted(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Asks for the cache line of an address, which may be any number."""
    place = builder.inttoptr(address, BYTE.as_pointer())
    to_read = INDEX(0), INDEX(3), INDEX(1)  # from as near as possible, data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *to_read)


@emitted(types.void, types.int64, types.int64, types.int64)
def _copy_long(builder: Any, target: Any, source: Any, length: Any) -> None:
    """The C library's memcpy: the widest moves that the CPU has."""
    byte = BYTE.as_pointer()
    target, source = builder.inttoptr(target, byte), builder.inttoptr(source, byte)
    cgutils.raw_memcpy(builder, target, source, length, 1)


def _build_move(size: int) -> Any:
    @emitted(types.void, types.int64, types.int64)
    def move(builder: Any, target: Any, source: Any) -> None:
        block = ir.VectorType(BYTE, size).as_pointer()
        loaded = builder.load(builder.inttoptr(source, block), align=1)
        builder.store(loaded, builder.inttoptr(target, block), align=1)

    return move


_move_4, _move_8, _move_16, _move_32 = (_build_move(size) for size in (4, 8, 16, 32))


@inlined
def copy_bytes(target: int, source: int, length: int) -> None:
    """Copies bytes, touching nothing outside: short ranges by two moves that may overlap."""
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


@emitted(types.void, types.int64, types.int64)
def _stream_line(builder: Any, target: Any, source: Any) -> None:
    """Copies a line to an address that is a multiple of `LINE_BYTES`, past the cache."""
    line = ir.VectorType(WORD, LINE_BYTES // WORD_BYTES).as_pointer()
    loaded = builder.load(builder.inttoptr(source, line), align=1)
    stored = builder.store(loaded, builder.inttoptr(target, line), align=LINE_BYTES)
    stored.set_metadata("nontemporal", builder.module.add_metadata([INDEX(1)]))


@emitted(types.void)
def fence(builder: Any) -> None:
    """Lets all threads see what has been stored, past the cache too."""
    builder.fence("seq_cst")


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


ALIGNMENT = 64  # TensorFlow takes over memory that is aligned so, and copies any other

# Fresh memory of the size of a block comes from the system page by page, at a cost of the order of
# decoding: so blocks are used again when nobody holds them any more.
_MOST_KEPT, _MOST_LARGE = 12, 2
_LARGE_BYTES = 64 << 20
_LEAST_SHARE = 0.5
_FREE: list[np.ndarray] = []
# A finalizer may run inside `_take`, in the same thread.
_LOCK = threading.RLock()


def allocate(shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, np.ndarray]:
    """Returns arrays of these shapes and types, of any content, aligned, in one piece of memory.

    It is kept for the next call when the last of the arrays, and of all views of them, has gone.
    """
    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    padded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    owner = _take(sum(padded.values()) + ALIGNMENT)
    # Views of an array refer to what that array itself refers to: behind a memoryview, to it.
    memory = np.frombuffer(memoryview(owner), np.uint8)  # type: ignore[arg-type]
    weakref.finalize(memory, _give_back, owner).atexit = False
    start, arrays = -memory.ctypes.data % ALIGNMENT, {}
    for name, (shape, dtype) in shapes.items():
        arrays[name] = memory[start : start + sizes[name]].view(dtype).reshape(shape)
        start += padded[name]
    return arrays


def _take(size: int) -> np.ndarray:
    with _LOCK:
        for number, owner in enumerate(_FREE):
            if size <= owner.size and size >= _LEAST_SHARE * owner.size:
                return _FREE.pop(number)
    return np.empty(size, np.uint8)


def _give_back(owner: np.ndarray) -> None:
    with _LOCK:
        if owner.size >= _LARGE_BYTES:
            large = [number for number, kept in enumerate(_FREE) if kept.size >= _LARGE_BYTES]
            if len(large) >= _MOST_LARGE:
                del _FREE[large[0]]
        _FREE.append(owner)
        del _FREE[:-_MOST_KEPT]
