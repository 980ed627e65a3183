"""What a binary objective takes for a negative is relevant nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.training.input import FilterConfig
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation.comparison import compare_runs
from training.evaluation.evaluate import FullRanking, evaluate_full, evaluate_split
from training.evaluation.metrics import RankMeasures
from training.evaluation.prediction_files import measure_lists
from training.models.registry import build_model
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
    manifest = read_manifest(version)
    config = TrainConfig.model_validate(
        {"dataset": "d", "name": "n", "model": model,
         "evaluation": {"ks": [3, 10], "sampled_negatives": None, **evaluation}}
    )  # fmt: skip
    return TrainedModel(Path(), build_model(config.model, manifest, 3), config, manifest, version)


def count_rows(trained: TrainedModel) -> int:
    return int(evaluate_split(trained, "test")["rows"])


@pytest.mark.parametrize("per", ["event", "user"])
def test_an_evaluation_is_that_of_the_positive_rows(version: Path, per: str) -> None:
    found = evaluate_split(build_run(version, BINARY, per=[per]), "test")
    wanted = evaluate_split(build_run(version, BINARY, per=[per], **POSITIVE), "test")
    for own, alone in zip(found["protocols"], wanted["protocols"], strict=True):
        for system in ("model", "popularity"):  # Chance draws for every row that is read.
            assert own["systems"][system] == alone["systems"][system]
    every = evaluate_split(build_run(version, SOFTMAX, per=["event"]), "test")["rows"]
    positive = count_rows(build_run(version, SOFTMAX, per=["event"], **POSITIVE))
    assert found["rows_not_relevant"] == every - positive > 0
    assert found["users"] == wanted["users"]
    assert wanted["rows_not_relevant"] == 0


@pytest.mark.parametrize("per", ["event", "user"])
def test_a_comparison_counts_the_rows_of_the_first_run_for_both(version: Path, per: str) -> None:
    binary, softmax = (build_run(version, model, per=[per]) for model in (BINARY, SOFTMAX))
    alone = [build_run(version, model, per=[per], **POSITIVE) for model in (BINARY, SOFTMAX)]
    assert (
        compare_runs(binary, softmax, "test")["metrics"]
        == (compare_runs(*alone, "test")["metrics"])
    )
    left_out = compare_runs(binary, softmax, "test")["rows_not_relevant"]
    assert left_out == evaluate_split(binary, "test")["rows_not_relevant"] > 0
    found, wanted = compare_runs(softmax, binary, "test"), count_rows(softmax)
    assert found["rows_not_relevant"] == 0
    assert found["rows"] == wanted > compare_runs(binary, softmax, "test")["rows"] or per == "user"


@pytest.mark.parametrize("named", ["user", "row"])
def test_lists_are_measured_by_the_positive_rows(named: str, version: Path, tmp_path: Path) -> None:
    file = tmp_path / "lists.jsonl"
    names = [1000 + user for user in range(CONFIG.users)] if named == "user" else range(1, 91)
    lines = (f'{{"{named}": {name}, "items": [100, 101, 102]}}\n' for name in names)
    file.write_text("".join(lines))
    found = measure_lists(build_run(version, BINARY), file, "test", RankMeasures([3]))
    every = measure_lists(build_run(version, SOFTMAX), file, "test", RankMeasures([3]))
    assert found["rows_not_relevant"] > 0
    assert found["relevant"] < every["relevant"]
    assert found["rows"] + found["lists_of_others"] == len(names)
    if named == "user":
        alone = measure_lists(
            build_run(version, BINARY, **POSITIVE), file, "test", RankMeasures([3])
        )
        assert found["metrics"] == alone["metrics"]


def test_drawn_negatives_of_a_split_are_relevant_to_no_objective(version: Path) -> None:
    run = build_run(version, SOFTMAX, per=["event"])
    counts = replace(run.manifest.counts, drawn={"test": 7})
    drawn = replace(run, manifest=replace(run.manifest, counts=counts))
    found = evaluate_split(drawn, "test")
    assert found["rows"] == count_rows(build_run(version, SOFTMAX, per=["event"], **POSITIVE))
    assert found["rows_not_relevant"] > 0


def test_validation_without_a_positive_row_says_so(version: Path) -> None:
    negative = (FilterConfig(feature="label", value=0),)
    trained = build_run(version, BINARY)
    data = TrainingData(version, trained.manifest)
    ranking = FullRanking(
        RankMeasures((3,)), True, 8, evaluation_filter=negative, relevance="label", batches=1
    )
    with pytest.raises(InputDataError, match="no row has a relevant item") as caught:
        evaluate_full(require_retrieval(trained.model), data, "validation", ranking)
    assert caught.value.received == "8 rows"


def test_a_split_without_a_positive_row_is_refused(version: Path) -> None:
    negative = {"filter": [{"feature": "label", "value": 0}]}
    for per in ("event", "user"):
        trained = build_run(version, BINARY, per=[per], **negative)
        with pytest.raises(InputDataError, match="no row has a relevant item: label is 0"):
            evaluate_split(trained, "test")
        with pytest.raises(InputDataError, match="no row has a relevant item: label is 0"):
            compare_runs(trained, trained, "test")
