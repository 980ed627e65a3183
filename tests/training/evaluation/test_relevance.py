"""What does not train as a positive is relevant nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import MANIFEST_FILE
from conf.schema import FeatureSchema, FeatureSpec
from conf.storage.atomic_output import write_text_atomic
from conf.training.train import TrainConfig
from tests.training.evaluation.measured import build_measured, rewrite_records
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import compare_runs, evaluate_split
from training.evaluation.item_index import build_item_index
from training.evaluation.systems import read_popularity
from training.loop.validation import build_validate
from training.models.retrieval import require_retrieval
from training.reader.training_data import TrainingData

BINARY = {"name": "mf", "objective": {"kind": "binary"}}
SOFTMAX = {"name": "mf"}
POSITIVE = {"filter": [{"feature": "label", "value": 1}]}
CONFIG = TinyConfig(users=30, events_per_user=14, leave_out=3, own_group=0.5)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("relevance"), config=CONFIG)


def build_run(version: Path, model: dict[str, Any], **evaluation: Any) -> TrainedModel:
    evaluation = {"ks": [3, 10], "sampled_negatives": None, **evaluation}
    return build_measured(version, model, evaluation=evaluation)


def count_relevant(run: TrainedModel) -> tuple[int, int]:
    found = evaluate_split(run, "test")
    return int(found["rows"]), int(found["rows_not_relevant"])


@pytest.mark.parametrize("per", ["event", "user"])
def test_an_evaluation_is_that_of_the_positive_rows(version: Path, per: str) -> None:
    found = evaluate_split(build_run(version, BINARY, per=[per]), "test")
    wanted = evaluate_split(build_run(version, BINARY, per=[per], **POSITIVE), "test")
    for own, alone in zip(found["protocols"], wanted["protocols"], strict=True):
        for system in ("model", "popularity"):  # Chance draws for every row that is read.
            assert own["systems"][system] == alone["systems"][system]
    every, _ = count_relevant(build_run(version, SOFTMAX, per=["event"]))
    positive, _ = count_relevant(build_run(version, SOFTMAX, per=["event"], **POSITIVE))
    assert found["rows_not_relevant"] == every - positive > 0
    assert found["users"] == wanted["users"]
    assert wanted["rows_not_relevant"] == 0


@pytest.mark.parametrize("per", ["event", "user"])
def test_a_comparison_counts_the_rows_of_the_first_run_for_both(version: Path, per: str) -> None:
    binary, softmax = (build_run(version, model, per=[per]) for model in (BINARY, SOFTMAX))
    alone = [build_run(version, model, per=[per], **POSITIVE) for model in (BINARY, SOFTMAX)]
    found, back = compare_runs(binary, softmax, "test"), compare_runs(softmax, binary, "test")
    assert found["metrics"] == compare_runs(*alone, "test")["metrics"]
    assert found["rows_not_relevant"] == count_relevant(binary)[1] > 0
    assert (back["rows"], back["rows_not_relevant"]) == count_relevant(softmax)
    assert back["rows_not_relevant"] == 0
    assert back["rows"] > found["rows"] or per == "user"


def test_drawn_negatives_of_a_split_are_relevant_to_no_objective(version: Path) -> None:
    run = build_run(version, SOFTMAX, per=["event"])
    counts = replace(run.manifest.counts, drawn={"test": 7})
    drawn = replace(run, manifest=replace(run.manifest, counts=counts))
    rows, others = count_relevant(drawn)
    assert rows == count_relevant(build_run(version, SOFTMAX, per=["event"], **POSITIVE))[0]
    assert others > 0


@pytest.mark.parametrize("per", ["event", "user"])
def test_a_split_without_a_positive_row_is_refused(version: Path, per: str) -> None:
    negative = {"filter": [{"feature": "label", "value": 0}]}
    with pytest.raises(InputDataError, match="no row has a relevant item"):
        evaluate_split(build_run(version, BINARY, per=[per], **negative), "test")


BALANCED = {"class_balance": {"feature": "label", "shares": {0: 0.0, 1: 1.0}}}


def with_input(run: TrainedModel, model: dict[str, Any] | None = None, **settings) -> TrainedModel:
    changed = {**run.config.resolved(), "input": settings, **({"model": model} if model else {})}
    return replace(run, config=TrainConfig.model_validate(changed))


@pytest.mark.parametrize("settings", [POSITIVE, BALANCED])
def test_what_the_input_leaves_out_by_its_label_is_relevant_nowhere(
    version: Path, settings: dict[str, Any]
) -> None:
    run = build_run(version, SOFTMAX, per=["event"])
    every, _ = count_relevant(run)
    clicks, _ = count_relevant(build_run(version, BINARY, per=["event"]))
    trained = with_input(run, **settings)
    assert count_relevant(trained) == (clicks, every - clicks)
    found = build_validate(trained.config, TrainingData(version, run.manifest))
    alone = with_input(build_run(version, SOFTMAX, **POSITIVE))
    wanted = build_validate(alone.config, TrainingData(version, run.manifest))
    assert found is not None
    assert wanted is not None
    assert found(run.model) == wanted(run.model)
    per_user = with_input(build_run(version, SOFTMAX, per=["user"]), **settings)
    binary = build_run(version, BINARY, per=["user"])
    assert count_relevant(per_user) == count_relevant(binary)
    assert compare_runs(trained, run, "test")["rows_not_relevant"] == every - clicks
    every_row = {"name": "mf", "objective": {"kind": "sampled_softmax", "positives": "every_row"}}
    assert count_relevant(with_input(run, every_row, **settings)) == (every, 0)


def test_rows_of_weight_0_are_relevant_nowhere_and_make_nothing_popular(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=CONFIG)
    manifest = read_manifest(version)

    def weigh(features: Any) -> None:
        if "label" in features:
            features["weight"].float_list.value[:] = features["label"].float_list.value

    for split in manifest.splits:
        manifest = rewrite_records(version, split.name, weigh, manifest)
    schema = FeatureSchema((*manifest.schema.features, FeatureSpec("weight", "float32", "weight")))
    weights = {"train": {"weight": {"zeros": 1}}}
    manifest = replace(manifest, schema=schema, statistics=weights)
    write_text_atomic(version / MANIFEST_FILE, manifest.dumps())
    run = build_run(version, SOFTMAX, per=["event"])
    clicks = count_relevant(build_run(version, BINARY, per=["event"]))
    assert count_relevant(run) == clicks
    plain = replace(run, manifest=replace(manifest, statistics={}))
    ids = build_item_index(require_retrieval(run.model), version, manifest, 64).ids
    popular, every = read_popularity(run, ids), read_popularity(plain, ids)
    assert popular.sum() < every.sum()
    taught = with_input(plain, **POSITIVE)
    assert popular.tolist() == read_popularity(taught, ids).tolist()
