"""Runs on versions of later days: numbers that were kept, and numbers that were fitted anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from conf.artefacts.run import read_json, resolve_run
from conf.encoders import ENCODERS_DIR
from conf.errors import ConfigError
from etl.build import BuildResult
from etl.encoders.pipeline import read_pipeline
from etl.tfrecord.types.features import WireFeature
from jobs.cli import main
from tests.etl.daily_versions import build_days, log_config
from tests.tfrecord_files import read_file
from training.apply.endpoint import Endpoint, evaluate_served
from training.checkpoint.restore import load_run
from training.evaluation.evaluate import compare_runs
from training.input.batches import build_eval_dataset
from training.other_version import RawRanking, RawTowers, move_to_version

pytestmark = pytest.mark.slow

CONTEXT = ("price", "level", "item_rate", "item_count", "crossed", "hot")
MODELS = {
    "rank": "{kind: ranking, network: deepfm, embedding_dim: 4, tasks: {label: {label: label}}}",
    "find": "{kind: retrieval, name: dssm, embedding_dim: 4, objective: {kind: binary}}",
}


@pytest.fixture(scope="module")
def versions(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> list[BuildResult]:
    return build_days(spark, log_config(tmp_path_factory.mktemp("daily") / "log"))


def train(version: BuildResult, root: Path, kind: str, *more: str) -> Path:
    settings = [f"model={MODELS[kind]}", f"root={root}", f"name={kind}", "input.batch_size=6",
                "fit.epochs=2", "evaluation.sampled_negatives=null", *more]  # fmt: skip
    chosen = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "--dataset", str(version.version), "--no-report", *chosen]) == 0
    return resolve_run(root / kind)


@pytest.fixture(scope="module")
def runs(versions: list[BuildResult], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of day 0 by kind."""
    root = tmp_path_factory.mktemp("runs")
    return {kind: train(versions[0], root, kind) for kind in MODELS}


def encode_by_etl(first: BuildResult, version: BuildResult, split: str) -> dict[str, np.ndarray]:
    """The features of a later version's rows as the encoders of the first version make them."""
    wire = [WireFeature("raw_price", "bytes", True), WireFeature("raw_weight", "float32", True)]
    wire += [WireFeature(f"raw_{name}", "int64", True) for name in ("item", "user")]
    shards = [version.version / shard.path for shard in version.manifest.split(split).shards]
    rows = [row for shard in shards for row in read_file(shard, wire).to_pylist()]
    raw = {
        "price": [float(r["raw_price"][0]) if r["raw_price"] else None for r in rows],
        **{name: [next(iter(r[f"raw_{name}"] or ()), None) for r in rows]
           for name in ("item", "user", "weight")},
    }  # fmt: skip
    types = {"price": pa.float64(), "item": pa.int64(), "user": pa.int64(), "weight": pa.float32()}
    arrays = {name: pa.array(values, types[name]) for name, values in raw.items()}
    arrays["__fold_5"] = pa.nulls(len(rows), pa.int64())
    pipeline = read_pipeline(first.version / ENCODERS_DIR, (*CONTEXT, "weight"))
    encoded = pipeline.apply(pa.RecordBatch.from_pydict(arrays))
    return {
        name: np.asarray(encoded[name].to_pylist(), np.float64) for name in encoded.schema.names
    }


@pytest.mark.parametrize("later", [1, 2], ids=["kept", "fitted anew"])
def test_a_run_reads_later_rows_as_its_own_encoders_make_them(versions, runs, later):
    trained = load_run(runs["rank"])
    moved = move_to_version(trained, str(versions[later].version), "best", "test")
    assert isinstance(moved.model, RawRanking)
    names = (*moved.model.inputs, "user", "item")
    where = (moved.version_dir, moved.manifest)
    [batch] = build_eval_dataset(*where, "test", 64, tuple(dict.fromkeys(names)))
    found = moved.model._own.encode(batch, trained.model.inputs)
    expected = encode_by_etl(versions[0], versions[later], "test")
    again = {name for name in CONTEXT if name not in names}
    # Tables of statistics have grown by a token, and the users' vocabulary is fitted each day.
    assert again == ({"item_rate", "item_count", "hot"} if later == 1 else set(CONTEXT))
    for name in trained.model.inputs:
        if name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_kept_or_fitted_anew_a_run_scores_the_same_rows_alike(versions, runs):
    scores = []
    for later in (1, 2):
        moved = move_to_version(load_run(runs["rank"]), str(versions[later].version))
        where = (moved.version_dir, moved.manifest)
        [batch] = build_eval_dataset(*where, "test", 64, moved.model.inputs)
        scores.append(np.sort(moved.model.compute_logits(batch)["label"]))
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(MODELS))
def test_the_gate_compares_on_a_version_that_was_fitted_anew(
    versions, runs, kind, tmp_path, capsys
):
    new = train(versions[2], tmp_path, kind, f"fit.warm_start={runs[kind]}")
    text = capsys.readouterr()
    assert "fitted anew since then" in text.out + text.err
    report = read_json(new / "warm_start.json")
    assert ("price" if kind == "rank" else "weight") in report["refitted"]
    arguments = ["compare", "--run", str(new), "--against", str(runs[kind]), "--dataset",
                 str(versions[2].version), "--margin", "-1", "--log-format", "json"]  # fmt: skip
    metric = [] if kind == "find" else ["--metric", "log_loss"]
    code = main([*arguments, *metric])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    # The binary objective of "find" takes the rows of label 0 for negatives: half of the six.
    rows = (6, None) if kind == "rank" else (3, 3)
    assert (found["rows"], found.get("rows_not_relevant")) == rows
    assert (code, found["passed"]) in {(0, True), (6, False)}


def test_catalogue_and_users_are_read_through_the_run_s_encoders(versions, runs):
    trained = load_run(runs["find"])
    moved = move_to_version(trained, str(versions[2].version))
    assert isinstance(moved.model, RawTowers)
    assert moved.model.item_inputs == ("item", "raw_weight")
    found = compare_runs(moved, moved, "test")
    assert found["metrics"]["ndcg@10"]["difference"] == 0.0


def test_rows_of_train_and_what_is_served_are_refused(versions, runs, tmp_path):
    trained = load_run(runs["rank"])
    with pytest.raises(ConfigError, match="compute features in other ways") as refused:
        move_to_version(trained, str(versions[2].version), "best", "train")
    assert "another split than train" in refused.value.render()
    moved = move_to_version(trained, str(versions[2].version))
    with pytest.raises(ConfigError, match="has fitted features anew"):
        evaluate_served(moved, "test", Endpoint("http://host"))
