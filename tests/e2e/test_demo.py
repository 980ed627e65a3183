"""The whole chain as a new user runs it: one command, then every output is opened."""

from __future__ import annotations

import gzip
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import jobs.demo
from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.export import find_version
from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from conf.load import load_config
from conf.training.train import TrainConfig
from etl.build import build_dataset
from jobs.cli import main
from jobs.demo import list_steps
from tests.java import START_LINES
from tests.lineage import file_transport, read_events
from tests.machine import IS_EXHAUSTIVE
from tests.real_data import require_data
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.models.registry import build_model

RATINGS = 20_000
LINEAGE = "lineage.jsonl"


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments], capture_output=True, text=True, check=False
    )


def run_step(arguments: list[str]) -> int:
    """Builds in a process of its own; does the rest here, where TensorFlow has started already."""
    if arguments[0] != "build":
        return main(arguments)
    done = sluice(*arguments)
    assert not [line for line in START_LINES if line in done.stderr], done.stderr
    return done.returncode


def demo_in_this_process(arguments: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(jobs.demo, "run_step", run_step)
        assert main(arguments) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo leaves; `make test-all` runs each step as the process that it is."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in file_transport(out / LINEAGE).items():
            patch.setenv(name, value)
        run_demo(out)
    return out


def run_demo(out: Path) -> None:
    arguments = ["demo", "--out", str(out), "--ratings", str(RATINGS)]
    if IS_EXHAUSTIVE:
        done = sluice(*arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not [line for line in START_LINES if line in done.stderr], done.stderr
        printed = done.stdout
    else:
        printed = demo_in_this_process(arguments)
    for line in ("report:", "dataset:", "model:", "ranked lists:"):
        assert line in printed


@pytest.fixture(scope="module")
def run(demo) -> Path:
    return resolve_run(str(demo / "runs" / "demo"))


@pytest.mark.slow
def test_lineage_leads_from_the_logs_to_the_model(demo, run):
    ends = [e for e in read_events(demo / LINEAGE) if e["eventType"] == "COMPLETE"]
    build, train, export = ends
    assert [end["job"]["name"] for end in ends] == ["build.demo", "train.demo", "export.demo"]
    assert str(demo / "demo-logs" / "ratings.dat") in {read["name"] for read in build["inputs"]}
    (made,) = build["outputs"]
    assert "movie_id" in {field["name"] for field in made["facets"]["schema"]["fields"]}
    for before, after in ((build, train), (train, export)):
        assert before["outputs"][0]["name"] in {read["name"] for read in after["inputs"]}
    assert train["outputs"][0]["facets"]["version"]["datasetVersion"] == run.name


@pytest.mark.slow
def test_counts_are_those_of_the_generator(demo):
    sample = json.loads((demo / "demo-logs" / "SAMPLE.json").read_text())["ratings"]
    counts = read_manifest(resolve_version(demo / "datasets" / "demo")).counts
    assert counts.joined == sample["valid"] == RATINGS
    assert sum(counts.quarantined["ratings"].values()) == sum(sample["malformed"].values())
    assert counts.dropped == {
        "duplicate": sample["duplicate"],
        "unmatched:movies": sample["unknown"]["unknown_movie"],
        "unmatched:users": sample["unknown"]["unknown_user"],
    }


@pytest.mark.slow
def test_trained_model_beats_popularity_and_an_untrained_one_does_not(demo, run):
    metrics = read_json(run / "metrics.json")
    protocol = next(p for p in metrics["protocols"] if p["name"] == metrics["headline"])
    systems = protocol["systems"]
    popularity = systems["popularity"]["hit_rate@10"]
    assert systems["model"]["hit_rate@10"] > 1.5 * popularity
    assert systems["random"]["hit_rate@10"] < popularity

    from training.checkpoint.restore import load_run
    from training.evaluation.evaluate import FullRanking, evaluate_full
    from training.evaluation.metrics import RankMeasures
    from training.models.registry import build_model
    from training.reader.training_data import TrainingData

    trained = load_run(run)
    untrained = build_model(trained.config.model, trained.manifest, seed=1)
    data = TrainingData(trained.version_dir, trained.manifest)
    found = evaluate_full(untrained, data, "test", FullRanking(RankMeasures((10,)), True, 512))
    assert found["hit_rate@10"] < popularity


@pytest.mark.slow
def test_ranked_lists_leave_out_what_the_user_has_seen(demo, run):
    seen: dict[int, set[int]] = {}
    lines = (demo / "demo-logs" / "ratings.dat").read_text(encoding="latin-1").splitlines()
    for line in lines:
        fields = line.split("::")
        if len(fields) == 4 and all(field.strip().isdigit() for field in fields[:2]):
            seen.setdefault(int(fields[0]), set()).add(int(fields[1]))
    with gzip.open(run / "recommendations.json.gz", "rt") as handle:
        lists = [json.loads(line) for line in handle]
    assert (
        len(lists) == read_manifest(resolve_version(demo / "datasets" / "demo")).split("users").rows
    )
    for entry in lists:
        assert entry["items"]
        assert not set(entry["items"]) & seen[entry["user"]]
        assert entry["scores"] == sorted(entry["scores"], reverse=True)


@pytest.mark.slow
def test_saved_towers_rank_like_the_lists(run):
    """Raw tokens into the exported towers give the scores of the ranked lists."""
    embeddings = find_version(run / "export") / "embeddings"
    items = pq.read_table(embeddings / "items.parquet").to_pydict()
    users = pq.read_table(embeddings / "users.parquet").to_pydict()
    item_vectors = dict(zip(items["key"], items["vector"], strict=True))
    user_vectors = dict(zip(users["key"], users["vector"], strict=True))
    with gzip.open(run / "recommendations.json.gz", "rt") as handle:
        first = json.loads(handle.readline())
    scores = [np.dot(user_vectors[first["user"]], item_vectors[item]) for item in first["items"]]
    np.testing.assert_allclose(scores, first["scores"], atol=1e-5)


@pytest.mark.slow
def test_report_needs_nothing_from_outside(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    for outside in ("<script", 'src="http', 'href="http', "@import"):
        assert outside not in page
    assert "popularity" in page.lower()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_second_training_with_the_same_seed_gives_the_same_metrics(demo, run):
    done = sluice(
        "train",
        "demo",
        "--dataset",
        str(demo / "datasets" / "demo"),
        "--set",
        f"root={demo / 'runs'}",
        "--set",
        "seed=7",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    again = resolve_run(str(demo / "runs" / "demo"))
    assert again != run

    def validation(folder: Path) -> list[dict[str, float]]:
        return [epoch["validation"] for epoch in json.loads((folder / "history.json").read_text())]

    assert validation(again) == validation(run)


@pytest.mark.slow
def test_damaged_shard_stops_training_and_spares_the_last_run(demo, run, capsys):
    version = resolve_version(demo / "datasets" / "demo")
    shard = version / read_manifest(version).split("train").shards[0].path
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 0xFF
    current = (demo / "runs" / "demo" / "CURRENT").read_text()
    train = ["train", "demo", "--dataset", str(version), "--set", f"root={demo / 'runs'}"]
    verify = ["inspect", str(version), "--verify"]
    try:
        for damaged in (content[:-5], bytes(flipped)):
            shard.write_bytes(damaged)
            assert main(train) == 3
            told = capsys.readouterr().err
            assert shard.name in told
            assert "Traceback" not in told
        assert main(verify) == 3
    finally:
        shard.write_bytes(content)
    assert (demo / "runs" / "demo" / "CURRENT").read_text() == current
    assert main(verify) == 0


# Kills; by a seed of one's own the same moments again.
KILLS = 30
KILL_SEED = int(os.environ.get("SLUICE_KILL_SEED") or secrets.randbits(32))


def list_chain(out: Path, logs: Path) -> dict[str, list[str]]:
    """Commands of the demo from the build to the lists, small, with a `train` that resumes."""
    steps = {line[0]: line for _, line in list_steps(out, 4_000, 7)}
    steps["build"][steps["build"].index("--data") + 1] = str(logs)
    saves = ["fit.checkpoint.every_steps=3", "fit.steps_per_loop=3", "fit.epochs=4"]
    steps["train"] += ["--resume", *(word for value in saves for word in ("--set", value))]
    steps["export"] += ["--tables"]
    return {name: steps[name] for name in ("build", "train", "evaluate", "export", "predict")}


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts a step in a process group of its own, as a scheduler does, and kills it at the end."""
    full = [sys.executable, "-m", "jobs.cli", *command]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(full, text=True, start_new_session=True, **streams)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_to_its_end(command: list[str], timeout: float = 600) -> float:
    """Runs a step and returns its seconds."""
    begin = time.monotonic()
    with started(command) as process:
        _, told = process.communicate(timeout=timeout)
        assert process.returncode == 0, told[-3000:]
    return time.monotonic() - begin


def run_killed(command: list[str], seconds: float) -> None:
    """Runs a step until it is killed; where it ends before, a repeated run is killed, sooner."""
    with suppress(subprocess.TimeoutExpired):
        while True:
            run_to_its_end(command, seconds)
            seconds *= 0.8


def draw_moments(took: dict[str, float], seed: int) -> dict[str, list[float]]:
    """Draws after how many seconds each step is killed, again and again, past its start."""
    draw, each = random.Random(seed), KILLS // len(took)
    return {k: [draw.uniform(0.2, 1) * took[k] for _ in range(each)] for k in took}


def list_outputs(out: Path) -> dict[str, Any]:
    """All that a chain promises to write the same way twice."""
    version = resolve_version(out / "datasets" / "demo")
    manifest = read_manifest(version)
    listed = [shard.path for split in manifest.splits for shard in split.shards]
    listed += [file.path for file in manifest.other_files]
    run = resolve_run(str(out / "runs" / "demo"))
    times = ("seconds", "examples_per_s", "input_wait_share")
    history = json.loads((run / "history.json").read_text())
    metrics = read_json(run / "metrics.json")
    export = find_version(run / "export")
    tables = [p for p in sorted(export.rglob("*")) if p.suffix in (".parquet", ".txt", ".tsv")]
    assert tables
    return {
        "dataset": {name: (version / name).read_bytes() for name in sorted(listed)},
        "counts": manifest.counts,
        "history": [{k: v for k, v in epoch.items() if k not in times} for epoch in history],
        "checkpoints": {
            str(path.relative_to(run)): read_tensors(path.with_suffix(""))
            for path in sorted(run.glob("checkpoints/*/*/state.index"))
        },
        "metrics": {name: metrics[name] for name in ("split", "users", "protocols")},
        "tables": {str(path.relative_to(export)): path.read_bytes() for path in tables},
        # Numbered in the order in which the signatures were traced, which differs.
        "saved model": sorted(read_tensors(export / "variables" / "variables").values()),
        "lists": (run / "recommendations.json.gz").read_bytes(),
    }


def read_tensors(prefix: Path) -> dict[str, bytes]:
    """The numbers of a checkpoint: its other entries describe objects, with times and paths."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(prefix))
    types = reader.get_variable_to_dtype_map()
    names = sorted(name for name, dtype in types.items() if dtype != tf.string)
    return {name: np.asarray(reader.get_tensor(name)).tobytes() for name in names}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_chain_that_is_killed_anywhere_gives_what_an_undisturbed_one_does(tmp_path):
    logs = tmp_path / "logs"
    run_to_its_end(["data", "generate", "--out", str(logs), "--ratings", "4000", "--seed", "7"])
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    took = {name: run_to_its_end(command) for name, command in list_chain(quiet, logs).items()}
    moments = draw_moments(took, KILL_SEED)
    print(f"SLUICE_KILL_SEED={KILL_SEED}:", moments)
    for name, command in list_chain(killed, logs).items():
        for seconds in moments[name]:
            run_killed(command, seconds)
        run_to_its_end(command)
    found = list_outputs(killed)
    for part, values in list_outputs(quiet).items():
        assert found[part] == values, f"{part} (SLUICE_KILL_SEED={KILL_SEED})"
    assert not [p for p in killed.rglob("*") if p.name.startswith((".staging", "_temporary"))]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_rating_is_joined_and_popularity_is_the_published_one(spark, tmp_path):
    config = load_config(
        BuildConfig,
        "etl",
        "ml_1m",
        [f"data_dir={require_data('ml-1m')}", f"output.root={tmp_path}"],
    )
    built = build_dataset(spark, config)
    counts = built.manifest.counts
    assert counts.joined == 1_000_209
    assert counts.kept["test"] == counts.kept["users"] == 6_040
    assert not counts.dropped

    settings = load_config(TrainConfig, "training", "ml_1m_dssm", [f"dataset={built.version}"])
    untrained = build_model(settings.model, built.manifest, seed=1)
    metrics = evaluate_split(
        TrainedModel(tmp_path, untrained, settings, built.manifest, built.version), "test"
    )
    systems = {p["name"]: p["systems"] for p in metrics["protocols"]}
    # Published with DeepMatch's example: 0.1035 with seen items kept; 0.1396 without them.
    assert systems["full_all"]["popularity"]["hit_rate@50"] == pytest.approx(0.1035, abs=5e-4)
    assert systems["full_unseen"]["popularity"]["hit_rate@50"] == pytest.approx(0.1396, abs=5e-4)
    assert systems["full_all"]["model"]["hit_rate@50"] < 0.1
