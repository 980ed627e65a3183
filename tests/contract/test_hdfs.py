"""Datasets and TFRecords in a real HDFS are read as those on disk are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.recipes import find_java_home

_NEEDED = ("SLUICE_HDFS_CLASSPATH", "SLUICE_LIBHDFS_FOLDER")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class HdfsCluster:
    """A running cluster.

    Attributes:
        port: Of the NameNode.
        client: Variables by which Arrow finds Hadoop's client.
    """

    port: int
    client: dict[str, str]

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
            env={**os.environ, "PYTHONPATH": str(_ROOT), **self.client, **environment},
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
    home = find_java_home()
    source = str(Path(__file__).with_name("MiniCluster.java"))
    classes, libhdfs = (os.environ[name] for name in _NEEDED)
    client = {"JAVA_HOME": str(home), "CLASSPATH": classes, "ARROW_LIBHDFS_DIR": libhdfs}
    with (
        (folder / "cluster.log").open("w") as log,
        subprocess.Popen(
            [home / "bin/java", "-Xmx512m", "-cp", classes, source, folder / "dfs"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            found = (re.search(r"^listening on (\d+)", line) for line in process.stdout)
            port = next((int(match[1]) for match in found if match), None)
            assert port is not None, (folder / "cluster.log").read_text()[-3000:]
            yield HdfsCluster(port, client)
        finally:
            process.kill()


SETTINGS = (
    "model.name=dssm", "model.embedding_dim=8", "input.batch_size=64", "input.shuffle_buffer=100",
    "fit.epochs=1", "evaluation.sampled_negatives=10", "name=t",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with run_cluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


@pytest.fixture(scope="module")
def dataset(cluster: HdfsCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A dataset on disk, and its copy there."""
    from tests.training.tiny_dataset import write_tiny_dataset

    local = write_tiny_dataset(tmp_path_factory.mktemp("datasets")).parent.parent
    return local, cluster.upload(local, "/datasets/tiny")


def command(path: str, root: Path, *more: str) -> tuple[str, ...]:
    settings = [part for item in (*SETTINGS, f"root={root}") for part in ("--set", item)]
    return "-m", "jobs.cli", "train", "--dataset", path, *settings, "--no-report", *more


def train(cluster: HdfsCluster, path: str, root: Path) -> list[float]:
    done = cluster.run(*command(path, root, "--log-format", "json"))
    run = Path(json.loads(done.stdout.splitlines()[-1])["run"])
    return [entry["loss"] for entry in json.loads((run / "history.json").read_text())]


@pytest.mark.slow
def test_training_from_hdfs_gives_the_losses_of_training_from_disk(
    cluster: HdfsCluster, dataset: tuple[Path, str], tmp_path: Path
) -> None:
    local, there = dataset
    assert train(cluster, there, tmp_path / "a") == train(cluster, str(local), tmp_path / "b")


@pytest.mark.slow
def test_what_is_not_there_and_who_does_not_answer(cluster: HdfsCluster, tmp_path: Path) -> None:
    done = cluster.run(*command(f"{cluster.uri}/nothing", tmp_path, "--dry-run"), code=4)
    assert "no published dataset" in done.stderr
    done = cluster.run(*command("hdfs://localhost:1/tiny", tmp_path, "--dry-run"), code=2)
    assert "NameNode does not answer" in done.stderr
    assert "hadoop classpath" in done.stderr


@pytest.mark.slow
def test_a_missing_shard_is_named(
    cluster: HdfsCluster, dataset: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(dataset[0], tmp_path / "copy")
    next((tmp_path / "copy").glob("versions/*/train/*.tfrecord*")).unlink()
    there = cluster.upload(tmp_path / "copy", "/datasets/torn")
    done = cluster.run(*command(there, tmp_path, "--dry-run"), code=3)
    assert "train/part-" in done.stderr


@pytest.mark.slow
def test_signals_stay_with_the_process(cluster: HdfsCluster) -> None:
    """Java, which reads HDFS in the same process, would take SIGTERM and end it unsaved."""
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('saved', flush=True))\n"
        "from conf.storage.locations import parse_storage\n"
        "print(len(parse_storage(sys.argv[1]).list_objects()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(1)\n"
        "print('goes on')\n"
    )
    done = cluster.run("-c", code, f"{cluster.uri}/nothing")
    assert done.stdout.split("\n")[-4:-1] == ["0", "saved", "goes on"]


@pytest.mark.slow
def test_spark_reads_tfrecords_and_refuses_to_write_them(
    cluster: HdfsCluster, tmp_path: Path
) -> None:
    write = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from etl.tfrecord.codec.encode import build_encoder\n"
        "columns = {'id': list(range(500)), 'x': [[k, 1] for k in range(500)]}\n"
        "batch = pa.RecordBatch.from_pydict(columns)\n"
        "with open(sys.argv[1], 'wb') as file:\n"
        "    file.writelines(c.data for c in build_encoder(batch.schema).encode_chunks(batch))\n"
    )
    (tmp_path / "records").mkdir()
    cluster.run("-c", write, str(tmp_path / "records/a.tfrecord"))
    there = cluster.upload(tmp_path / "records", "/records")
    read = (
        "import sys\n"
        "from pyspark.sql import SparkSession\n"
        "from etl.tfrecord.spark.datasource import register_tfrecord\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')\n"
        "spark = spark.config('spark.driver.memory', '1g').getOrCreate()\n"
        "register_tfrecord(spark)\n"
        "rows = spark.read.format('tfrecord').load(sys.argv[1]).collect()\n"
        "print(sorted((row.id, *row.x) for row in rows) == [(k, k, 1) for k in range(500)])\n"
        "try: spark.range(1).write.format('tfrecord').mode('append').save(sys.argv[1] + '/b')\n"
        "except Exception as error: print(error)\n"
    )
    done = cluster.run("-c", read, there, PYSPARK_PYTHON=sys.executable)
    assert done.stdout.startswith("True\n")
    assert "can be read from, not written to" in done.stdout
