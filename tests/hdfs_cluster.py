"""A real HDFS on this machine: Hadoop's own cluster in one process, reached without Hadoop."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.recipes import find_java_home

_CLASSPATH = "SLUICE_HDFS_CLASSPATH"
_KERBEROS_CLASSPATH = "SLUICE_KERBEROS_CLASSPATH"


@dataclass(frozen=True)
class HdfsCluster:
    """A running cluster.

    Attributes:
        ports: Of its NameNodes; of two the first is the active one.
        process: It listens to commands, see `HdfsCluster.java`.
    """

    ports: tuple[int, ...]
    process: subprocess.Popen[str]

    @property
    def authority(self) -> str:
        """Host and port of the first NameNode."""
        return f"localhost:{self.ports[0]}"

    @property
    def uri(self) -> str:
        """Of its root."""
        return f"hdfs://{self.authority}"

    def order(self, command: str) -> None:
        """Gives a command, and waits until it is obeyed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n", command

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """It accepts connections in the block, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def require_hdfs() -> None:
    """Skips the test where this machine has no Hadoop for tests, or no client."""
    if not os.environ.get(_CLASSPATH):
        pytest.skip(f"a real HDFS needs {_CLASSPATH}")
    if importlib.util.find_spec("hdfs_native") is None:
        pytest.skip("a real HDFS needs hdfs-native, of the extra `stores`")


@contextmanager
def run_cluster(folder: Path, name_nodes: int = 1) -> Iterator[HdfsCluster]:
    """Starts a cluster for the block; skips the test where this machine has no Hadoop.

    Args:
        folder: Where it keeps its blocks.
        name_nodes: How many, 1 or 2.
    """
    require_hdfs()
    with _run_java("HdfsCluster", os.environ[_CLASSPATH], folder / "dfs", str(name_nodes)) as found:
        yield found


@contextmanager
def run_kerberos_cluster(folder: Path) -> Iterator[HdfsCluster]:
    """Starts a cluster that asks for tickets, and a KDC; skips the test where there is none.

    Args:
        folder: Gets `krb5.conf`, `alice.keytab`, and `tokens`, the delegation token of alice.
    """
    require_hdfs()
    if not os.environ.get(_KERBEROS_CLASSPATH):
        pytest.skip(f"Kerberos needs {_KERBEROS_CLASSPATH}")
    if ctypes.util.find_library("gssapi_krb5") is None:
        pytest.skip("Kerberos needs libgssapi_krb5")
    classpath = os.pathsep.join(map(os.environ.__getitem__, (_CLASSPATH, _KERBEROS_CLASSPATH)))
    with _run_java("KerberosHdfs", classpath, folder) as found:
        yield found


@contextmanager
def _run_java(name: str, classpath: str, folder: Path, *arguments: str) -> Iterator[HdfsCluster]:
    options = ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]  # it lives shortly
    source = Path(__file__).with_name(f"{name}.java")
    java = [find_java_home() / "bin/java", *options, "-cp", classpath, source]
    log_file = folder.parent / f"{folder.name}.log"
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            [*java, folder, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            cwd=folder.parent,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            found = (re.search(r"^listening on (.+)", line) for line in process.stdout)
            ports = next((match[1] for match in found if match), None)
            assert ports is not None, log_file.read_text()[-3000:]
            yield HdfsCluster(tuple(map(int, ports.split())), process)
        finally:
            process.kill()
