"""A directory of an object store, or of HDFS, by keys relative to it; without locks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from conf.errors import ConfigError, install_hint
from conf.storage.store_clients import (
    BUCKET_SETTINGS,
    Settings,
    StoreClient,
    StoredObject,
    Upload,
    Version,
    add_environment,
    connect_bucket,
    first_line,
)

_FIX = "check name, region and endpoint, and the credentials in the environment; renew expired ones"
_FIX_HDFS = (
    "name the NameNode's host and port, or a name service; Kerberos is set in core-site.xml of "
    "HADOOP_CONF_DIR, with a ticket by kinit or KRB5_CLIENT_KTNAME; else set HADOOP_USER_NAME"
)

# Requests under way at a time when many objects are moved or deleted.
REQUESTS = 8


def _connect_hdfs(authority: str, settings: Settings) -> StoreClient:
    from conf.storage.hdfs_client import connect_hdfs

    if settings:
        raise ValueError("HDFS is configured by the files in HADOOP_CONF_DIR, not by settings")
    return connect_hdfs(authority)


# How to reach the store of each scheme; tests add one of their own.
CONNECTORS: dict[str, Callable[[str, Settings], StoreClient]] = {
    **{scheme: functools.partial(connect_bucket, scheme) for scheme in BUCKET_SETTINGS},
    "hdfs": _connect_hdfs,
}


def connect(scheme: str, authority: str, settings: Settings) -> StoreClient:
    """Builds the client of a bucket or host."""
    try:
        return CONNECTORS[scheme](authority, settings)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed",
            received=error.name,
            fix=f"{install_hint('stores')}, for driver and executors",
        ) from error
    except Exception as error:  # the library's own errors have no common class besides
        raise unreachable(f"{scheme}://{authority}", error) from error


def unreachable(uri: str, error: Exception) -> ConfigError:
    """Builds the error of a store that does not answer, or refuses."""
    return ConfigError(
        f"{uri} cannot be reached",
        received=first_line(error),
        fix=_FIX_HDFS if uri.startswith("hdfs:") else _FIX,
    )


find_client = functools.lru_cache(maxsize=16)(connect)


@dataclass(frozen=True)
class Storage:
    """A directory of an object store; picklable, and without credentials.

    Its methods raise an `OSError` where the store does not answer, or refuses.
    """

    scheme: str  # s3, gs, az or hdfs
    root: str  # bucket (or container, or host) and path, without slashes at the ends
    settings: Settings = ()

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.root}"

    @property
    def name(self) -> str:
        return self.root.rpartition("/")[2]

    @property
    def parent(self) -> Storage | None:
        """The directory around it, or None for a bucket."""
        around, slash, _ = self.root.rpartition("/")
        return Storage(self.scheme, around, self.settings) if slash else None

    def child(self, name: str) -> Storage:
        return Storage(self.scheme, f"{self.root}/{name}", self.settings)

    @property
    def _path(self) -> str:
        return self.root.partition("/")[2]

    @property
    def _client(self) -> StoreClient:
        settings = add_environment(self.scheme, self.settings)
        return find_client(self.scheme, self.root.partition("/")[0], settings)

    def _locate(self, key: str) -> str:
        return f"{self._path}/{key}".strip("/")

    def list_objects(self) -> dict[str, StoredObject]:
        """Lists all objects by key, but the empty ones by which other tools mark a folder."""
        start = len(self._path) + 1 if self._path else 0
        objects = {path[start:]: item for path, item in self._client.list_below(self._path)}
        folders = {str(folder) for key in objects for folder in PurePosixPath(key).parents}
        folders |= {key for key in objects if "=" in key.rpartition("/")[2]}
        return {key: item for key, item in objects.items() if item.bytes or key not in folders}

    def list_folders(self) -> set[str]:
        return {path.rpartition("/")[2] for path in self._client.list_folders(self._path)}

    def find(self, key: str = "") -> StoredObject | None:
        """Looks for one object; None where there is none, or a directory."""
        path = self._locate(key)
        return self._client.head(path) if path else None

    def has_bucket(self) -> bool:
        return self._client.has_bucket()

    def read(self, key: str) -> bytes | None:
        """Reads a small object as it is at one moment; None where there is none."""
        return self.read_version(key)[0]

    def read_version(self, key: str) -> tuple[bytes | None, Version | None]:
        """Reads a small object, and what `replace` asks for; None twice where there is none."""
        try:
            return self._client.get(self._locate(key))
        except FileNotFoundError:
            return None, None

    def put(self, key: str, data: bytes) -> None:
        """Creates or replaces an object in one step."""
        self._client.put(self._locate(key), data, "any")

    def replace(self, key: str, data: bytes, version: Version | None) -> bool:
        """Replaces an object that is of a version, None where there is to be none; else False."""
        try:
            self._client.put(self._locate(key), data, version)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if version is None:  # there is no such bucket
                raise
            return False
        return True

    def update(self, key: str, build: Callable[[bytes | None], bytes]) -> None:
        """Replaces an object by what is made of its content, anew while others are faster."""
        is_replaced = False
        while not is_replaced:
            data, version = self.read_version(key)
            is_replaced = self.replace(key, build(data), version)

    def open_output(self, key: str) -> Upload:
        """Opens an upload; the object appears when it is closed."""
        return self._client.open_output(self._locate(key))

    def open_input(self, key: str = "") -> BinaryIO:
        return self._client.open_input(self._locate(key))

    def move_all(self, names: Mapping[str, str], target: Storage | None = None) -> None:
        """Moves objects, from key here to key in a directory of the bucket; they may stay too."""
        move, place = self._client.move, target or self
        run_all(lambda pair: move(self._locate(pair[0]), place._locate(pair[1])), names.items())

    def move_tree(self, target: Storage) -> bool:
        """Moves the directory in one step; returns False where the store cannot."""
        return self._client.move_folder(self._path, target._path)

    def delete(self, key: str) -> None:
        self._client.delete(self._locate(key), self._path)

    def delete_all(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that are not there do no harm."""
        run_all(self.delete, keys)

    def delete_tree(self, rank: Callable[[str], int] = lambda key: 0) -> None:
        """Deletes all objects below, those of a lower rank before the others."""
        keys = sorted(self.list_objects(), key=rank)
        *first, last = [list(group) for _, group in groupby(keys, rank)] or [[]]
        for group in first:
            self.delete_all(group)
        if not self._client.remove_folder(self._path):
            self.delete_all(last)

    def remove_uploads(self, held: str) -> None:
        """Removes uploads below that never ended; folders that hold a key may be at work."""
        self._client.remove_uploads(self._path, held)


@contextlib.contextmanager
def reaching(place: Storage) -> Iterator[None]:
    """Turns what a store refuses while the block runs into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise unreachable(place.uri, error) from error


def run_all(call: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Calls for each item, some at a time; the first error ends it once those have returned."""
    items = list(items)
    if REQUESTS == 1 or len(items) < 2:
        for item in items:
            call(item)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in pool.map(call, items):  # An error cancels the calls that have not begun.
            pass
