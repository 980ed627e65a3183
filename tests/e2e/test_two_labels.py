"""Two labels of a log, a model of two tasks, and its SavedModel: the scores of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions
from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from etl.build import BuildResult, build_dataset
from jobs.cli import main
from tests.etl.built_versions import read_split
from tests.training.every_model import (
    ask_bare_process,
    assert_scores_alike,
    predict_test_split,
)
from training.checkpoint.restore import load_run
from training.export.saved_model import write_export

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

NAMES = ("user", "item", "device")


def write_log(path: Path, rows: int = 4000) -> None:
    """Every fourth item is clicked; likes go by the user, are rarer, and not always known."""
    rng = np.random.default_rng(5)
    lines = ["time,user,item,device,click,like"]
    for row in range(rows):
        user, item = int(rng.integers(60)), int(rng.integers(40))
        click = rng.random() < (0.7 if item % 4 == 0 else 0.2)
        like = rng.random() < (0.5 if user % 3 == 0 else 0.05)
        device, known = ("phone", "desk")[row % 2], f"{like:d}" if row % 3 else ""
        lines.append(f"{1_767_225_600 + row},u{user},i{item},{device},{click:d},{known}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def built(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    folder = tmp_path_factory.mktemp("labels")
    write_log(folder / "log.csv")
    columns = [{"name": "time", "type": "int64"}]
    columns += [{"name": name, "type": "string"} for name in NAMES]
    columns += [{"name": "click", "type": "int64"}]
    columns += [{"name": "like", "type": "int64", "nullable": True}]
    roles = {"user": "user", "item": "item", "device": "context"}
    config = {
        "name": "two",
        "data_dir": str(folder),
        "sources": {
            "log": {"path": "log.csv", "format": "csv", "header": True, "columns": columns}
        },
        "events": {
            "source": "log", "user": "user", "item": "item", "time": "time",
        },
        "label": [
            {"name": "clicked", "column": "click", "at_least": 1},
            {"name": "liked", "column": "like", "at_least": 1},
        ],
        "split": {"strategy": "temporal", "validation": 0.1, "test": 0.1},
        "features": [{"name": n, "column": n, "role": role} for n, role in roles.items()],
        "output": {"root": str(folder / "datasets"), "shards": 1, "eval_shards": 1},
    }  # fmt: skip
    return build_dataset(spark, BuildConfig.model_validate(config))


def test_the_log_s_labels_differ(built: BuildResult) -> None:
    manifest = built.manifest
    assert 0.25 < manifest.find_label_rate("clicked")["train"] < 0.4
    assert 0.15 < manifest.find_label_rate("liked")["train"] < 0.3
    clicked, liked = (manifest.counts.labelled[name] for name in ("clicked", "liked"))
    assert clicked == {name: manifest.counts.kept[name] for name in clicked}
    assert {name: round(3 * liked[name] / clicked[name]) for name in liked} == dict.fromkeys(
        ("train", "validation", "test"), 2
    )
    assert manifest.counts.dropped == {}


@pytest.mark.parametrize("network", ["shared_bottom", "mmoe"])
def test_both_tasks_are_learned_and_served_as_trained(
    built: BuildResult, tmp_path: Path, network: str
) -> None:
    tasks = "{click: {label: clicked}, like: {label: liked}}"
    settings = [
        f"model={{kind: ranking, network: {network}, embedding_dim: 8, tasks: {tasks}}}",
        f"root={tmp_path / 'runs'}", f"name={network}", "input.batch_size=64",
        "optimizer.learning_rate=0.02", "fit.epochs=3",
    ]  # fmt: skip
    chosen = [part for setting in settings for part in ("--set", setting)]
    dataset = str(built.version.parent.parent)
    assert main(["train", "--dataset", dataset, "--no-report", *chosen]) == 0
    run = resolve_run(tmp_path / "runs" / network)
    assert main(["evaluate", "--run", str(run)]) == 0
    found = read_json(run / "metrics.json")["tasks"]
    assert found["click"]["auc"] > 0.6
    assert found["like"]["auc"] > 0.6
    test = built.manifest.counts.labelled["liked"]["test"]
    assert found["like"]["rows"] == test < found["click"]["rows"]

    trained = load_run(run)
    expected = {network: predict_test_split(trained)}
    assert set(expected[network]) == {"serving_default/click", "serving_default/like"}
    click, like = expected[network].values()
    assert abs(np.corrcoef(click, like)[0, 1]) < 0.9
    exports = {network: str(write_export(trained, ExportOptions(tmp_path / "models")))}
    rows = read_split(built.version, read_manifest(built.version), "test")
    raw = [{name: row[name] for name in NAMES} for row in rows]
    assert_scores_alike(expected, ask_bare_process(exports, raw, tmp_path))
