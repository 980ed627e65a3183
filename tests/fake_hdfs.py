"""A NameNode in memory behind the interface of `hdfs_native`, whose every change can be watched."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from conf.storage import object_store
from conf.storage.hdfs_client import HdfsClient
from conf.storage.object_store import CONNECTORS

_CHANGES = frozenset({"create", "mkdirs", "rename", "delete", "write", "close"})


@dataclass
class _Node:
    data: bytes | None
    """None of a folder."""
    time_ms: int


class _Watched:
    """Tells of a change before it is made, in the thread of who asks for it."""

    hook: Callable[[str], None]

    def __getattribute__(self, name: str) -> Any:
        if name in _CHANGES:
            object.__getattribute__(self, "hook")(name)
        return object.__getattribute__(self, name)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def read(self) -> bytes:
        return self._data

    def read_range(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]


class _Writer(_Watched):
    def __init__(self, system: FakeHdfs, node: _Node) -> None:
        self.hook, self._system, self._node = lambda name: system.hook(name), system, node

    def write(self, data: bytes) -> None:
        self._node.data = (self._node.data or b"") + data

    def close(self) -> None:
        self._node.time_ms = next(self._system.times_ms)


class FakeHdfs(_Watched):
    """Folders and files; what `rename2` of HDFS may and may not do."""

    def __init__(self) -> None:
        self.hook = lambda name: None
        self.times_ms = itertools.count(int(time.time() * 1000))
        self._nodes = {"/": _Node(None, 0)}
        self._lock = threading.RLock()

    def get_file_info(self, path: str) -> SimpleNamespace:
        with self._lock:
            return self._describe(path, self._find(path))

    def list_status(self, path: str, recursive: bool) -> list[SimpleNamespace]:
        with self._lock:
            self._find(path)
            found = [name for name in self._below(path) if recursive or _parent(name) == path]
            return [self._describe(name, self._nodes[name]) for name in sorted(found)]

    def read(self, path: str) -> _Reader:
        with self._lock:
            return _Reader(self._find(path).data or b"")

    def create(self, path: str, options: object) -> _Writer:
        with self._lock:
            self._make_folders(_parent(path))
            node = self._nodes[path] = _Node(b"", next(self.times_ms))
            return _Writer(self, node)

    def mkdirs(self, path: str, permission: int, create_parent: bool) -> None:
        with self._lock:
            self._make_folders(path)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        with self._lock:
            self._find(source)
            self._find(_parent(target))
            if target in self._nodes and (not overwrite or self._nodes[target].data is None):
                raise FileExistsError(target)
            for name in [source, *self._below(source)]:
                self._nodes[target + name.removeprefix(source)] = self._nodes.pop(name)

    def delete(self, path: str, recursive: bool) -> bool:
        with self._lock:
            below = self._below(path)
            if below and not recursive:
                raise RuntimeError('RPCError("fs.PathIsNotEmptyDirectoryException", "not empty")')
            for name in below:
                del self._nodes[name]
            return self._nodes.pop(path, None) is not None

    def _make_folders(self, path: str) -> None:
        while path not in self._nodes:
            self._nodes[path] = _Node(None, next(self.times_ms))
            path = _parent(path)

    def _find(self, path: str) -> _Node:
        if path not in self._nodes:
            raise FileNotFoundError(path)
        return self._nodes[path]

    def _below(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return [name for name in self._nodes if name.startswith(start) and name != path]

    def _describe(self, path: str, node: _Node) -> SimpleNamespace:
        return SimpleNamespace(
            path=path, isdir=node.data is None, length=len(node.data or b""),
            modification_time=node.time_ms,
        )  # fmt: skip


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


@contextmanager
def reached_as_hdfs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHdfs]:
    """A fresh one, reached as `hdfs://node/...`, one request after another."""
    system = FakeHdfs()
    monkeypatch.setitem(sys.modules, "hdfs_native", SimpleNamespace(WriteOptions=SimpleNamespace))
    monkeypatch.setitem(CONNECTORS, "hdfs", lambda node, settings: HdfsClient(system))
    monkeypatch.setattr(object_store, "REQUESTS", 1)
    object_store.find_client.cache_clear()
    yield system
    object_store.find_client.cache_clear()
