"""An object store without rename, whose every request can be watched, delayed or refused."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from etl.tfrecord.commit.job import Owner, describe_process
from etl.tfrecord.commit.output_manifest import OutputManifest
from etl.tfrecord.files import object_store as storage_module
from etl.tfrecord.files.object_store import CONNECTORS, Storage
from tests.object_servers import SCHEMES, ObjectServer


class _Upload(io.BytesIO):
    """Becomes an object in one step, when it is closed."""

    def __init__(self, store: FakeStore, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.step(f"put {self._path}")
            self._store.write(self._path, data)


class FakeStore(fs.FileSystemHandler):
    """A local directory behind the interface of an object store."""

    def __init__(self, base: Path) -> None:
        self.base, self.log = base / "objects", []
        self._incoming = base / "incoming"
        self.base.mkdir()
        self._incoming.mkdir()
        self.hook: Callable[[str], None] = lambda name: None

    def step(self, name: str) -> None:
        self.hook(name)
        self.log.append(name)

    def write(self, path: str, data: bytes) -> None:
        temporary = self._incoming / uuid.uuid4().hex
        temporary.write_bytes(data)
        (self.base / path).parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(self.base / path)

    def objects(self, root: str) -> set[str]:
        folder = self.base / root
        return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}

    def _info(self, path: str) -> fs.FileInfo:
        place = self.base / path
        try:
            stat = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return fs.FileInfo(path, fs.FileType.NotFound)
        if place.is_dir():
            return fs.FileInfo(path, fs.FileType.Directory)
        return fs.FileInfo(path, fs.FileType.File, size=stat.st_size, mtime_ns=stat.st_mtime_ns)

    def get_type_name(self) -> str:
        return "fake"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        self.step(f"head {paths[0]}")
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        self.step(f"list {selector.base_dir}")
        folder = self.base / selector.base_dir
        found = folder.rglob("*") if selector.recursive else folder.glob("*")
        infos = [self._info(str(p.relative_to(self.base))) for p in found]
        return [info for info in infos if info.type != fs.FileType.NotFound]

    def open_input_stream(self, path: str) -> pa.NativeFile:
        self.step(f"get {path}")
        return pa.PythonFile((self.base / path).open("rb"), mode="r")

    open_input_file = open_input_stream

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        return pa.PythonFile(_Upload(self, path), mode="w")

    def open_append_stream(self, path: str, metadata: object) -> pa.NativeFile:
        raise NotImplementedError("objects cannot be appended to")

    def copy_file(self, source: str, target: str) -> None:
        self.step(f"copy {target}")
        self.write(target, (self.base / source).read_bytes())

    def delete_file(self, path: str) -> None:
        self.step(f"delete {path}")
        (self.base / path).unlink()

    def delete_dir(self, path: str) -> None:
        # A real store deletes object by object: each one may be the last before a death.
        for item in sorted((self.base / path).rglob("*")):
            if item.is_file():
                self.step(f"delete {item.relative_to(self.base)}")
                item.unlink()
        if not (self.base / path).exists():
            raise FileNotFoundError(path)
        shutil.rmtree(self.base / path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def create_dir(self, path: str, recursive: bool) -> None:
        raise NotImplementedError("there are no directories")

    def move(self, source: str, target: str) -> None:
        raise NotImplementedError("there is no rename")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    """A fresh store, reached as `fake://bucket/...`; requests come one by one."""
    handler = FakeStore(tmp_path)
    system = fs.PyFileSystem(handler)
    monkeypatch.setitem(CONNECTORS, "fake", lambda *_: system)
    monkeypatch.setattr(storage_module, "REQUESTS", 1)
    storage_module._file_system.cache_clear()
    yield handler
    storage_module._file_system.cache_clear()


@pytest.fixture
def root(store: FakeStore) -> Storage:
    """An output directory in the store."""
    return Storage("fake", "bucket/data")


@pytest.fixture(params=["fake", *SCHEMES])
def any_root(request: pytest.FixtureRequest, server_of: Callable[[str], ObjectServer]) -> Storage:
    """A directory of its own in the store that can be watched, and in each real server."""
    if request.param == "fake":
        request.getfixturevalue("store")
        return Storage("fake", "bucket/data")
    return server_of(request.param).place(uuid.uuid4().hex)


@pytest.fixture(params=SCHEMES)
def real_root(request: pytest.FixtureRequest, server_of: Callable[[str], ObjectServer]) -> Storage:
    """A directory of its own in each real server."""
    return server_of(request.param).place(uuid.uuid4().hex)


@pytest.fixture(scope="session")
def dead_owner() -> Owner:
    """A process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    owner = describe_process(process.pid)
    process.kill()
    process.wait()
    return owner


@pytest.fixture(scope="session")
def live_owner() -> Owner:
    """This process."""
    return describe_process(os.getpid())


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch, live_owner: Owner) -> Callable[[Owner | None], None]:
    """Sets the process that jobs from here on belong to; at first this one."""

    def choose(chosen: Owner | None) -> None:
        for module in ("object_view", "object_commit"):
            monkeypatch.setattr(f"etl.tfrecord.commit.{module}.find_owner", lambda: chosen)

    choose(live_owner)
    return choose


@pytest.fixture
def description() -> OutputManifest:
    return OutputManifest("ByteArray", None, (), {}, (), ())
