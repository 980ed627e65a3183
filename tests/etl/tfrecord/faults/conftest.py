"""Spark drivers that may be killed, and what must hold of their output afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.commit.output_directory import read_output_manifest
from tests.tfrecord_files import read_records

REPOSITORY = Path(__file__).parents[4]
HIDDEN_PREFIXES = ("_temporary-", "_publishing-", "_replaced-", ".")


class Driver:
    """A driver process of `driver.py`, or of another script that talks like it."""

    def __init__(self, master: str, home: Path, script: Path | None = None) -> None:
        # A Spark home of its own: workers of a local cluster write below it.
        home.mkdir()
        for entry in Path(pyspark.__path__[0]).iterdir():
            (home / entry.name).symlink_to(entry)
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(home),
            "SPARK_SCALA_VERSION": "2.13",
        }
        script = script or Path(__file__).with_name("driver.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), master],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment, start_new_session=True, cwd=home.parent,
        )  # fmt: skip

    def wait_ready(self) -> Driver:
        assert self.receive() == {"ready": True}
        return self

    def send(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the driver has ended")

    def run(self, **job: Any) -> dict[str, Any]:
        self.send(**job)
        return self.receive()

    def kill(self) -> None:
        """Ends the driver at once: its Python process and its JVM, and all that hang on them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def wait_for_orphans(self) -> None:
        """Waits until the Python workers of a killed driver have ended: they write until then."""
        end = time.monotonic() + 300
        while session_has_processes(self.process.pid):
            assert time.monotonic() < end, "workers of a killed driver still run"
            time.sleep(0.05)


def session_has_processes(session: int) -> bool:
    """Whether any process belongs to a session of the system that a driver started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                return True
    return False


@pytest.fixture(scope="session")
def start_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    """Starts drivers, and ends them with the tests."""
    drivers: list[Driver] = []

    def start(master: str) -> Driver:
        drivers.append(Driver(master, tmp_path_factory.mktemp("home") / "spark"))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()


@pytest.fixture(scope="session")
def local_driver(start_driver) -> Driver:
    """A driver that runs a failed task up to four times."""
    return start_driver("local[2,4]").wait_ready()


def find_writers(root: Path) -> list[int]:
    """Processes that hold an unfinished shard below a directory open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                target = str(descriptor.readlink())
                if target.startswith(f"{root}/_temporary-") and target.endswith(".tmp"):
                    found.append(int(process.name))
                    break
    return found


def wait_for_writers(
    root: Path, timeout_s: float = 300, without: Collection[int] = ()
) -> list[int]:
    """Waits until tasks, in other processes than some, are in the middle of a write."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        writers = [pid for pid in find_writers(root) if pid not in without]
        if writers:
            return writers
        time.sleep(0.02)
    raise AssertionError(f"no task began to write in {root}")


def parent_jvm(pid: int) -> int:
    """The executor, or local driver, that a Python worker belongs to."""
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def pause(seconds: float) -> None:
    """Waits for a random time up to a limit."""
    time.sleep(random.uniform(0, seconds))


def check_output(root: Path, rows: int) -> None:
    """Every row once, the manifest true to the byte, and nothing left of any attempt."""
    committed = read_output_manifest(root)
    assert committed is not None
    payloads: list[bytes] = []
    for shard in committed.shards:
        data = (root / shard.path).read_bytes()
        assert (len(data), f"{crc32c(data):08x}") == (shard.bytes, shard.crc32c)
        records = list(read_records(root / shard.path))
        assert len(records) == shard.rows
        payloads += records
    assert len(payloads) == rows
    assert len(set(payloads)) == rows
    assert (root / "_SUCCESS").exists()
    names = {path.name for path in root.iterdir()}
    assert names == {"_SUCCESS", "_sluice_commit.json"} | {
        shard.path.split("/")[0] for shard in committed.shards
    }
