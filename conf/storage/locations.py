"""Paths and URIs as users give them, local or in object stores: parsed, opened, and read.

Streams of compressed files are inflated here. Imports nothing compiled by numba.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from conf.errors import ConfigError, did_you_mean
from conf.local_paths import local_path
from conf.storage.hdfs_client import find_default_node
from conf.storage.object_store import CONNECTORS, Storage, reaching
from conf.storage.store_clients import ANONYMOUS, Settings

Compression = Literal["GZIP", "ZLIB"]
Opener = Callable[[str | Path], BinaryIO]

_WBITS = {"GZIP": 31, "ZLIB": 15}
_PIECE_BYTES = 1 << 20


class ByteSource:
    """Reads a stream in pieces of bounded size; a damaged one ends early, with a `failure`."""

    def __init__(
        self,
        file: BinaryIO,
        compression: Compression | None,
        *,
        limit: int | None = None,
        is_salvaging: bool = False,
    ) -> None:
        """Starts at the file's position; salvaging, it gets at each byte before the damage."""
        self.failure: str | None = None
        self._file, self._left = file, limit
        self._wbits = _WBITS.get(compression or "", 0)
        self._inflate: Any = None if compression is None else zlib.decompressobj(self._wbits)
        self._pending, self._has_begun, self._is_salvaging = b"", False, is_salvaging

    def read(self, limit: int) -> bytes:
        """Returns at most `limit` bytes; none at the end of the stream, or of its sound part."""
        if self._inflate is None:
            return self._read_file(limit)
        piece = b""
        while not piece and self.failure is None:
            data = self._pending or self._read_file(_PIECE_BYTES)
            if not data and (self._inflate.eof or not self._has_begun):
                break
            self._has_begun = True
            if self._inflate.eof:  # a further member of a concatenated stream
                self._inflate = zlib.decompressobj(self._wbits)
            piece = self._decompress(data, limit)
            self._pending = self._inflate.unconsumed_tail or self._inflate.unused_data
            if not (piece or data):  # nor was any output left inside the decompressor
                self._fail("it ends early")
        return piece

    def read_into(self, target: np.ndarray) -> int:
        """Fills a buffer, uint8 `[bytes]`, as far as `read` would; returns how many bytes came."""
        if self._inflate is None and self._left is None and hasattr(self._file, "readinto"):
            return self._file.readinto(memoryview(target)) or 0  # type: ignore[arg-type]
        piece = self.read(target.size)
        target[: len(piece)] = np.frombuffer(piece, np.uint8)
        return len(piece)

    def _read_file(self, limit: int) -> bytes:
        if self._left is None:
            return self._file.read(limit)
        data = self._file.read(min(limit, self._left))
        self._left -= len(data)
        return data

    def _decompress(self, data: bytes, limit: int) -> bytes:
        earlier = self._inflate.copy() if self._is_salvaging else None
        try:
            return self._inflate.decompress(data, limit)
        except zlib.error as error:
            self._fail(error)
            return b"" if earlier is None else _salvage(earlier, data)

    def _fail(self, reason: object) -> None:
        self.failure = f"damaged compressed stream ({reason})"


def _salvage(inflate: Any, data: bytes) -> bytes:
    """What a stream gives before it turns out to be damaged, to the last byte."""
    pieces = []
    with contextlib.suppress(zlib.error):
        for position in range(len(data)):
            pieces.append(inflate.decompress(data[position : position + 1]))
    return b"".join(pieces)


def open_local(path: str | Path) -> BinaryIO:
    """Opens a local file."""
    return Path(path).open("rb", buffering=0)


def is_intact(path: str | Path, compression: Compression | None, opener: Opener) -> bool:
    """Whether a file inflates without an error; one that is not compressed always does."""
    with opener(path) as file:
        source = ByteSource(file, compression)
        while compression and source.read(_PIECE_BYTES):
            pass
    return source.failure is None


STORAGE_OPTION, STORAGE_PREFIX = "storage", "fs."
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az"}
_SETTINGS = ("account", ANONYMOUS, "endpoint_override", "region", "scheme")
STORAGE_OPTIONS = (STORAGE_OPTION, *(f"{STORAGE_PREFIX}{name}" for name in _SETTINGS))
_SECRETS = re.compile("key|secret|token|password|credential", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FROM_ENVIRONMENT = "credentials come from the environment: options are shown in plans and logs"


def split_storage_options(options: Mapping[str, str]) -> tuple[dict[str, str], Settings]:
    """Takes the settings of object stores out of data source options."""
    rest, settings = dict[str, str](), dict[str, str]()
    for name, value in options.items():
        if name.lower() == STORAGE_OPTION:
            settings.update(_parse_storage(value))
        elif name.lower().startswith(STORAGE_PREFIX):
            settings[name[len(STORAGE_PREFIX) :].lower()] = value
        else:
            rest[name] = value
    return rest, check_settings(settings)


def _parse_storage(text: str) -> dict[str, str]:
    with contextlib.suppress(ValueError):
        data = json.loads(text)
        if isinstance(data, dict) and all(isinstance(value, str) for value in data.values()):
            return data
    raise ConfigError("TFRecord option 'storage' is no JSON object of strings")


def check_settings(settings: Mapping[str, str]) -> Settings:
    """Checks settings of an object store, such as `region`; secrets are refused."""
    for name, value in settings.items():
        if _SECRETS.search(name) or "@" in value:
            raise ConfigError(
                f"no credentials in options: setting {name!r} is refused", fix=_FROM_ENVIRONMENT
            )
        if name not in _SETTINGS:
            raise ConfigError(
                f"unknown setting {name!r} of an object store",
                allowed=", ".join(STORAGE_OPTIONS[1:]),
                fix=did_you_mean(name, _SETTINGS),
            )
    given = dict(settings)
    scheme, endpoint = given.pop("scheme", "https"), given.get("endpoint_override")
    if endpoint is not None:
        url = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
        given["endpoint_override"] = url.rstrip("/")
    return tuple(sorted(given.items()))


def find_scheme(path: str) -> str | None:
    """Scheme of a URI, in lower case and by its usual name; None for a plain path."""
    match = _SCHEME.match(path)
    return None if match is None else _ALIASES.get(match[1].lower(), match[1].lower())


def is_remote(path: str) -> bool:
    """Whether a path lies in a store."""
    return find_scheme(path) in CONNECTORS


def parse_storage(path: str, settings: Settings = ()) -> Storage:
    """Reads the URI of a directory or an object, such as `s3a://bucket/data/train`, as it stands.

    `hdfs:///data` lies where Hadoop's configuration says.
    """
    scheme, _, rest = path.partition(":")
    name, is_whole, rest = find_scheme(path) or "", rest[:2] == "//", rest.removeprefix("//")
    allowed = f"{scheme}://<bucket, or host:port of HDFS>/<path>, without . and .."
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise ConfigError(
            f"a {scheme}:// path with what stands before @ or behind ? is refused",
            allowed=allowed,
            fix=f"settings are options (fs.endpoint_override, fs.region), {_FROM_ENVIRONMENT}; "
            "the user of HDFS is HADOOP_USER_NAME, else that of the process",
        )
    if name == "hdfs" and is_whole and rest.startswith("/"):
        rest = find_default_node() + rest
    parts = [part for part in rest.split("/") if part]
    if not (is_whole and parts) or rest.startswith("/") or {".", ".."} & set(parts):
        raise ConfigError("no place in an object store", received=path, allowed=allowed)
    return Storage(name, "/".join(parts), settings)


def resolve_local_path(path: str) -> str:
    """Turns a plain path or a `file:` URI into an absolute local path."""
    scheme = _SCHEME.match(path)
    local = path
    if scheme is not None and scheme[1].lower() == "file":
        local = re.sub(r"^file:(//(localhost)?(?=/))?", "", path, flags=re.IGNORECASE)
    if not path or (scheme is not None and local == path) or local.startswith("//"):
        raise ConfigError(
            "not a local path",
            received=re.sub(r"//[^/]*@", "//***@", path) or "no path",
            allowed="/data/train or file:///data/train; of shards also s3://, gs://, az://, hdfs://",
        )
    return str(Path(local).absolute())


def parse_path(path: str, settings: Settings) -> tuple[str, Storage | None]:
    """Reads a path: an absolute local one and None, or a URI and its place in an object store."""
    if not is_remote(path):
        return resolve_local_path(path), None
    storage = parse_storage(path, settings)
    return storage.uri, storage


@dataclass(frozen=True)
class FileOpener:
    """Opens input files wherever they lie, by the settings of their store; picklable."""

    settings: Settings = ()

    def __call__(self, path: str | Path) -> BinaryIO:
        if isinstance(path, str) and is_remote(path):
            return parse_storage(path, self.settings).open_input()
        return open_local(path)


@dataclass(frozen=True)
class StoredPath:
    """A place in an object store, used like a `pathlib.Path`: a `conf.paths.ReadablePath`."""

    storage: Storage

    def __str__(self) -> str:
        return self.storage.uri

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def parent(self) -> StoredPath:
        """The directory around it; a bucket itself."""
        return StoredPath(self.storage.parent or self.storage)

    def __truediv__(self, key: str, /) -> StoredPath:
        return StoredPath(self.storage.child(key))

    def absolute(self) -> StoredPath:
        return self

    def resolve(self) -> StoredPath:
        return StoredPath(replace(self.storage, root=posixpath.normpath(self.storage.root)))

    def is_relative_to(self, other: StoredPath, /) -> bool:
        return f"{self}/".startswith(f"{other}/")

    def is_file(self) -> bool:
        with reaching(self.storage):
            return self.storage.find() is not None

    def read_bytes(self) -> bytes:
        with reaching(self.storage):
            data = self.storage.read("")
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(self))
        return data

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def update(self, key: str, build: Callable[[bytes | None], bytes]) -> None:
        """Replaces a file below by what is made of its content, anew while others are faster."""
        with reaching(self.storage):
            self.storage.update(key, build)

    def list_bytes(self) -> dict[str, int]:
        with reaching(self.storage):
            return {key: item.bytes for key, item in self.storage.list_objects().items()}

    def list_folders(self) -> set[str]:
        with reaching(self.storage):
            return self.storage.list_folders()

    def has_bucket(self) -> bool:
        """Whether the bucket is there, or the store does not tell."""
        with contextlib.suppress(OSError):
            return self.storage.has_bucket()
        return True


def find_path(path: str | os.PathLike[str]) -> Path | StoredPath:
    """Returns the place that a path or URI names; what lies there is only read."""
    text = os.fspath(path)
    return StoredPath(parse_storage(text)) if is_remote(text) else local_path(text)
