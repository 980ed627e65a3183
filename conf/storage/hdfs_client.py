"""HDFS behind the interface of object stores, by `hdfs_native`, which needs no Java and no Hadoop.

HDFS creates and renames in one step, but has no put with a condition. It is made of renames:

.<name>.upload-<nonce>          a file on its way, renamed to its name when it is whole
.<name>.next-<nonce>/<nonce>    the same, of a file that is replaced on a condition
.<name>.after-<version>/<nonce>   what follows on one version of a file, renamed to its name at once

A rename that may not replace lets one writer have the place after a version. Who finds it taken,
a reader too, ends the rename of the one who took it, dead or alive: nobody waits, nothing lapses.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast
from xml.etree import ElementTree

from conf.errors import ConfigError
from conf.storage.store_clients import StoreClient, StoredObject, Upload, Version, open_ranges

T = TypeVar("T")

_CONNECT_S = 10.0
_ANSWER_S = 90.0
"""The library tries again for up to a minute; a NameNode that hangs it would wait for forever."""
_SAFE_MODE_S = 45.0
_PAUSE_S = 1.0
_ATTEMPTS = "dfs.client.failover.max.attempts"
_RETRIES = "7"  # With the library's pauses, which double, about a minute.
_LOOKS = 20
_STALE_MS = 24 * 3600 * 1000
_WRITE_BYTES = 4 << 20
_SMALL_BYTES = 1 << 20
"""What is replaced on a condition and looked at before it is read, a pointer, is not longer."""
_UNFINISHED = re.compile(r"\.(.+)\.(upload|next|after)-[0-9a-f]{32}")
_ERROR = re.compile(
    r'RPCError\("(?:[\w.$]*\.)?([\w$]+)", "(.*?)(?:\\n|"\))|GSSAPIError\(.*, "(.*?)"\)', re.DOTALL
)
_DATA_NODE = re.compile(r'ip_addr: \\?"([^"\\]+)\\?",.*?xfer_port: (\d+)', re.DOTALL)


def _ask(call: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
    """Asks HDFS, and waits while it is in safe mode, as it is for a while after its start."""
    end = time.monotonic() + _SAFE_MODE_S
    while True:
        try:
            return _ask_once(call, arguments, limit_s or _ANSWER_S)
        except OSError as error:
            if "SafeModeException" not in str(error) or time.monotonic() > end:
                raise
        time.sleep(_PAUSE_S)


def _ask_once(call: Callable[..., T], arguments: tuple[Any, ...], limit_s: float) -> T:
    """Asks in a thread of its own: the library's calls cannot be ended, but left alone."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:  # a panic of Rust is no Exception
            answer.set_exception(error)

    thread = threading.Thread(target=work, name="hdfs", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not answer.done():
        raise OSError(f"no answer within {limit_s:.0f} s")
    if (error := answer.exception()) is None:
        return answer.result()
    kind = type(error) if isinstance(error, OSError) else OSError
    raise kind(_explain(str(error))) from error


def _explain(text: str) -> str:
    if "All DataNodes failed" in text:
        nodes = ", ".join(":".join(found) for found in _DATA_NODE.findall(text)) or "none is left"
        return f"no DataNode gives a block whole: it is damaged, or they are away ({nodes})"
    if "All nodes failed for write" in text:
        return "no DataNode takes a block: they do not answer, or have no room"
    if (found := _ERROR.search(text)) is None:
        return text.partition("\n")[0]
    return f"Kerberos: {found[3]}" if found[3] else f"{found[1]}: {found[2]}"


def find_default_node() -> str:
    """Returns the NameNode or name service that Hadoop's configuration makes the default."""
    home = os.environ.get("HADOOP_HOME")
    folder = os.environ.get("HADOOP_CONF_DIR") or (f"{home}/etc/hadoop" if home else None)
    found = _read_default(Path(folder) / "core-site.xml") if folder else "no HADOOP_CONF_DIR"
    if (node := re.fullmatch(r"hdfs://([^/@$]+)/?", found)) is not None:
        return node[1]
    raise ConfigError(
        "hdfs:///<path> needs a default NameNode in Hadoop's configuration",
        received=found,
        allowed="fs.defaultFS: hdfs://<host>:<port>, or the name of a name service",
        fix="set HADOOP_CONF_DIR to the folder of core-site.xml, or write hdfs://<host>:<port>/…",
    )


def _read_default(file: Path) -> str:
    try:
        root = ElementTree.parse(file).getroot()  # noqa: S314 - the own file of who runs this
    except (OSError, ElementTree.ParseError) as error:
        return f"{file}: {error}"
    found = {p.findtext("name", "").strip(): p.findtext("value", "") for p in root.iter("property")}
    return found.get("fs.defaultFS", found.get("fs.default.name", f"none in {file}")).strip()


def connect_hdfs(authority: str) -> HdfsClient:
    """Reaches a NameNode, once and for a short time: a wrong address is said at once."""
    import hdfs_native

    uri = f"hdfs://{authority}"

    def look() -> object:
        return hdfs_native.Client(uri, {_ATTEMPTS: "1"}).get_file_info("/")

    try:
        _ask(look, limit_s=_CONNECT_S)
    except OSError as error:
        raise OSError(f"the NameNode does not answer: {error}") from error
    return HdfsClient(hdfs_native.Client(uri, {_ATTEMPTS: _RETRIES}))


class HdfsClient(StoreClient):
    """A NameNode's files."""

    def __init__(self, client: Any) -> None:
        self.native = client

    def head(self, path: str) -> StoredObject | None:
        status = self._find(path)
        if status is None or status.isdir:
            return None
        if (
            status.length <= _SMALL_BYTES
            and self._find(_name_after(path, _state(status))) is not None
        ):
            with contextlib.suppress(FileNotFoundError):
                self.get(path)
            status = self._status(path)
        return _describe(status)

    def list_below(self, folder: str) -> Iterator[tuple[str, StoredObject]]:
        """Gives the path of each file below a folder; of those on their way, none."""
        start = len(folder) + 1 if folder else 0
        for path, status in self._list(folder, is_recursive=True):
            is_shown = not any(map(_UNFINISHED.fullmatch, path[start:].split("/")))
            if not status.isdir and path != folder and is_shown:
                yield path, _describe(status)

    def list_folders(self, folder: str) -> Iterator[str]:
        for path, status in self._list(folder):
            if status.isdir and not _UNFINISHED.fullmatch(path.rpartition("/")[2]):
                yield path

    def get(self, path: str) -> tuple[bytes, Version]:
        """Reads a file as it is at one moment; ends a replacement that is under way, or was."""
        status, data = self._get(path)
        for _ in range(_LOOKS):
            if self._find(after := _name_after(path, _state(status))) is None:
                break
            try:
                self._finish(path, after, _version(status, data))
            except OSError:  # Who may only read finds what is there.
                break
            status, data = self._get(path)
        return data, _version(status, data)

    def open_input(self, path: str) -> BinaryIO:
        file = _ask(self.native.read, f"/{path}")

        def fetch(start: int, length: int) -> bytes:
            return _ask(cast("Callable[..., bytes]", file.read_range), start, length)

        return open_ranges(len(file), fetch)

    def put(self, path: str, data: bytes, over: Version | Literal["any"] | None) -> None:
        if over is not None and over != "any":
            self._replace(path, data, over)
            return
        upload = _HdfsUpload(self, path, replaces=over == "any")
        upload.write(data)
        upload.close()

    def open_output(self, path: str) -> Upload:
        return _HdfsUpload(self, path, replaces=True)

    def move(self, source: str, target: str) -> None:
        self._make_folder(target)
        try:
            self.rename(source, target, replaces=True)
        except FileNotFoundError:  # an answer got lost
            if self.head(target) is None:
                raise

    def delete(self, path: str, within: str) -> None:
        """Deletes a file, if it is there, and the folders that are empty then."""
        with contextlib.suppress(FileNotFoundError):
            _ask(self.native.delete, f"/{path}", False)
        folder = path.rpartition("/")[0]
        while folder.startswith(f"{within}/") and self._remove_empty(folder):
            folder = folder.rpartition("/")[0]

    def move_folder(self, source: str, target: str) -> bool:
        self._make_folder(target)
        with contextlib.suppress(FileNotFoundError):  # It was moved before.
            self.info(source)
            self.remove_folder(target)
            self.rename(source, target)
        return True

    def remove_folder(self, folder: str) -> bool:
        """Removes a folder with all in it, in one step; the root stays."""
        if folder:
            with contextlib.suppress(FileNotFoundError):
                _ask(self.native.delete, f"/{folder}", True)
        return bool(folder)

    def remove_uploads(self, folder: str, held: str) -> None:
        found = [path for path, _ in self._list(folder, is_recursive=True)]
        theirs = {path.removesuffix(held) for path in found if path.endswith(f"/{held}")}
        for path in found:
            parts = _UNFINISHED.fullmatch(path.rpartition("/")[2])
            is_theirs = path.startswith(tuple(theirs - {f"{folder}/"}))
            if parts is not None and parts[2] == "upload" and not is_theirs:
                self.delete(path, folder)

    def create(self, path: str) -> Any:
        """Opens a file whose name nobody else has: one is there of a call whose answer got lost."""
        import hdfs_native

        options = hdfs_native.WriteOptions(create_parent=True, overwrite=True)
        return _ask(self.native.create, f"/{path}", options)

    def rename(self, source: str, target: str, *, replaces: bool = False) -> None:
        _ask(self.native.rename, f"/{source}", f"/{target}", replaces)

    def info(self, path: str) -> Any:
        return _ask(self.native.get_file_info, f"/{path}")

    def _make_folder(self, path: str) -> None:
        _ask(self.native.mkdirs, f"/{path.rpartition('/')[0]}", 0o755, True)

    def _get(self, path: str) -> tuple[Any, bytes]:
        for _ in range(_LOOKS):
            before = self._status(path)
            try:
                data = _ask(lambda: cast(bytes, self.native.read(f"/{path}").read()))
            except OSError:
                if _state(self._status(path)) == _state(before):
                    raise
                continue
            if _state(self._status(path)) == _state(before):
                return before, data
        raise OSError(f"/{path} is replaced faster than it can be read")

    def _status(self, path: str) -> Any:
        status = self.info(path)
        if status.isdir:
            raise FileNotFoundError(f"/{path} is a folder")
        return status

    def _find(self, path: str) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return self.info(path)

    def _list(self, folder: str, *, is_recursive: bool = False) -> list[tuple[str, Any]]:
        for _ in range(_LOOKS):
            try:
                found = _ask(lambda: list(self.native.list_status(f"/{folder}", is_recursive)))
                return [(status.path.strip("/"), status) for status in found]
            except FileNotFoundError:  # it, or a folder below it that has gone meanwhile
                if self._find(folder) is None:
                    return []
        raise OSError(f"/{folder} changes while it is listed")

    def _remove_empty(self, folder: str) -> bool:
        with contextlib.suppress(OSError):  # it is not empty, or not ours to remove
            return _ask(cast("Callable[..., bool]", self.native.delete), f"/{folder}", False)
        return False

    def _replace(self, path: str, data: bytes, over: Version) -> None:
        """Replaces a file that is of a version."""
        nonce = uuid.uuid4().hex
        aside = _name(path, "next", nonce)
        after = _name_after(path, f"{over.get('mtime_ms')}/{over.get('bytes')}")
        file = self.create(f"{aside}/{nonce}")
        if data:
            _ask(file.write, data)
        _ask(file.close)
        ours = _version(self._status(f"{aside}/{nonce}"), data)
        try:
            self.rename(aside, after)
        except FileNotFoundError:  # An answer got lost; what is there is looked at below.
            pass
        except FileExistsError:
            self._finish(path, after, over)
            self.remove_folder(aside)
            raise
        # Once it has been seen here, only the one who has its place can follow on it.
        if not self._is_at(path, over):
            if self._is_at(path, ours):  # another one has ended it
                return
            self.remove_folder(after)
            raise FileExistsError(f"/{path} has been replaced meanwhile")
        self._finish(path, after, over)
        self._sweep(path)

    def _finish(self, path: str, after: str, over: Version) -> None:
        """Gives the file in the place after a version its name, if it is still its turn."""
        for found, _ in self._list(after):
            # In this order: who has the place while the version is there is the one to follow.
            if not self._is_at(path, over):
                return
            with contextlib.suppress(FileNotFoundError):  # another one did it
                self.rename(found, path, replaces=True)
        self._remove_empty(after)

    def _is_at(self, path: str, version: Version) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return _version(*self._get(path)) == version
        return False

    def _sweep(self, path: str) -> None:
        """Removes what killed writers of a file have left of conditions."""
        folder, _, name = path.rpartition("/")
        found = [(left, status) for left, status in self._list(folder) if status.isdir]
        # Read after the listing: a file is never of a version again that it has had.
        current = self._find(path)
        for left, status in found if current is not None else ():
            parts = _UNFINISHED.fullmatch(left.rpartition("/")[2])
            kind = parts[2] if parts is not None and parts[1] == name else ""
            age_ms = current.modification_time - status.modification_time
            is_passed = kind == "after" and left != _name_after(path, _state(current))
            if is_passed or (kind == "next" and age_ms > _STALE_MS):
                self.remove_folder(left)


class _HdfsUpload:
    """A file on its way; it has its name when it is closed."""

    def __init__(self, client: HdfsClient, path: str, *, replaces: bool) -> None:
        self._client, self._path, self._replaces = client, path, replaces
        self._unfinished = _name(path, "upload", uuid.uuid4().hex)
        self._pending = bytearray()
        self._file = client.create(self._unfinished)
        self._is_open = True

    def write(self, data: Any, /) -> None:
        self._pending += memoryview(data).cast("B")
        if len(self._pending) >= _WRITE_BYTES:
            with self._failing():
                self._send()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with self._failing():
            self._send()
            _ask(self._file.close)
            self._place(self._client.info(self._unfinished))

    def _send(self) -> None:
        data = bytes(self._pending)
        self._pending.clear()
        if data:
            _ask(self._file.write, data)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Removes what is there of the file if the block fails; the next lease does, if not."""
        try:
            yield
        except BaseException:
            self._is_open = False
            with contextlib.suppress(OSError):
                _ask_once(self._client.native.delete, (f"/{self._unfinished}", False), _CONNECT_S)
            raise

    def _place(self, before: Any) -> None:
        try:
            self._client.rename(self._unfinished, self._path, replaces=self._replaces)
        except FileNotFoundError:
            if _state(self._client.info(self._path)) != _state(before):  # else an answer got lost
                raise
        except OSError as error:
            if "must both be directories" not in str(error):
                raise
            raise IsADirectoryError(f"/{self._path} is a folder, not a file") from error


def _name(path: str, kind: str, nonce: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{kind}-{nonce}"


def _name_after(path: str, state: str) -> str:
    return _name(path, "after", hashlib.sha256(state.encode()).hexdigest()[:32])


def _state(status: Any) -> str:
    return f"{status.modification_time}/{status.length}"


def _version(status: Any, data: bytes) -> Version:
    return {
        "mtime_ms": str(status.modification_time),
        "bytes": str(status.length),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def _describe(status: Any) -> StoredObject:
    return StoredObject(status.length, status.modification_time * 1_000_000)
