"""An object store in memory, whose every request can be watched, delayed or refused."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

import pytest

from conf.storage import object_store
from conf.storage.object_store import CONNECTORS
from conf.storage.store_clients import StoredObject


class _Upload(io.BytesIO):
    """Becomes an object in one step, when it is closed."""

    def __init__(self, store: FakeStore, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.put(self._path, data, "any")


@dataclass(frozen=True)
class _Object:
    data: bytes
    version: int
    time_ns: int

    def describe(self) -> StoredObject:
        return StoredObject(len(self.data), self.time_ns)


class FakeStore:
    """A dictionary behind the interface of an object store's client."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._objects: dict[str, _Object] = {}
        self._versions, self._lock = itertools.count(1), threading.Lock()
        self.hook: Callable[[str], None] = lambda name: None

    def step(self, name: str) -> None:
        self.hook(name)
        self.log.append(name)

    def objects(self, root: str) -> set[str]:
        folder = root.removeprefix("bucket/") + "/"
        return {key.removeprefix(folder) for key in self._objects if key.startswith(folder)}

    def age(self, path: str, seconds: float) -> None:
        old = self._objects[path]
        self._objects[path] = replace(old, time_ns=old.time_ns - int(seconds * 1e9))

    def _write(self, path: str, data: bytes) -> None:
        self._objects[path] = _Object(data, next(self._versions), time.time_ns())

    def head(self, path: str) -> StoredObject | None:
        self.step(f"head bucket/{path}")
        return self._objects[path].describe() if path in self._objects else None

    def list_below(self, folder: str) -> Iterator[tuple[str, StoredObject]]:
        self.step(f"list bucket/{folder}")
        with self._lock:
            found = sorted(self._objects.items())
        start = f"{folder}/" if folder else ""
        return iter([(key, item.describe()) for key, item in found if key.startswith(start)])

    def list_folders(self, folder: str) -> Iterator[str]:
        self.step(f"folders bucket/{folder}")
        names = (key.partition("/") for key in self.objects(f"bucket/{folder}"))
        return iter({f"{folder}/{name}" for name, slash, _ in names if slash})

    def has_bucket(self) -> bool:
        self.step("has bucket")
        return True

    def get(self, path: str) -> tuple[bytes, dict[str, str]]:
        self.step(f"get bucket/{path}")
        with self._lock:
            if path not in self._objects:
                raise FileNotFoundError(path)
            found = self._objects[path]
        return found.data, {"e_tag": str(found.version)}

    def open_input(self, path: str) -> BinaryIO:
        return io.BytesIO(self.get(path)[0])

    def put(self, path: str, data: bytes, over: object) -> None:
        self.step(f"put bucket/{path}")
        with self._lock:
            found = self._objects.get(path)
            if over != "any" and over != (found and {"e_tag": str(found.version)}):
                raise FileExistsError(path)
            self._write(path, data)

    def open_output(self, path: str) -> _Upload:
        return _Upload(self, path)

    def move(self, source: str, target: str) -> None:
        self.step(f"copy bucket/{target}")
        with self._lock:
            self._write(target, self._objects[source].data)

    def delete(self, path: str, within: str) -> None:
        self.step(f"delete bucket/{path}")
        with self._lock:
            self._objects.pop(path, None)

    def move_folder(self, source: str, target: str) -> bool:
        return False

    def remove_folder(self, folder: str) -> bool:
        return False

    def remove_uploads(self, folder: str, held: str) -> None:
        pass


class _NoBucket(FakeStore):
    def has_bucket(self) -> bool:
        return False


@contextmanager
def reached_as(
    scheme: str, monkeypatch: pytest.MonkeyPatch, store: FakeStore | None = None
) -> Iterator[FakeStore]:
    """A fresh store, or one of before, reached as `<scheme>://bucket/...`, one by one."""
    handler = store or FakeStore()
    connect = lambda bucket, _: handler if bucket == "bucket" else _NoBucket()  # noqa: E731
    monkeypatch.setitem(CONNECTORS, scheme, connect)
    monkeypatch.setattr(object_store, "REQUESTS", 1)
    object_store.find_client.cache_clear()
    yield handler
    object_store.find_client.cache_clear()
