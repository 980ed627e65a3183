"""Servers that speak the protocols of object stores, started for tests on this machine."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conf.storage.object_store import Storage
from tests.gcs_emulator import run_front
from tests.hdfs_cluster import require_hdfs, run_cluster

BUCKET = "bucket"
ACCESS_KEY = "key-that-must-not-leak"
SECRET = "s3cr3t-that-must-not-leak"
AWS_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
}
# Those that the emulator is documented to have.
ACCOUNT = "devstoreaccount1"
AZURE_CREDENTIALS = {
    "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/"
    "K1SZFPTOtr/KBHBeksoGMGw==",
}
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class ObjectServer:
    """A running server, with an empty bucket.

    Attributes:
        scheme: `s3`, `gs`, `az` or `hdfs`.
        endpoint: Its URL.
    """

    scheme: str
    endpoint: str

    @property
    def base(self) -> str:
        """The first part of its paths: the bucket, or the NameNode."""
        return self.endpoint.removeprefix("hdfs://") if self.scheme == "hdfs" else BUCKET

    @property
    def settings(self) -> dict[str, str]:
        """The `storage` setting that reaches it."""
        if self.scheme == "hdfs":
            return {}
        more = {"gs": {"anonymous": "true"}, "az": {"account": ACCOUNT}}
        return {"endpoint_override": self.endpoint, **more.get(self.scheme, {})}

    @property
    def options(self) -> dict[str, str]:
        """The same as options of the data source."""
        return {f"fs.{name}": value for name, value in self.settings.items()}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that reach it without any setting."""
        if self.scheme == "hdfs":
            return {}
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": self.endpoint}
        if self.scheme == "az":
            return {**AZURE_CREDENTIALS, "AZURE_STORAGE_ENDPOINT": self.endpoint}
        return {**AWS_CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def place(self, name: str) -> Storage:
        """A directory of the bucket, reached by the environment."""
        return Storage(self.scheme, f"{self.base}/{name}")


def upload(folder: Path, place: Storage) -> str:
    """Copies what lies in a local folder into a store, and returns the URI of the copy."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        place.put(file.relative_to(folder).as_posix(), file.read_bytes())
    return place.uri


@dataclass(frozen=True)
class _Program:
    variable: str
    name: str
    command: Callable[[str, int], list[str]]


# One request at a time: moto looks at the condition of a put before it puts.
_MOTO = """
import moto.server
run = moto.server.run_simple
moto.server.run_simple = lambda *args, **more: run(*args, **{**more, "threaded": False})
moto.server.main()
"""


def _moto(program: str, port: int) -> list[str]:
    python = str(Path(program).resolve().with_name("python"))
    return [python, "-c", _MOTO, "-p", str(port), "-H", "127.0.0.1"]


def _gcs(program: str, port: int) -> list[str]:
    where = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    return [program, "-scheme", "http", "-backend", "memory", *where]


def _azurite(program: str, port: int) -> list[str]:
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    return [program, *where, "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]


_PROGRAMS = {
    "s3": _Program("SLUICE_MOTO_SERVER", "moto_server", _moto),
    "gs": _Program("SLUICE_GCS_EMULATOR", "fake-gcs-server", _gcs),
    "az": _Program("SLUICE_AZURITE", "azurite-blob", _azurite),
}
BUCKET_SCHEMES = tuple(_PROGRAMS)
SCHEMES = (*BUCKET_SCHEMES, "hdfs")


def require_program(scheme: str) -> str:
    """Returns the program of a server; skips the test where it is not on this machine."""
    if scheme == "hdfs":
        require_hdfs()
        return "java"
    wanted = _PROGRAMS[scheme]
    program = os.environ.get(wanted.variable)
    if not program:
        pytest.skip(f"{wanted.variable} names no {wanted.name} to test {scheme}:// against")
    return program


@contextmanager
def _run_hdfs() -> Iterator[ObjectServer]:
    with tempfile.TemporaryDirectory() as folder, run_cluster(Path(folder)) as cluster:
        yield ObjectServer("hdfs", cluster.uri)


@contextmanager
def run_server(scheme: str, **variables: str) -> Iterator[ObjectServer]:
    """Runs a server while the block runs; skips the test where there is none.

    Args:
        scheme: `s3`, `gs` or `az`.
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
        if scheme == "gs":
            port = run_front(port).server_address[1]
        base = f"http://127.0.0.1:{port}"
        server = ObjectServer(scheme, f"{base}/{ACCOUNT}" if scheme == "az" else base)
        _make_bucket(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _make_bucket(server: ObjectServer) -> None:
    """Makes it by a request of our own: no library of the product can."""
    url = f"{server.endpoint}/{BUCKET}" + ("?restype=container" if server.scheme == "az" else "")
    headers = _sign_container(urlsplit(url).path) if server.scheme == "az" else {}
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


def put_for_everybody(server: ObjectServer, key: str, data: bytes) -> None:
    """Puts an object that S3 gives to who shows no credentials; elsewhere the bucket does."""
    if server.scheme != "s3":
        return Storage(server.scheme, BUCKET).put(key, data)
    url = f"{server.endpoint}/{BUCKET}/{key}"
    headers = {"x-amz-acl": "public-read", "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data, method="PUT", headers=headers)
    return urllib.request.urlopen(request).close()


def _sign_container(path: str) -> dict[str, str]:
    """Headers of the request that makes a container whose blobs anybody may read."""
    headers = {
        "x-ms-blob-public-access": "container",
        "x-ms-date": email.utils.formatdate(usegmt=True),
        "x-ms-version": "2021-08-06",
    }
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + lines + f"/{ACCOUNT}{path}\nrestype:container"
    key = base64.b64decode(AZURE_CREDENTIALS["AZURE_STORAGE_ACCOUNT_KEY"])
    digest = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    return {**headers, "Authorization": f"SharedKey {ACCOUNT}:{digest}"}


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
        servers = {scheme: run_server(scheme) for scheme in BUCKET_SCHEMES} | {"hdfs": _run_hdfs()}
        self._run = {name: partial(stack.enter_context, run) for name, run in servers.items()}
        self._running: dict[str, ObjectServer] = {}

    def get(self, scheme: str) -> ObjectServer:
        """The server of a scheme; skips the test where there is none."""
        if scheme not in self._running:
            require_program(scheme)
            self._running[scheme] = self._run[scheme]()
        return self._running[scheme]
