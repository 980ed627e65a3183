"""A real HDFS for tests: Hadoop's own NameNode and DataNode, in a process of their own.

It needs what no Python package brings: `SLUICE_HDFS_CLASSPATH`, the jars of
`org.apache.hadoop:hadoop-client-minicluster`, and for the client `ARROW_LIBHDFS_DIR` (the folder of
`libhdfs.so`), `JAVA_HOME` and `CLASSPATH`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_NEEDED = ("SLUICE_HDFS_CLASSPATH", "ARROW_LIBHDFS_DIR", "JAVA_HOME", "CLASSPATH")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class HdfsCluster:
    """A running cluster.

    Attributes:
        port: Of the NameNode.
    """

    port: int

    @property
    def uri(self) -> str:
        """Of its root."""
        return f"hdfs://localhost:{self.port}"

    def run(
        self, *command: str, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python in a process of its own: Java never leaves the one that has loaded it.

        Args:
            command: Arguments of the interpreter.
            code: Exit code that is expected.
            environment: Variables to set.
        """
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, cwd=_ROOT, check=False,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **environment},
        )  # fmt: skip
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done

    def upload(self, local: Path, path: str) -> str:
        """Copies a directory into it; returns its URI."""
        text = (
            "import sys\nfrom pyarrow import fs\n"
            "there, _ = fs.FileSystem.from_uri(sys.argv[1])\n"
            "there.create_dir(sys.argv[3])\n"
            "fs.copy_files(sys.argv[2], sys.argv[3], fs.LocalFileSystem(), there)\n"
        )
        self.run("-c", text, f"{self.uri}/", str(local), path)
        return f"{self.uri}{path}"


@contextmanager
def run_cluster(folder: Path) -> Iterator[HdfsCluster]:
    """Starts a cluster for the block; skips the test where this machine has no Hadoop.

    Args:
        folder: Where it keeps its blocks.
    """
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"a real HDFS needs {', '.join(missing)}")
    java = str(Path(os.environ["JAVA_HOME"], "bin", "java"))
    source = str(Path(__file__).with_name("MiniCluster.java"))
    classes = os.environ["SLUICE_HDFS_CLASSPATH"]
    with (
        (folder / "cluster.log").open("w") as log,
        subprocess.Popen(
            [java, "-Xmx512m", "-cp", classes, source, str(folder / "dfs")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            found = (re.search(r"^listening on (\d+)", line) for line in process.stdout)
            port = next((int(match[1]) for match in found if match), None)
            assert port is not None, (folder / "cluster.log").read_text()[-3000:]
            yield HdfsCluster(port)
        finally:
            process.kill()
