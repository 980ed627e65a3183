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

WORD_BYTES = 8
LINE_BYTES = 64  # of a cache line
_LONG_BYTES = 64  # from here on a call of memcpy pays


def _compile(function: Callable[..., Any], **options: bool) -> Any:
    compiled: Any = njit  # takes more options than it declares
    return compiled(nogil=True, error_model="numpy", boundscheck=False, **options)(function)


NO_CACHE = "SLUICE_NO_JIT_CACHE"  # set to 1: compile in memory, touch no cache
_DECORATORS = (b"@kernel", b"@inlined", b"@outlined", b"@intrinsic")
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
    """Digest of the sources that may end up in the code of a kernel in `folder`.

    Args:
        folder: Folder of the kernel's module. In a package, all of the top-level package is
            covered; in a zip file, all of that file.

    Returns:
        Hex SHA-256.
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
def _describe_machine() -> bytes:
    cpu = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    return repr((cpu, sys.version, numba.__version__, llvmlite.__version__)).encode()


@functools.cache
def find_cache(folder: Path) -> Path | None:
    """Finds where the compiled kernels of a folder of sources are kept.

    Next to the sources, in the user's cache directory, or in a private directory under the
    system's temporary one: the first that can be written to, and by nobody else, or was filled
    by the user that installed the sources.

    Args:
        folder: Folder of the sources.

    Returns:
        A folder named by the sources' folder, the machine, and a digest of the sources' content;
        None where there is none to be had.
    """
    sources = (digest_kernels(Path(__file__).parent) + digest_kernels(folder)).encode()
    parts = (_name_sources(folder).encode(), _describe_machine(), sources)
    name = "-".join(hashlib.sha256(part).hexdigest()[:16] for part in parts)
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
        """Keeps a compiled function where that is possible.

        One process at a time: two that add signatures to an index would name them alike.
        """
        try:
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


def is_cache_enabled() -> bool:
    """Whether the environment leaves the cache switched on."""
    return os.environ.get(NO_CACHE, "").strip().lower() not in ("1", "true", "yes", "on")


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point with numba: no GIL, cached on disk; see `find_cache`."""
    compiled = _compile(function)
    if is_cache_enabled():
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
