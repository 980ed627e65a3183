"""The whole chain with everything on a real HDFS, by the commands that the guide gives."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.publication.working_copy import WORK_DIR_VARIABLE
from tests.hdfs_cluster import HdfsCluster, run_cluster

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
USER = 7
ASKING: dict[str, list[Any]] = {
    "user_id": [USER, 8], "gender": ["F", "M"], "age": [25, 35], "occupation": [1, 2],
    "zip": ["1", "2"],
}  # fmt: skip
_TRAINING = (
    "model.embeddings={movie_id: {}}", "fit.epochs=1", "fit.early_stopping=null",
    "evaluation.sampled_negatives=20",
)  # fmt: skip


@dataclass
class Chain:
    """Runs commands, each as the process of a machine that has a disk of its own.

    Attributes:
        uri: Folder on HDFS.
        local: Folder for logs and working copies.
    """

    uri: str
    local: Path
    machines: int = field(default=0)

    @property
    def environment(self) -> dict[str, str]:
        """Of a machine that has seen nothing yet."""
        self.machines += 1
        paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        work = str(self.local / f"machine_{self.machines}")
        return {**os.environ, WORK_DIR_VARIABLE: work, "PYTHONPATH": paths}

    def run(self, *arguments: str) -> list[str]:
        """Runs a command of Sluice and returns the lines of its standard output."""
        command = [sys.executable, "-m", "jobs.cli", *arguments]
        done = subprocess.run(
            command, cwd=self.local, env=self.environment, capture_output=True, text=True,
            check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}\n{done.stderr[-3000:]}"
        return done.stdout.splitlines()

    def run_json(self, *arguments: str) -> dict[str, Any]:
        """Runs a command and returns the object of its last line."""
        found: dict[str, Any] = json.loads(self.run(*arguments, "--log-format", "json")[-1])
        return found

    @contextlib.contextmanager
    def serve(self) -> Iterator[Server]:
        """A server of the folder of models, for the block."""
        command = [sys.executable, "-m", "jobs.cli", "serve", "--export", f"{self.uri}/models",
                   "--port", "0", "--poll", "0.5"]  # fmt: skip
        with (self.local / "serve.log").open("w") as log, subprocess.Popen(
            command, cwd=self.local, env=self.environment, stdout=subprocess.PIPE, stderr=log,
            text=True,
        ) as process:  # fmt: skip
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                found = re.search(r"http://\S+", line)
                assert found, line + (self.local / "serve.log").read_text()[-3000:]
                yield Server(found[0])
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                process.kill()


@dataclass(frozen=True)
class Server:
    """A server that answers at a URL."""

    url: str

    def get(self, path: str) -> dict[str, Any]:
        """Returns what it answers."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def wait_for(self, version: int, index: int) -> None:
        """Waits until it answers by this version and this index of it."""
        end = time.monotonic() + 600
        while True:
            health = self.get("/healthz")
            if (health["models"]["demo"], health["indexes"]["demo"]) == (version, index):
                return
            assert time.monotonic() < end, health
            time.sleep(0.2)

    def recommend(self, user: int) -> list[int]:
        """Returns the items of a list."""
        items = self.get(f"/v1/recommend?user={user}&k=5")["items"]
        return [item["item"] for item in items]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with run_cluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


def test_from_logs_to_lists_and_back(cluster: HdfsCluster, tmp_path: Path) -> None:
    chain = Chain(f"{cluster.uri}/chain", tmp_path)
    dataset, models = f"{chain.uri}/datasets/demo", f"{chain.uri}/models"
    chain.run("data", "generate", "--out", "logs", "--ratings", "6000")
    build = ("build", "demo", "--data", "logs", "--set", f"output.root={chain.uri}/datasets")
    versions = [chain.run_json(*build, "--force")["version"] for _ in range(2)]

    def train(*more: str) -> str:
        settings = (*_TRAINING, f"root={chain.uri}/runs", *more)
        words = [word for setting in settings for word in ("--set", setting)]
        return str(chain.run_json("train", "demo", "--dataset", dataset, *words)["run"])

    first = train()
    exported = chain.run_json("export", "--run", f"{chain.uri}/runs/demo", "--to", models)
    assert exported == {"export": f"{models}/demo/1"}
    with chain.serve() as server:
        before = server.recommend(USER)
        indexed = chain.run_json("index", "--export", f"{models}/demo")
        assert indexed == {"index": f"{models}/demo/1/index/1"}
        server.wait_for(1, 1)
        second = train(f"fit.warm_start.path={first}")
        delta = ("export", "--run", second, "--delta-since", "start", "--to", f"{chain.uri}/deltas")
        chain.run(*delta)
        chain.run("models", "apply", f"{models}/demo", "--delta", f"{chain.uri}/deltas/demo")
        server.wait_for(2, 1)
        assert server.recommend(USER) != before
        chain.run("models", "rollback", f"{models}/demo")
        server.wait_for(1, 1)
        assert server.recommend(USER) == before

    score = ("predict", "--engine", "spark", "--export", f"{models}/demo")
    chain.run(*score, "--to", "lists")
    lists = {line["user"]: line["items"] for line in read_lines(tmp_path / "lists")}
    assert lists[USER][: len(before)] == before
    upload_rows(cluster, {**ASKING, "history": [before, []]}, "/chain/rows.parquet/part")
    chain.run(*score, "--to", "asked", "--id", "user_id",
              "--input", f"{chain.uri}/rows.parquet", "--as", "jsonl.gz")  # fmt: skip
    asked = read_lines(tmp_path / "asked")
    assert [(line["id"], len(line["items"])) for line in asked] == [(USER, 20), (8, 20)]

    older, newer = (version.rpartition("/")[2] for version in versions)
    moved = {"before": newer, "current": older}
    assert chain.run_json("versions", "rollback", dataset) == moved
    chain.run("versions", "rollback", dataset, "--to", newer)
    removed = chain.run_json("versions", "gc", dataset, "--keep", "1", "--older-than", "0")
    assert removed["removed"] == [older]
    left = [line.path for line in native(cluster).list_status("/chain", True)]
    assert not [path for path in left if ".upload-" in path]
    assert not [path for path in left if older in path]
    assert [path for path in left if newer in path]


def native(cluster: HdfsCluster) -> Any:
    import hdfs_native

    return hdfs_native.Client(cluster.uri)


def upload_rows(cluster: HdfsCluster, rows: dict[str, list[Any]], path: str) -> None:
    """Puts a Parquet file there by the client alone."""
    sink = io.BytesIO()
    pq.write_table(pa.table(rows), sink)
    with native(cluster).create(path) as file:
        file.write(sink.getvalue())


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the objects of all parts, in order."""
    files = sorted(folder.glob("part-*"))
    return [json.loads(line) for file in files for line in gzip.open(file, "rt")]
