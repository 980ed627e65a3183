"""Ranked lists that were written, measured as an evaluation measures a model's own."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError
from tests.training.apply.predictions import write_lists
from tests.training.evaluation.measured import build_measured
from tests.training.evaluation.test_users import CONFIG, KS, _configure
from tests.training.tiny_dataset import write_tiny_dataset
from training.apply.answers import Source
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.evaluation.metrics import RankMeasures
from training.evaluation.prediction_files import measure_lists


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return build_measured(write_tiny_dataset(tmp_path_factory.mktemp("several"), config=CONFIG))


@pytest.fixture(scope="module")
def lists(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    target = tmp_path_factory.mktemp("lists") / "lists.json.gz"
    write_lists(trained, target, 12, Source(as_of="validation"))
    with gzip.open(target, "rt") as lines:
        return [json.loads(line) for line in lines]


def _write(path: Path, lists: list) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lists))
    return path


def test_written_lists_have_the_metrics_of_the_evaluation(
    trained: TrainedModel, lists: list[dict], tmp_path: Path
) -> None:
    protocol = evaluate_split(_configure(trained, per="user"), "test")["protocols"][0]
    file = _write(tmp_path / "lists.jsonl", lists)
    found = measure_lists(trained, file, "test", RankMeasures((*KS, 100)))
    assert found["metrics"] == pytest.approx(protocol["systems"]["model"], abs=1e-12)
    assert (found["per"], found["ks"], found["rows"]) == ("user", list(KS), CONFIG.users)
    assert (found["without_list"], found["lists_of_others"]) == (0, 0)
    assert found["met_before"] == protocol["left_out_as_seen"] > 0
    kept = measure_lists(_configure(trained, mask_seen=False), file, "test", RankMeasures(KS))
    assert (kept["met_before"], kept["metrics"]) == (0, found["metrics"])
    plain = [{"user": entry["user"], "items": entry["items"]} for entry in lists]
    again = measure_lists(
        trained, _write(tmp_path / "plain.jsonl", plain), "test", RankMeasures(KS)
    )
    assert again["metrics"] == pytest.approx(found["metrics"])
    some = [*plain[:10], {"user": 7.0, "items": [100]}, {"user": "²", "items": []}]
    part = measure_lists(trained, _write(tmp_path / "some.jsonl", some), "test", RankMeasures(KS))
    assert (part["without_list"], part["lists_of_others"], part["rows"]) == (20, 2, 30)


def test_lists_of_rows_are_measured_against_their_items(
    trained: TrainedModel, tmp_path: Path
) -> None:
    keys = replace(trained.manifest.keys, user=None, seen=None, candidates=None)
    alone = replace(_configure(trained), manifest=replace(trained.manifest, keys=keys))
    write_lists(alone, tmp_path / "rows.json.gz", 10, keep_seen=True)
    found = measure_lists(alone, tmp_path / "rows.json.gz", "test", RankMeasures(KS))
    report = evaluate_split(alone, "test")
    systems = report["protocols"][0]["systems"]["model"]
    assert report["users"] == report["rows"] == 90  # Nobody has a name: each row is a user's.
    assert found["met_before"] is None
    assert (found["per"], found["rows"]) == ("row", 90)
    assert found["outside_catalogue"] == found["users_outside_catalogue"]
    for name in ("hit_rate@3", "ndcg@10", "recall@1"):
        assert found["metrics"][name] == pytest.approx(systems[name])


@pytest.mark.parametrize(
    ("entries", "error", "said"),
    [
        ([], InputDataError, "no lists"),
        ([{"items": [101]}], ConfigError, "nothing tells which events"),
        ([{"user": 1000, "items": [101]}, {"row": 1, "items": [101]}], ConfigError, "row 2"),
        ([{"user": 1000, "items": [101]}] * 2, InputDataError, "row 2: a second list"),
        ([{"user": 1000, "items": [101, 102, 101]}], InputDataError, "row 1: an item is there"),
        ([{"user": 1000, "items": [101, 102], "scores": [1, 2]}], InputDataError, "not in order"),
        ([{"user": 1000, "items": [101], "scores": [math.nan]}], InputDataError, "not a ranked"),
        ([{"row": "a", "items": [101]}], InputDataError, "row 1: not a ranked list"),
    ],
)
def test_files_that_are_no_lists_are_refused(
    trained: TrainedModel, entries: list, error: type[Exception], said: str, tmp_path: Path
) -> None:
    file = _write(tmp_path / "lists.jsonl", entries)
    with pytest.raises(error, match=said):
        measure_lists(trained, file, "test", RankMeasures((1,)))
    with pytest.raises(InputDataError, match="no such file"):
        measure_lists(trained, tmp_path / "nothing.jsonl", "test", RankMeasures((1,)))
