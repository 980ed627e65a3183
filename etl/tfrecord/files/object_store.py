"""Object stores and HDFS behind one small interface, and how each of them is reached.

Everything works without rename, locks and directories: an object appears whole when its upload
ends, or not at all. Settings come from options, else from the environment.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import urlencode

from pyarrow import fs

from conf.errors import ConfigError

Settings = tuple[tuple[str, str], ...]

ANONYMOUS = "anonymous"
# Google's client would go on for a quarter of an hour where nobody answers, or where it finds no
# credentials.
_RETRY_S = 60

_FIX = (
    "check name, region, endpoint and credentials; credentials come from the environment of "
    "driver and executors, in the way of the store's own tools"
)
# Java inside of this process would answer SIGTERM by ending it, before a run is saved.
_KEEP_SIGNALS = "-Xrs"
_FIX_HDFS = (
    "HDFS is reached through libhdfs: install a Hadoop client, and set for driver and executors "
    "JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR, the folder of libhdfs.so) and "
    "CLASSPATH=$(hadoop classpath --glob); name the NameNode's host and port, or a name service "
    "that the configuration on CLASSPATH knows"
)


def split_endpoint(settings: Mapping[str, str]) -> dict[str, str]:
    """Takes the scheme of an endpoint that is given as a URL apart, as `pyarrow.fs` wants it."""
    resolved = dict(settings)
    endpoint = re.fullmatch(r"(https?)://([^/]+)/?", resolved.get("endpoint_override", ""))
    if endpoint is not None:
        resolved.setdefault("scheme", endpoint[1])
        resolved["endpoint_override"] = endpoint[2]
    return resolved


def add_environment(scheme: str, settings: Settings) -> Settings:
    """Adds what the environment says of a store, unless the settings name an endpoint.

    Args:
        scheme: Of the store.
        settings: As the user gave them.

    Returns:
        The settings, with the endpoint of `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, or of
        `STORAGE_EMULATOR_HOST`, which is reached without credentials.
    """
    given = dict(settings)
    if "endpoint_override" in given:
        return settings
    found: dict[str, str] = {}
    if scheme == "s3":
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        found = split_endpoint({"endpoint_override": url}) if url else {}
    elif scheme == "gs" and (host := os.environ.get("STORAGE_EMULATOR_HOST")):
        url = host if "://" in host else f"http://{host}"
        found = {ANONYMOUS: "true", **split_endpoint({"endpoint_override": url})}
    return tuple(sorted({**found, **given}.items()))


def _connect_s3(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    given = dict(settings)
    if given.pop(ANONYMOUS, "false") == "false":
        return _connect(scheme, authority, tuple(given.items()))
    # Not to be said in a URI of S3.
    if "region" not in given and "endpoint_override" not in given:
        given["region"] = fs.resolve_s3_region(authority)
    return fs.S3FileSystem(anonymous=True, **given)


def _connect_gs(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    given = dict(settings)
    user = f"{ANONYMOUS}@" if given.pop(ANONYMOUS, "false") == "true" else ""
    given["retry_limit_seconds"] = str(_RETRY_S)
    return _connect(scheme, f"{user}{authority}", tuple(given.items()))


def _connect_hdfs(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    if not os.environ.get("CLASSPATH"):  # libhdfs would end the process in the middle of Java
        raise OSError("CLASSPATH names no Hadoop client")
    options = os.environ.get("LIBHDFS_OPTS", "").split()
    if _KEEP_SIGNALS not in options:
        os.environ["LIBHDFS_OPTS"] = " ".join([*options, _KEEP_SIGNALS])
    system = _connect(scheme, authority, settings)
    # A NameNode that does not answer looks like one that has nothing.
    if system.get_file_info("/").type != fs.FileType.Directory:
        raise OSError("the NameNode does not answer, or does not let this user look at /")
    return system


def _connect(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    query = f"?{urlencode(settings)}" if settings else ""
    file_system, _ = fs.FileSystem.from_uri(f"{scheme}://{authority}/{query}")
    return file_system


# How to reach the file system of each scheme; tests add one of their own.
CONNECTORS: dict[str, Callable[[str, str, Settings], fs.FileSystem]] = {
    "s3": _connect_s3,
    "gs": _connect_gs,
    "hdfs": _connect_hdfs,
}


def connect(scheme: str, authority: str, settings: Settings) -> fs.FileSystem:
    """Builds the file system of a bucket or host.

    Args:
        scheme: `s3`, `gs` or `hdfs`.
        authority: Bucket, or host and port.
        settings: As `add_environment` returned them.

    Raises:
        ConfigError: The settings do not fit, or what reaches the store is not installed.
    """
    try:
        return CONNECTORS[scheme](scheme, authority, settings)
    except (OSError, ImportError, NotImplementedError, ValueError) as error:
        raise unreachable(f"{scheme}://{authority}", error) from error


def unreachable(uri: str, error: Exception) -> ConfigError:
    """Builds the error of a store that does not answer, or refuses."""
    lines = str(error).splitlines() or [repr(error)]
    return ConfigError(
        f"{uri} cannot be reached",
        received=lines[0],
        fix=_FIX_HDFS if uri.startswith("hdfs:") else _FIX,
    )


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
