"""Counts of the rows that train, from a log or from imported records to what is printed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from conf.training.train import TrainConfig
from etl.build import build_dataset
from etl.tfrecord.table import read_table, write_table
from jobs.cli import main
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.models.registry import build_model
from training.objectives.samplers import read_batch_counts
from training.objectives.user_items import TrainRows

KS = (1, 3, 10)


def draw_impressions() -> pd.DataFrame:
    """What is shown most is clicked least: items 1 to 20, of which the first ones are shown."""
    rng = np.random.default_rng(1)
    items = np.arange(1, 21)
    shown, taken = 1 / items, (items / 20) ** 2
    log = pd.DataFrame({"user": np.arange(4000) % 40, "ts": np.arange(4000) * 60})
    log["item"] = rng.choice(items, 4000, p=shown / shown.sum())
    log["clicked"] = (rng.random(4000) < taken[log["item"] - 1]).astype(int)
    return log[["user", "item", "clicked", "ts"]]


@pytest.mark.slow
def test_popularity_and_logq_are_those_of_the_clicks_and_not_of_what_is_shown(spark, tmp_path):
    log = draw_impressions()
    log.to_csv(tmp_path / "log.tsv", sep="\t", header=False, index=False)
    columns = [{"name": name, "type": "int64"} for name in log.columns]
    feature = {"role": "user", "encoding": {"kind": "vocabulary", "name": "item"}}
    config = {
        "name": "clicks",
        "data_dir": str(tmp_path),
        "sources": {"log": {"path": "log.tsv", "columns": columns}},
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts",
                   "where": "clicked = 1"},
        "split": {"validation": False},
        "features": [
            {"name": "user", "column": "user", "role": "user"},
            {"name": "history", "column": "history", **feature},
            {"name": "item", "column": "item", "role": "item"},
        ],
        "output": {"root": str(tmp_path / "datasets"), "shards": 2, "eval_shards": 1},
    }  # fmt: skip
    built = build_dataset(spark, BuildConfig.model_validate(config))

    clicks = log[log["clicked"] == 1]
    is_last = clicks.groupby("user").cumcount(ascending=False) == 0
    train, test = clicks[~is_last], clicks[is_last]
    assert built.manifest.counts.kept["test"] == len(test) == 40
    ids = read_table_of(built.version, "item")
    order = sorted(ids, key=lambda item: (-(train["item"] == item).sum(), ids[item]))
    ranks = test["item"].map({item: rank for rank, item in enumerate(order, 1)})

    settings = {"name": "n", "dataset": "d", "model": {"name": "mf", "embedding_dim": 2}}
    given = {"ks": KS, "sampled_negatives": None}
    run = TrainConfig.model_validate({**settings, "evaluation": given})
    model = build_model(run.model, built.manifest, 1)
    trained = TrainedModel(tmp_path, model, run, built.manifest, built.version)
    report = evaluate_split(trained, "test")
    (found,) = (p for p in report["protocols"] if p["name"] == "full_all")
    for k in KS:
        assert found["systems"]["popularity"][f"hit_rate@{k}"] == (ranks <= k).mean()
    counts = train["item"].map(ids).value_counts()
    assert counts.idxmax() != 2  # id 2 is the item that the log shows most

    expected = read_batch_counts(TrainRows(built.version, built.manifest, 64, run.input))
    np.testing.assert_array_equal(expected, counts.reindex(range(len(expected)), fill_value=0))
    bands = pd.cut(test["item"].map(train["item"].value_counts()), [0, 10, 100], right=False)
    slices = {group["value"]: group["rows"] for group in report["slices"]["item_frequency"]}
    expected = np.bincount(bands.cat.codes, minlength=2)
    assert slices == {n: rows for n, rows in zip(("1-9", "10-99"), expected, strict=True) if rows}


def read_table_of(version: Path, name: str) -> dict[int, int]:
    table = pd.read_parquet(version / "encoders" / f"{name}.parquet")
    return dict(zip(table["token"], table["id"], strict=True))


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """Records that something else wrote: no vocabulary, no catalogue, no users."""
    folder, rng = tmp_path_factory.mktemp("imported"), np.random.default_rng(2)
    for name, rows in (("train", 600), ("test", 60)):
        items = 2 + rng.zipf(1.5, rows) % 30
        table = pa.table({
            "user": 2 + rng.integers(0, 20, rows),
            "item": items,
            "kind": 2 + items % 3,
            "history": [(2 + rng.integers(0, 30, rng.integers(0, 5))).tolist() for _ in items],
        })  # fmt: skip
        write_table(table, folder / f"{name}.tfrecord")
    config = {
        "name": "ours",
        "data_dir": str(folder),
        "splits": {"train": ["train.tfrecord"], "test": ["test.tfrecord"]},
        "features": [
            {"name": "user", "role": "user"},
            {"name": "item", "role": "item", "vocabulary_size": 40},
            {"name": "kind", "role": "item"},
            {"name": "history", "role": "user", "max_len": 4, "table": "item"},
        ],
        "keys": {"user": "user", "item": "item", "history": "history"},
        "output": {"root": str(folder / "datasets")},
    }
    (folder / "ours.yaml").write_text(yaml.safe_dump(config))
    assert main(["data", "import", str(folder / "ours.yaml")]) == 0
    return folder


@pytest.mark.parametrize(
    "model",
    [
        {"name": "mf", "embedding_dim": 4},
        {
            "name": "dssm",
            "embedding_dim": 4,
            "objective": {"negatives": {"source": "frequency", "count": 8}},
        },
    ],
    ids=["mf", "dssm"],
)
def test_imported_records_are_trained_on_and_evaluated(imported, tmp_path, model):
    """By default losses, beside a popularity that is counted from the records."""
    config = {
        "name": model["name"],
        "dataset": str(imported / "datasets" / "ours"),
        "root": str(tmp_path / "runs"),
        "model": model,
        "input": {"batch_size": 100},
        "fit": {"epochs": 1, "early_stopping": None},
        "evaluation": {"ks": KS, "sampled_negatives": None},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    run = resolve_run(tmp_path / "runs" / model["name"])
    assert main(["evaluate", "--run", str(run)]) == 0
    report = read_json(run / "metrics.json")
    train, test = (read_table(imported / f"{n}.tfrecord").to_pandas() for n in ("train", "test"))
    counts = train["item"].value_counts()
    # Those that are as popular count against the target.
    places = {item: int((counts >= count).sum()) for item, count in counts.items()}
    ranks = test["item"].map(places).fillna(np.inf)
    (found,) = report["protocols"]
    assert (found["name"], found["candidates"]) == ("full_all", len(counts))
    for k in KS:
        assert found["systems"]["popularity"][f"hit_rate@{k}"] == (ranks <= k).mean()
    assert set(report["slices"]) == {"user_frequency", "item_frequency"}
    shutil.rmtree(run)
