"""A standalone cluster on this machine. Its workers have no Sluice: the code comes by archive."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from etl.build import build_dataset
from jobs.support.java_runtime import ensure_java
from sluice_recsys import PACKAGES
from tests.etl.logs import build_config, write_logs
from tests.etl.tfrecord.faults.conftest import parent_jvm, wait_for_writers
from tests.training.processes import find_addresses

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
ROOT = Path(__file__).parents[2]
ROWS = 40_000


@dataclass
class Cluster:
    """A master with two workers of one core each.

    Attributes:
        master: Its URL.
        python: What the workers run; it can import all that this one can, but Sluice.
        folder: Where the daemons write.
        started: Daemons and commands; each leads a group with all that it started.
    """

    master: str
    python: Path
    folder: Path
    started: list[subprocess.Popen[Any]]

    def start(self, name: str, *arguments: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        command = [Path(pyspark.__path__[0]) / "bin" / "spark-class", *arguments]
        # Workers shall find nothing of this checkout in their environment.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["SPARK_NO_DAEMONIZE"] = "1"
        output = {"stdout": log, "stderr": log, "cwd": self.folder, "start_new_session": True}
        self.started.append(subprocess.Popen(command, env=environment, **output))
        self.wait(name, "Successfully registered with master|I have been elected leader")

    def wait(self, name: str, pattern: str) -> None:
        end = time.monotonic() + 600
        while not any(p in (self.folder / f"{name}.log").read_text() for p in pattern.split("|")):
            assert time.monotonic() < end, (self.folder / f"{name}.log").read_text()[-3000:]
            assert self.started[-1].poll() is None, (self.folder / f"{name}.log").read_text()
            time.sleep(0.1)

    def start_worker(self, name: str) -> None:
        self.start(
            name, "org.apache.spark.deploy.worker.Worker", self.master, "--host", "127.0.0.1",
            "--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / "work" / name),
        )  # fmt: skip

    def run(self, *command: str | Path) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": str(self.python),
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        place = {"cwd": self.folder, "start_new_session": True}
        process = subprocess.Popen([*map(str, command)], env=environment, **pipes, **place)
        self.started.append(process)
        return process

    def kill(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def make_bare_python(folder: Path) -> Path:
    """Makes an environment with the packages of this one, but without Sluice."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    target = next(folder.glob("lib/python*/site-packages"))
    for packages in site.getsitepackages():
        for entry in Path(packages).iterdir():
            own = entry.stem in PACKAGES or "sluice" in entry.name or entry.suffix == ".pth"
            if not own and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-I", "-c", "import numba, etl"], capture_output=True, text=True
    )
    assert "No module named 'etl'" in found.stderr
    return python


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    ensure_java()
    folder = tmp_path_factory.mktemp("cluster")
    (address,) = find_addresses(1)
    host, _, port = address.partition(":")
    made = Cluster(f"spark://{address}", make_bare_python(folder / "python"), folder, [])
    try:
        master = ("org.apache.spark.deploy.master.Master", "--host", host, "--port", port)
        made.start("master", *master, "--webui-port", "0")
        made.start_worker("first")
        made.start_worker("second")
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel under the name by which Spark takes it for an archive."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT, folder / "code",
        ignore=lambda path, names: [
            name for name in names
            if Path(path) == ROOT and name not in PACKAGES and Path(name).suffix in ("", ".md")
            and name not in ("README.md", "LICENSE")
        ] + ["__pycache__"],
    )  # fmt: skip
    wheel = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, folder / "code"]
    subprocess.run([sys.executable, "-m", "pip", *wheel], check=True)
    return next(folder.glob("*.whl")).rename(folder / "sluice.zip")


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory: pytest.TempPathFactory) -> BuildConfig:
    """A build in the suite's session, and its config."""
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = [f"{1 + n % 3}::{10 + n * 7 % 5}::{1 + n % 5}::{n}" for n in range(ROWS)]
    config = build_config(write_logs(folder / "logs", lines), folder / "datasets")
    build_dataset(spark, config)
    return config


def checksums(config: BuildConfig, root: Path | None = None) -> dict[str, tuple[int, str | None]]:
    version = resolve_version((root or Path(config.output.root)) / config.name)
    splits = read_manifest(version).splits
    return {shard.path: (shard.rows, shard.crc32c) for split in splits for shard in split.shards}


def write_config(config: BuildConfig, folder: Path) -> list[str]:
    """Writes a config; returns the arguments of its build into a folder."""
    file = folder / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    return [str(file), "--set", f"output.root={folder / 'datasets'}"]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for a command and returns what it printed; spark-submit prints its errors there too."""
    out, error = process.communicate(timeout=600)
    log = "\n".join(line for line in error.splitlines() if " INFO " not in line)
    assert process.returncode == code, out[-2000:] + log[-4000:]
    return out


def submit(cluster: Cluster, *arguments: str | Path) -> subprocess.Popen[str]:
    command = (Path(sys.executable).with_name("spark-submit"), "--master", cluster.master)
    memory = ("--executor-memory", "512m", "--conf", "spark.ui.enabled=false")
    few = ("--conf", "spark.sql.shuffle.partitions=4")
    return cluster.run(*command, *memory, *few, *arguments)


def test_a_build_by_archive_is_the_same_and_names_its_event_log(
    cluster, archive, undisturbed, tmp_path
):
    build, events = write_config(undisturbed, tmp_path), tmp_path / "events"
    events.mkdir()
    conf = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri()}
    log = ("--set", f"spark={json.dumps(conf)}")
    done = submit(cluster, "--py-files", archive, ROOT / "jobs/build_dataset.py", *build, *log)
    finish(done)
    assert checksums(undisturbed, tmp_path / "datasets") == checksums(undisturbed)
    spark = read_manifest(resolve_version(tmp_path / "datasets" / "small")).spark
    assert Path(spark["event_log"].removeprefix("file:")).samefile(events)
    [written] = events.iterdir()
    assert spark["application"] in written.name
    files = [written] if written.is_file() else list(written.iterdir())
    assert sum(file.stat().st_size for file in files) > 10_000  # It is compressed.


def test_executors_without_the_archive_are_a_fault_of_the_command(cluster, undisturbed, tmp_path):
    build = write_config(undisturbed, tmp_path)
    told = finish(submit(cluster, ROOT / "jobs/build_dataset.py", *build), code=2)
    assert "executors cannot import Sluice" in told
    assert "--py-files" in told
    assert not list((tmp_path / "datasets").glob("small/versions/*"))


def test_a_worker_that_is_killed_in_mid_write_changes_no_byte(cluster, undisturbed, tmp_path):
    """Sluice starts the session, and ships its own code."""
    build = write_config(undisturbed, tmp_path)
    master = ("--set", f"spark.master={cluster.master}")
    small = ("--set", "spark.executor.memory=512m", "--set", "spark.driver.memory=1g")
    process = cluster.run(sys.executable, "-m", "jobs.cli", "build", *build, *master, *small)
    versions = tmp_path / "datasets" / "small" / "versions"
    staging = wait_for(lambda: next(versions.glob(".staging-*"), None), process)
    wait_for(lambda: next(staging.glob("_temporary-*"), None), process)
    writer = wait_for_writers(staging)[0]
    os.kill(writer, signal.SIGSTOP)  # in mid-write, for sure; it goes on when it is an orphan
    worker = os.getpgid(parent_jvm(writer))
    assert worker in {process.pid for process in cluster.started}
    os.killpg(worker, signal.SIGKILL)
    time.sleep(2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(writer, signal.SIGCONT)
    finish(process)
    assert checksums(undisturbed, tmp_path / "datasets") == checksums(undisturbed)
    left = [path.name for path in versions.rglob("*") if path.name.startswith(("_temp", ".stag"))]
    assert not left
    cluster.start_worker("third")


def wait_for(look: Callable[[], Path | None], process: subprocess.Popen[str]) -> Path:
    while (found := look()) is None:
        assert process.poll() is None, process.stderr and process.stderr.read()[-3000:]
        time.sleep(0.005)
    return found


def test_training_workers_and_predictions_run_by_archive(cluster, archive, tmp_path):
    from tests.training.tiny_dataset import write_tiny_dataset

    version = write_tiny_dataset(tmp_path)
    settings = {"root": tmp_path / "runs", "name": "t", "model.name": "mf", "fit.epochs": 1}
    settings |= {"model.embedding_dim": 4, "input.batch_size": 64}
    launch = ("--launcher", "spark", "--workers", "2", "--dataset", version)
    values = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    train = (ROOT / "jobs/train.py", *launch, *values)
    told = finish(submit(cluster, *train), code=2)
    assert "executors cannot import Sluice" in told
    finish(submit(cluster, "--py-files", archive, *train))
    run = resolve_run(str(tmp_path / "runs" / "t"))
    card = read_json(run / "run_card.json")
    assert (card["devices"]["strategy"], card["devices"]["workers"]) == ("multi_worker", 2)
    assert (run / "report.html").is_file()
    for command in (("export", "--to", tmp_path / "models"), ("predict",)):
        finish(cluster.run(sys.executable, "-m", "jobs.cli", *command, "--run", run))
    options = ("--engine", "spark", "--export", tmp_path / "models", "--to", tmp_path / "lists")
    finish(submit(cluster, "--py-files", archive, ROOT / "jobs/predict.py", *options))
    parts = sorted((tmp_path / "lists").glob("part-*"))
    lists = b"".join(gzip.decompress(part.read_bytes()) for part in parts)
    assert lists == gzip.decompress((run / "recommendations.json.gz").read_bytes())
