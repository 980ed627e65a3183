"""Cache of compiled kernels on disk: an optimisation that no trouble with a disk turns into more.

What is cached is code that will run, so an entry is loaded only from a directory and a file that
no other user could have written. Entries are complete or absent (written aside, then renamed) and
carry a digest, so that processes may fill an empty cache at once, and damage means compiling.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching
from numba.core.serialize import dumps

SWITCH = "SLUICE_NO_JIT_CACHE"  # set to 1: compile in memory, touch no cache

_DIGEST_BYTES = 32
_SUFFIX = ".sluice.nbc"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def is_enabled() -> bool:
    """Whether the environment leaves the cache switched on."""
    return os.environ.get(SWITCH, "").strip().lower() not in ("1", "true", "yes", "on")


@functools.cache
def digest_kernels(folder: Path) -> str:
    """Digest of the sources that may end up in the code of a kernel in `folder`.

    Stock numba stamps its cache with the kernel's own source file, and so misses changes in the
    functions it inlines from other files.

    Args:
        folder: Folder of the kernel's module. In a package, all of the top-level package is
            covered; in a zip file, all of that file.

    Returns:
        Hex SHA-256.
    """
    archive = next((parent for parent in (folder, *folder.parents) if parent.is_file()), None)
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
        if b"etl.tfrecord.codec.kernels" in text:
            digest.update(text)
    return digest.hexdigest()


def _is_private(info: os.stat_result, trusted_mode: int = 0) -> bool:
    """Whether nobody but this user, root, and those in `trusted_mode` could have written it."""
    writers = info.st_mode & _WRITABLE_BY_OTHERS & ~(trusted_mode & stat.S_IWGRP)
    return info.st_uid in (os.getuid(), 0) and not writers


def _is_usable(directory: Path, trusted_mode: int = 0) -> bool:
    """Whether a directory is private and can be written to; makes it if it is not there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.lstat()
        if not stat.S_ISDIR(info.st_mode) or not _is_private(info, trusted_mode):
            return False
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _candidates(source: Path) -> Iterator[tuple[Path, int]]:
    """Directories for the kernels of a source file, best first, and whose writers to trust."""
    tag = f"{source.parent.name}-{hashlib.sha256(str(source.parent).encode()).hexdigest()[:16]}"
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given).absolute() / tag, 0
    if source.is_file():  # whoever may change the sources may change the cache next to them
        yield source.parent / "__pycache__", source.parent.stat().st_mode
    caches = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # a user without a home
        root = Path(caches) if caches.startswith("/") else Path.home() / ".cache"
        yield root / "sluice" / "kernels" / tag, 0
    yield Path(tempfile.gettempdir()) / f"sluice-kernels-{os.getuid()}", 0


@functools.cache
def find_directory(source: Path) -> Path | None:
    """Finds where the compiled kernels of a source file are kept.

    Next to the sources, in the user's cache directory, or in a private directory under the
    system's temporary one: the first that can be written to, and by nobody else.

    Args:
        source: Source file.

    Returns:
        The directory, or None where there is none to be had.
    """
    for directory, trusted_mode in _candidates(source):
        if _is_usable(directory, trusted_mode):
            return directory
    return None


def find_shipped(source: Path) -> Path | None:
    """Finds a filled cache next to sources that this user cannot write to.

    An image or a shared installation is warmed by whoever makes it, and read by everybody.

    Args:
        source: Source file.

    Returns:
        The directory, or None where the sources' writers are not to be trusted, or keep no cache.
    """
    directory = source.parent / "__pycache__"
    try:
        is_ours = _is_private(directory.stat(), source.parent.stat().st_mode)
    except OSError:
        return None
    return directory if is_ours and any(directory.glob(f"*{_SUFFIX}")) else None


class _Locator:
    """What numba asks of a cache's place."""

    def __init__(self, source: str, directory: Path) -> None:
        self._py_file, self._directory = source, directory

    def get_cache_path(self) -> str:
        return str(self._directory)

    def ensure_cache_path(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return ""  # the file names carry the digest of the sources

    def get_disambiguator(self) -> str:
        return ""


class _Impl(caching.CompileResultCacheImpl):
    """Numba's serialisation of compiled functions."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        source = inspect.getfile(py_func)
        path = Path(source).absolute()
        self.shipped = find_shipped(path)
        directory = find_directory(path) or self.shipped
        if directory is None:
            raise RuntimeError(f"no directory for the compiled code of {source}")
        self._lineno = py_func.__code__.co_firstlineno
        self._locator = _Locator(source, directory)
        name = f"{Path(source).stem}.{py_func.__qualname__}"
        self._filename_base = "".join(c if c.isalnum() or c in "._" else "-" for c in name)


class CacheFiles:
    """Entries of one function: a file per signature and CPU, named by a digest of all that.

    A file is a SHA-256 of the rest, then the pickled entry.
    """

    def __init__(self, directory: Path, base: str, stamp: str, shipped: Path | None = None) -> None:
        self._directory, self._prefix, self._stamp = directory, f"{base}-", stamp[:16]
        self._shipped = shipped

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(f"{self._stamp} {key!r}".encode()).hexdigest()[:32]
        return f"{self._prefix}{self._stamp}-{digest}{_SUFFIX}"

    def load(self, key: Any) -> Any:
        """Returns an entry, or None where there is none that is whole and to be trusted."""
        for directory in dict.fromkeys((self._directory, self._shipped)):
            entry = None if directory is None else self._load_from(directory, key)
            if entry is not None:
                return entry
        return None

    def _load_from(self, directory: Path, key: Any) -> Any:
        try:
            with (directory / self._name(key)).open("rb") as file:
                info = os.fstat(file.fileno())
                trusted = directory.stat()
                if not _is_private(trusted, trusted.st_mode) or not _is_private(
                    info, trusted.st_mode
                ):
                    return None
                content = file.read()
        except OSError:
            return None
        digest, entry = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(entry).digest() != digest:
            return None
        return pickle.loads(entry)  # noqa: S301 - from this user's own file, checked above

    def save(self, key: Any, data: Any) -> None:
        """Writes an entry, whole or not at all, and removes those of older sources.

        Raises:
            OSError: The disk is full, or the directory has become read-only.
        """
        entry = dumps(data)
        path = self._directory / self._name(key)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            # Readable by others: a cache that is made with the installation serves everybody.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(entry).digest() + entry)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for old in self._directory.glob(f"{self._prefix}*{_SUFFIX}"):
            stamp = old.name[len(self._prefix) :].partition("-")[0]
            if len(stamp) == len(self._stamp) and stamp != self._stamp:
                with contextlib.suppress(OSError):
                    old.unlink()

    def flush(self) -> None:
        """Nothing: there is no index."""


class KernelCache(caching.FunctionCache):
    """Function cache that is an optimisation only: any trouble with it means compiling."""

    _impl_class = _Impl

    def __init__(self, py_func: Callable[..., Any]) -> None:
        """Finds the place of a function's entries.

        Args:
            py_func: The function to compile.

        Raises:
            RuntimeError: No directory can be used.
        """
        super().__init__(py_func)
        folders = (Path(__file__).parent, Path(self._impl.locator._py_file).absolute().parent)
        stamp = hashlib.sha256(
            " ".join(
                (*map(digest_kernels, folders), numba.__version__, llvmlite.__version__,
                 sys.version, str(Path(self._impl.locator._py_file).name))
            ).encode()
        ).hexdigest()  # fmt: skip
        self._cache_file: Any = CacheFiles(
            Path(self._cache_path), self._impl.filename_base, stamp, self._impl.shipped
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns a compiled function, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # foreign or unreadable: whatever it is, compile afresh
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps a compiled function where that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception:  # disk full, or the directory has gone: go on without
            self.disable()
