"""No command shows what TensorFlow, oneDNN, Java or matplotlib say of themselves at their start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from conf.errors import ExitCode
from tests.java import START_LINES
from tests.jobs.runs import write_tiny_run

# Parts of lines, of those that these programs are known to write.
NOISE = (
    *START_LINES, "absl", "oneDNN", "cuda", "cpu_feature_guard", "TF-TRT", "XLA service", "WARNING",
    "tensorflow", "retracing", "atplotlib", "Glyph", "font", "Warning:",
)  # fmt: skip
TOWERS = {"name": "dssm", "embedding_dim": 4}
RANKER = {"kind": "ranking", "network": "deepfm", "embedding_dim": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a tiny data set, and a home without caches."""
    made = tmp_path_factory.mktemp("quiet")
    write_tiny_run(made, TOWERS)
    (made / "home").mkdir()
    (made / "space.yaml").write_text("trials: 1\nspace: {seed: [1, 2]}\n")
    ranker = {
        "name": "ranker", "dataset": str(made / "datasets" / "tiny"), "root": "runs",
        "model": RANKER, "fit": {"epochs": 1}, "input": {"batch_size": 32},
    }  # fmt: skip
    (made / "ranker.yaml").write_text(json.dumps(ranker))
    towers = ranker | {"name": "towers", "model": {"kind": "retrieval", **TOWERS}}
    (made / "towers.yaml").write_text(json.dumps(towers))
    return made


def environment(folder: Path) -> dict[str, str]:
    """As a user's: the suite's own settings of these programs left out."""
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "MPLBACKEND", "MPLCONFIGDIR", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"HOME": str(folder / "home")}


def run(folder: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *command.split()],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, ExitCode.GATE_FAILED), done.stderr[-3000:]
    check_quiet(done.stderr)


def check_quiet(stderr: str) -> None:
    said = [line for line in stderr.splitlines() if any(part in line for part in NOISE)]
    assert not said, "\n".join(said)


def test_a_command_that_reads_weights_is_quiet(folder: Path) -> None:
    run(folder, "inspect runs/tiny --variable movie_id")


# In the order of the chain: later ones read what earlier ones write.
COMMANDS = (
    "data generate --out logs --ratings 3000",
    "data clicks --out clicks --sessions 500",
    "build demo --data logs --set output.root=built --dry-run",
    "build demo --data logs --set output.root=built",
    "build demo --data logs --set output.root=built",
    "build demo --data logs --rows-to rows.parquet",
    "versions list built/demo",
    "inspect built/demo",
    "convert rows.parquet rows.tfrecord",
    "train towers.yaml",
    "train ranker.yaml",
    "train towers.yaml --dry-run",
    "train towers.yaml --sweep space.yaml",
    "evaluate --run runs/towers",
    "evaluate --run runs/ranker",
    "compare --run runs/towers --against runs/towers",
    "export --run runs/towers --to models --index --tables",
    "export --run runs/ranker --to models",
    "evaluate --run runs/ranker --export models/ranker",
    "models list models/towers",
    "index --export models/towers",
    "predict --run runs/towers",
    "predict --run runs/ranker --split test",
    "predict --export models/towers --engine spark --to lists --k 3",
    "inspect runs/towers",
    "inspect datasets/tiny",
    "report --run runs/towers",
)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_commands_of_a_model_are_quiet(folder: Path) -> None:
    faults = {}
    for command in COMMANDS:
        try:
            run(folder, command)
        except AssertionError as error:
            faults[command] = str(error)[-1500:]
    assert not faults, json.dumps(faults, indent=1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_server_is_quiet(folder: Path) -> None:
    run(folder, "export --run runs/tiny --to served")
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "serve", "--export", "served", "--port", "0"],
            cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=said, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().rsplit(" ", 1)[-1].strip()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/v1/models/tiny", timeout=30).read()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    check_quiet((folder / "said").read_text())
