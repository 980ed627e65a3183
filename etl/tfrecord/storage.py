"""Object stores behind one small description: what is needed of them, and nothing else.

Everything here works without rename, locks and directories. What callers rely on: an object
appears whole when its upload is closed, replaces one of the same name in one step, and is seen by
every later listing, as Amazon S3 and Google Cloud Storage promise. HDFS cannot replace a file in
one step through this interface, so it is read from only.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pyarrow import fs

from etl.tfrecord.connectors import Settings, add_environment, connect

_READ_BYTES = 4 << 20
# Attempts at an object that others replace meanwhile.
_READS = 5
# Requests under way at a time when many objects are copied or deleted.
REQUESTS = 8


READ_ONLY_SCHEMES = frozenset({"hdfs"})

_file_system = functools.lru_cache(maxsize=16)(connect)


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing shows it.

    Attributes:
        bytes: Its size.
        mtime_ns: When it was written, by the store's clock; 0 where the store does not say.
    """

    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Storage:
    """A directory of an object store; picklable, and without credentials.

    Attributes:
        scheme: `s3`, `gs` or `hdfs`.
        root: Bucket (or host) and path, without slashes at the ends.
        settings: How to reach the store, such as `endpoint_override` and `region`.
    """

    scheme: str
    root: str
    settings: Settings = ()

    @property
    def uri(self) -> str:
        """The directory as its user writes it."""
        return f"{self.scheme}://{self.root}"

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.root.rpartition("/")[2]

    @property
    def parent(self) -> Storage | None:
        """The directory around it, or None for a bucket."""
        around, slash, _ = self.root.rpartition("/")
        return Storage(self.scheme, around, self.settings) if slash else None

    def child(self, name: str) -> Storage:
        """A directory below this one."""
        return Storage(self.scheme, f"{self.root}/{name}", self.settings)

    def _locate(self, key: str = "") -> tuple[fs.FileSystem, str]:
        authority, _, path = self.root.partition("/")
        settings = add_environment(self.scheme, self.settings)
        system = _file_system(self.scheme, authority, settings)
        start = f"/{path}" if self.scheme == "hdfs" else self.root
        return system, f"{start}/{key}" if key else start

    def list_objects(self, is_recursive: bool = True) -> dict[str, StoredObject]:
        """Lists objects by key relative to the root; nothing where nothing is.

        Args:
            is_recursive: Whether those in directories below are listed too.

        Raises:
            OSError: The store does not answer, or refuses.
        """
        system, path = self._locate()
        selector = fs.FileSelector(path, recursive=is_recursive, allow_not_found=True)
        found = system.get_file_info(selector)
        prefix = len(path.rstrip("/")) + 1
        return {
            info.path[prefix:]: StoredObject(info.size, info.mtime_ns or 0)
            for info in found
            if info.type == fs.FileType.File
        }

    def find(self, key: str = "") -> StoredObject | None:
        """Looks for one object; None where there is none, or a directory."""
        system, path = self._locate(key)
        [info] = system.get_file_info([path])
        if info.type != fs.FileType.File:
            return None
        return StoredObject(info.size, info.mtime_ns or 0)

    def is_directory(self) -> bool:
        """Whether there is a bucket, or a directory: objects below it, or what marks it."""
        system, path = self._locate()
        [info] = system.get_file_info([path])
        return bool(info.type == fs.FileType.Directory)

    def read(self, key: str) -> bytes | None:
        """Reads a small object as it is at one moment; None where there is none.

        Raises:
            OSError: The store does not answer or refuses, or the object never stays the same.
        """
        failure = None
        for _ in range(_READS):
            try:
                data = self._read_once(key)
            except FileNotFoundError:
                return None
            except OSError as error:
                data, failure = None, error
            # S3's client asks for the size, then for that many bytes: what is replaced in between
            # comes cut off, and what is deleted as an error of its own.
            found = self.find(key)
            if found is None:
                return None
            if data is not None and len(data) == found.bytes:
                return data
        raise failure or OSError(f"{self.uri}/{key} changes while it is read")

    def _read_once(self, key: str) -> bytes:
        system, path = self._locate(key)
        with system.open_input_stream(path, compression=None) as stream:
            return cast(bytes, stream.read())

    def put(self, key: str, data: bytes) -> None:
        """Creates or replaces an object in one step."""
        with self.open_output(key) as stream:
            stream.write(data)

    def open_output(self, key: str) -> Any:
        """Opens an upload; the object appears when the stream is closed."""
        system, path = self._locate(key)
        # The default compresses once more what ends in .gz.
        return system.open_output_stream(path, compression=None)

    def open_input(self, key: str = "") -> BinaryIO:
        """Opens an object for reading and seeking."""
        system, path = self._locate(key)
        return cast(BinaryIO, io.BufferedReader(system.open_input_file(path), _READ_BYTES))

    def copy_all(self, names: Mapping[str, str]) -> None:
        """Copies objects inside the store, from key to key."""
        _run_all(self._copy, names.items())

    def _copy(self, names: tuple[str, str]) -> None:
        system, source = self._locate(names[0])
        system.copy_file(source, self._locate(names[1])[1])

    def delete_all(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that are not there do no harm."""
        _run_all(self.delete, keys)

    def delete(self, key: str) -> None:
        """Deletes an object, if it is there."""
        system, path = self._locate(key)
        try:
            system.delete_file(path)
        except FileNotFoundError:
            return

    def delete_tree(self) -> None:
        """Deletes all objects below, and what marks the directory itself."""
        system, path = self._locate()
        try:
            system.delete_dir(path)
        except OSError:
            # Google's client has no error of its own for a directory that is not there.
            if self.list_objects():
                raise


def _run_all(call: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Calls for each item, some at a time; the first error ends it once those have returned."""
    items = list(items)
    if REQUESTS == 1 or len(items) < 2:
        for item in items:
            call(item)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
