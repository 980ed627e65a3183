"""`evaluation.filter`: metrics of some rows alone are those of a split that has no others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError, TooFewRowsError
from conf.manifest import Manifest, SplitInfo
from conf.training.input import InputConfig
from tests.training.evaluation.measured import build_measured, read_rows
from tests.training.tiny_dataset import (
    TinyConfig,
    describe_shard,
    write_shard,
    write_tiny_dataset,
)
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import compare_runs, evaluate_split
from training.evaluation.item_index import build_item_index
from training.evaluation.systems import ModelSystem
from training.evaluation.users import UserReader, read_held_out
from training.loop.validation import build_validate, check_validation
from training.reader.training_data import TrainingData

CONFIG = TinyConfig(users=30, events_per_user=14, leave_out=3, own_group=0.5)
RELATED = [{"feature": "label", "value": 1}]
SEVERAL = [
    {"feature": "gender", "op": "in", "value": [2, 99]},
    {"feature": "genres", "op": ">=", "value": 2},
]
BINARY = {"name": "mf", "objective": {"kind": "binary"}}
RANKING = {
    "kind": "ranking",
    "network": "tests.training.toy_models:build_own_network",
    "params": {"units": 8},
    "pooling": {"history": {"combiner": "none"}},
    "tasks": {
        "click": {"label": "label"},
        "value": {"label": "label", "objective": "squared_error"},
    },
}


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("filter"), config=CONFIG)


@pytest.fixture(scope="module")
def manifest(version: Path) -> Manifest:
    return read_manifest(version)


def _train(version: Path, manifest: Manifest, model: Any = None, **sections: Any) -> TrainedModel:
    evaluation = {"ks": [3, 10], "sampled_negatives": None, **sections.pop("evaluation", {})}
    return build_measured(version, model, manifest, evaluation=evaluation, **sections)


def test_a_further_task_keeps_its_name_where_the_runs_share_no_first_one(
    version: Path, manifest: Manifest
) -> None:
    own = _train(version, manifest, RANKING)
    tasks = {"value": RANKING["tasks"]["value"]}
    other = _train(version, manifest, {**RANKING, "tasks": tasks})
    assert "value/mse" in compare_runs(own, other, "test")["metrics"]
    assert "mse" in compare_runs(other, own, "test")["metrics"]


def _passes(row: dict[str, Any], filters: list[dict[str, Any]]) -> bool:
    is_related = row["label"] == 1
    return is_related if filters is RELATED else row["gender"] == 2 and len(row["genres"]) >= 2


def _keep_alone(
    version: Path, manifest: Manifest, split: str, filters: list[dict[str, Any]], target: Path
) -> Manifest:
    rows = [row for row in read_rows(version, manifest, split) if _passes(row, filters)]
    assert 0 < len(rows) < manifest.split(split).rows
    write_shard(target, rows, manifest.schema)
    shard = describe_shard(version, str(target.relative_to(version)), len(rows))
    splits = [SplitInfo(split, (shard,)) if s.name == split else s for s in manifest.splits]
    return replace(manifest, splits=tuple(splits))


@pytest.mark.parametrize("filters", [RELATED, SEVERAL])
@pytest.mark.parametrize("model", [None, RANKING])
def test_metrics_are_those_of_a_split_without_other_rows(
    version: Path, manifest: Manifest, model: Any, filters: list[dict[str, Any]]
) -> None:
    asked = {"per": ["event"], "slices": ["gender"]}
    alone = _keep_alone(version, manifest, "test", filters, version / "test" / "alone.tfrecord")
    wanted = evaluate_split(_train(version, alone, model, evaluation=asked), "test")
    trained = _train(version, manifest, model, evaluation={**asked, "filter": filters})
    found = evaluate_split(trained, "test")
    said = found.pop("filter")
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(wanted))
    listed = manifest.split("test").rows
    assert (said["rows"], said["of"]) == (alone.split("test").rows, listed)
    assert [item["feature"] for item in said["conditions"]] == [f["feature"] for f in filters]
    assert "filter" not in wanted
    other = _train(version, manifest, model, evaluation={**asked, "filter": []})
    compared = compare_runs(trained, other, "test")
    assert (compared["filter"], compared["rows"]) == (said, said["rows"])
    plain = compare_runs(*(_train(version, alone, model, evaluation=asked),) * 2, "test")
    own = {name: values["run"] for name, values in compared["metrics"].items()}
    assert own == {name: values["run"] for name, values in plain["metrics"].items()}


def test_users_are_measured_by_the_events_that_pass(
    version: Path, manifest: Manifest, tmp_path: Path
) -> None:
    trained = _train(version, manifest, evaluation={"per": ["user"], "filter": RELATED})
    [protocol] = evaluate_split(trained, "test")["protocols"]
    relevant: dict[int, set[int]] = {}
    for row in read_rows(version, manifest, "test"):
        if _passes(row, RELATED):
            relevant.setdefault(int(row["user_id"]), set()).add(int(row["movie_id"]))
    everyone = _train(version, manifest, evaluation={"per": ["user"]})
    model, lists = everyone.model, {}
    index = build_item_index(model, version, manifest, 64)
    held_out = read_held_out(everyone, "test", index, None)
    for batch in UserReader(everyone, "test", index, model.user_inputs, held_out).read():
        _, columns = ModelSystem(model, index).rank_users(batch, 10)
        ranked = index.ids[columns[:, :10]]
        lists |= dict(zip(batch.users.tolist(), ranked.tolist(), strict=True))
    assert 0 < len(relevant) < len(lists)
    recalls = [len(set(lists[user]) & items) / len(items) for user, items in relevant.items()]
    assert protocol["rows"] == len(relevant)
    assert protocol["relevant"] == sum(map(len, relevant.values()))
    assert protocol["systems"]["model"]["recall@10"] == pytest.approx(np.mean(recalls))
    compared = compare_runs(trained, everyone, "test")
    assert compared["metrics"]["recall@10"]["other"] == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize("held_out", [None, {"hash_of": "user_id", "share": 0.4}])
@pytest.mark.parametrize("model", [None, RANKING, BINARY])
def test_validation_is_of_the_rows_that_pass(
    version: Path, manifest: Manifest, model: Any, held_out: Any
) -> None:
    sections = {} if held_out is None else {"input": {"validation": held_out}}
    split = "validation" if held_out is None else "train"
    trained = _train(version, manifest, model, evaluation={"filter": RELATED}, **sections)
    alone = _keep_alone(version, manifest, split, RELATED, version / split / "alone.tfrecord")
    plain = _train(version, alone, model, **sections)
    data, others = TrainingData(version, manifest), TrainingData(version, alone)
    validate, wanted = build_validate(trained.config, data), build_validate(plain.config, others)
    assert validate is not None
    assert wanted is not None
    found = validate(trained.model)
    assert found == wanted(trained.model)
    # Of a binary objective rows of label 0 are not ranked anyhow.
    ranks_by_label = held_out is None and "objective" in (model or {})
    unfiltered = build_validate(plain.config, data)(trained.model)  # type: ignore[misc]
    assert (found == unfiltered) is ranks_by_label
    rows = alone.split(split).rows
    if held_out is not None:
        rows = others.held_out_rows(InputConfig(validation=held_out))
    said = check_validation(trained.config, data) or ""
    assert said.startswith(f"validation is of {rows} of ")
    assert check_validation(plain.config, data) is None


@pytest.mark.parametrize(
    ("condition", "error", "said"),
    [
        ({"feature": "label", "value": 7}, TooFewRowsError, "evaluation.filter leaves no row"),
        ({"feature": "labels", "value": 1}, InputDataError, "evaluation.filter: dataset 'tiny'"),
        ({"feature": "label", "value": "a"}, ConfigError, "evaluation.filter: feature 'label'"),
    ],
)
def test_filters_that_leave_nothing_or_do_not_fit_are_refused(
    version: Path, manifest: Manifest, condition: dict[str, Any], error: type, said: str
) -> None:
    for per in ("event", "user"):
        trained = _train(version, manifest, evaluation={"filter": [condition], "per": [per]})
        with pytest.raises(error, match=said):
            evaluate_split(trained, "test")
    with pytest.raises(error, match=said):
        check_validation(trained.config, TrainingData(version, manifest))
