"""Servers that speak the protocols of object stores, started for tests on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pyarrow import fs

from etl.tfrecord.files.object_store import Storage

BUCKET = "bucket"
ACCESS_KEY = "key-that-must-not-leak"
SECRET = "s3cr3t-that-must-not-leak"
AWS_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class ObjectServer:
    """A running server, with an empty bucket.

    Attributes:
        scheme: `s3` or `gs`.
        endpoint: Its URL.
    """

    scheme: str
    endpoint: str

    @property
    def settings(self) -> dict[str, str]:
        """The `storage` setting that reaches it."""
        found = {"endpoint_override": self.endpoint}
        return found if self.scheme == "s3" else {**found, "anonymous": "true"}

    @property
    def options(self) -> dict[str, str]:
        """The same as options of the data source."""
        return {f"fs.{name}": value for name, value in self.settings.items()}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that reach it without any setting."""
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": self.endpoint}
        return {**AWS_CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def place(self, name: str) -> Storage:
        """A directory of the bucket, reached by the environment."""
        return Storage(self.scheme, f"{BUCKET}/{name}")


def upload(folder: Path, place: Storage) -> str:
    """Copies what lies in a local folder into a store, and returns the URI of the copy."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        place.put(file.relative_to(folder).as_posix(), file.read_bytes())
    return place.uri


@dataclass(frozen=True)
class _Program:
    variable: str
    command: Callable[[str, int], list[str]]


def _moto(program: str, port: int) -> list[str]:
    return [program, "-p", str(port), "-H", "127.0.0.1"]


def _gcs(program: str, port: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    script = str(Path(__file__).with_name("gcs_emulator.py"))
    python = str(Path(program).with_name("python"))
    return [python, script, "start", *where, "--in-memory", "--default-bucket", BUCKET]


_PROGRAMS = {
    "s3": _Program("SLUICE_MOTO_SERVER", _moto),
    "gs": _Program("SLUICE_GCS_EMULATOR", _gcs),
}
SCHEMES = tuple(_PROGRAMS)


def require_program(scheme: str) -> str:
    """Returns the program of a server; skips the test where it is not on this machine."""
    variable = _PROGRAMS[scheme].variable
    program = os.environ.get(variable)
    if not program:
        pytest.skip(f"{variable} is not set: no server that speaks {scheme}:// to test against")
    return program


@contextmanager
def run_server(scheme: str, **variables: str) -> Iterator[ObjectServer]:
    """Runs a server while the block runs; skips the test where there is none.

    Args:
        scheme: `s3` or `gs`.
        variables: Environment of the server.
    """
    program = require_program(scheme)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(
        _PROGRAMS[scheme].command(program, port),
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port)
        server = ObjectServer(scheme, f"http://127.0.0.1:{port}")
        if scheme == "s3":
            connect(server).create_dir(BUCKET)
        yield server
    finally:
        process.kill()
        process.wait()


def connect(server: ObjectServer) -> fs.FileSystem:
    """The server's file system, as no part of the product reaches it."""
    address = urlsplit(server.endpoint).netloc
    if server.scheme == "gs":
        return fs.GcsFileSystem(anonymous=True, endpoint_override=address, scheme="http")
    return fs.S3FileSystem(
        endpoint_override=address, scheme="http", region="us-east-1", access_key=ACCESS_KEY,
        secret_key=SECRET, allow_bucket_creation=True,
    )  # fmt: skip


def _wait_for(port: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    pytest.fail("the server did not come up")


class Servers:
    """Servers that run from their first use on."""

    def __init__(self, stack: ExitStack) -> None:
        self._run = {scheme: partial(stack.enter_context, run_server(scheme)) for scheme in SCHEMES}
        self._running: dict[str, ObjectServer] = {}

    def get(self, scheme: str) -> ObjectServer:
        """The server of a scheme; skips the test where there is none."""
        if scheme not in self._running:
            require_program(scheme)
            self._running[scheme] = self._run[scheme]()
        return self._running[scheme]
