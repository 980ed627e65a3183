"""Building blocks of the compiled codec: the `kernel` decorator and raw memory access.

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
from collections.abc import Callable, Iterator
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
_DECORATORS = (b"@kernel", b"@inlined", b"@outlined", b"@emitted")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _find_archive(folder: Path) -> Path | None:
    """The zip file that a folder of sources lies in, if it does."""
    return next((parent for parent in (folder, *folder.parents) if parent.is_file()), None)


def _name_sources(folder: Path) -> str:
    """A folder's path; of one in a zip file the part from that file's name on.

    Spark gives each application a folder of its own for the code that it ships.
    """
    archive = _find_archive(folder)
    return str(folder if archive is None else folder.relative_to(archive.parent))


@functools.cache
def digest_kernels(folder: Path) -> str:
    """Hex SHA-256 of the sources that may end up in the code of a kernel in `folder`.

    In a package, all of the top-level package is covered; in a zip file, all of that file.
    """
    archive = _find_archive(folder)
    if archive is not None:
        return hashlib.sha256(archive.read_bytes()).hexdigest()
    root, sources = folder, folder.glob("*.py")
    while (root.parent / "__init__.py").exists() and (root / "__init__.py").exists():
        root = root.parent
    if (root / "__init__.py").exists():
        sources = root.rglob("*.py")
    digest = hashlib.sha256()
    for source in sorted(sources):
        text = source.read_bytes()
        if any(decorator in text for decorator in _DECORATORS):
            digest.update(text)
    return digest.hexdigest()


def _candidates(folder: Path) -> Iterator[tuple[Path, int]]:
    """Folders for the kernels of a folder of sources, best first, and whose writers to trust."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given).absolute(), 0
    if folder.is_dir():  # who may change the sources may change the cache next to them
        yield folder / "__pycache__", folder.stat().st_mode
    caches = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # a user without a home
        root = Path(caches) if caches.startswith("/") else Path.home() / ".cache"
        yield root / "sluice" / "kernels", 0
    yield Path(tempfile.gettempdir()) / f"sluice-kernels-{os.getuid()}", 0


def _is_private(path: Path, trusted_mode: int) -> bool:
    """Whether nobody but this user, root, and those in `trusted_mode` could have written it."""
    info = path.lstat()
    writers = info.st_mode & _WRITABLE_BY_OTHERS & ~(trusted_mode & stat.S_IWGRP)
    return info.st_uid in (os.getuid(), 0) and not writers


def _is_usable(folder: Path, trusted_mode: int = 0) -> bool:
    """Whether a cache's folder is private, and is filled or can be; makes it if it is not there."""
    try:
        with contextlib.suppress(OSError):  # sources that this user cannot write to
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o755, exist_ok=True)
        everything = (folder.parent, folder, *folder.iterdir())
        if not all(_is_private(path, trusted_mode) for path in everything):
            return False
        return os.access(folder, os.W_OK) or any(folder.glob("*.nbi"))
    except OSError:
        return False


@functools.cache
def find_cache(folder: Path) -> Path | None:
    """Finds where the compiled kernels of a folder of sources are kept.

    Next to the sources, in the user's cache directory, or in a private directory under the
    system's temporary one: the first that can be written to, and by nobody else, or was filled
    by the user that installed the sources. It is named by the sources' folder, the machine, and a
    digest of the sources' content.
    """
    cpu = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    machine = repr((cpu, sys.version, numba.__version__, llvmlite.__version__))
    sources = digest_kernels(Path(__file__).parent) + digest_kernels(folder)
    parts = _name_sources(folder), machine, sources
    name = "-".join(hashlib.sha256(part.encode()).hexdigest()[:16] for part in parts)
    for place, trusted_mode in _candidates(folder):
        if _is_usable(place / name, trusted_mode):
            return place / name
    return None


class _KernelLocator(caching._CacheLocator):
    """What numba asks of the folder of a cache."""

    def __init__(self, folder: Path, line: int) -> None:
        self._folder, self._line = folder, line

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        folder = find_cache(Path(py_file).absolute().parent)
        return None if folder is None else cls(folder, py_func.__code__.co_firstlineno)

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
        return str(self._line)


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
            with self._lock():
                super().save_overload(sig, data)
        except Exception:  # disk full, or the directory has gone: go on without
            self.disable()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self._impl.locator.ensure_cache_path()
        descriptor = os.open(self._cache_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point with numba: no GIL, cached on disk; see `find_cache`."""
    compiled = _compile(function)
    if os.environ.get(NO_CACHE, "").strip().lower() not in ("1", "true", "yes", "on"):
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
