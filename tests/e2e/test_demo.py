"""The whole chain as a new user runs it: one command, then every output is opened."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import jobs.demo
from conf.etl.build import BuildConfig
from conf.export import find_version
from conf.load import load_config
from conf.paths import read_manifest, resolve_version
from conf.run import read_json, resolve_run
from conf.training.train import TrainConfig
from etl.build import build_dataset
from jobs.cli import main
from tests.java import START_LINES
from tests.machine import IS_EXHAUSTIVE
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.models.registry import build_model

RATINGS = 20_000


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
    return out


@pytest.fixture(scope="module")
def run(demo) -> Path:
    return resolve_run(str(demo / "runs" / "demo"))


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
    from training.evaluation.evaluate import evaluate_full
    from training.models.registry import build_model

    trained = load_run(run)
    untrained = build_model(trained.config.model, trained.manifest, seed=1)
    found = evaluate_full(
        untrained, trained.version_dir, trained.manifest, "test", (10,), True, 512
    )
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


@pytest.mark.slow
def test_every_rating_is_joined_and_popularity_is_the_published_one(spark, data_dir, tmp_path):
    config = load_config(
        BuildConfig,
        "etl",
        "ml_1m",
        [f"data_dir={data_dir / 'ml-1m'}", f"output.root={tmp_path}"],
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
