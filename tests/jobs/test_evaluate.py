from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.errors import ConfigError, ExitCode
from conf.run import read_json, resolve_run
from jobs.cli import run_app
from jobs.evaluate import app, evaluate
from jobs.trained_run import override_section
from tests.jobs.runs import write_tiny_run
from tests.training.fixtures import TinyConfig


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    return write_tiny_run(root, {"name": "dssm"}, TinyConfig(validation=False))


def test_metrics_stand_beside_the_baselines_in_file_card_and_table(
    series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["--run", str(series)]) == ExitCode.OK
    run = resolve_run(str(series))
    metrics = read_json(run / "metrics.json")
    card = read_json(run / "run_card.json")
    names = [protocol["name"] for protocol in metrics["protocols"]]
    assert names == ["full_unseen", "full_all", "sampled_9"]
    assert card["metrics"]["systems"] == metrics["protocols"][0]["systems"]
    assert card["timing"]["evaluate_seconds"] > 0
    assert card["status"] == "trained"
    shown = capsys.readouterr().out
    for text in ("full_unseen (headline)", "popularity", "random", "ndcg@10", "AUC"):
        assert text in shown


def test_overrides_reach_the_evaluation_and_json_is_json(
    series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--run",
        str(series),
        "--set",
        "evaluation.ks=[3]",
        "--set",
        "evaluation.mask_seen=false",
        "--log-format",
        "json",
    ]
    assert run_app(app, arguments) == ExitCode.OK
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["headline"] == "full_all"
    assert set(metrics["protocols"][0]["systems"]["model"]) == {
        "hit_rate@3",
        "recall@3",
        "ndcg@3",
        "mrr",
    }


def test_another_split_leaves_the_test_metrics_alone(series: Path) -> None:
    evaluate(series)
    run = resolve_run(str(series))
    before = (run / "metrics.json").read_bytes()
    assert evaluate(series, split="train", checkpoint="last")["split"] == "train"
    assert (run / "metrics.json").read_bytes() == before
    assert read_json(run / "metrics-train.json")["checkpoint"] == "last"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--split", "validation"], ExitCode.INPUT_REFUSED, "is empty"),
        (["--split", "catalog"], ExitCode.INPUT_REFUSED, "'catalog' holds one record per item"),
        (["--split", "users"], ExitCode.INPUT_REFUSED, "'users' holds one record per user"),
        (["--split", "nope"], ExitCode.INPUT_REFUSED, "no such split"),
        (["--set", "evaluation.kz=[1]"], ExitCode.CONFIG, "did you mean 'ks'"),
        (["--set", "model.name=mf"], ExitCode.CONFIG, "evaluation.ks"),
        (["--set", "evaluation.ks=[0]"], ExitCode.CONFIG, "1 or more"),
        (["--checkpoint", "worst"], ExitCode.CONFIG, "worst"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    series: Path,
    arguments: list[str],
    code: ExitCode,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(app, ["--run", str(series), *arguments]) == code
    assert said in capsys.readouterr().err


def test_a_run_that_is_not_there_is_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["--run", str(tmp_path)]) == ExitCode.NOT_READY
    assert "no finished training run" in capsys.readouterr().err


def test_overrides_keep_what_the_run_was_trained_with() -> None:
    from conf.training import EvaluationConfig

    trained = EvaluationConfig(ks=(7,), mask_seen=False)
    found = override_section("evaluation", trained, ["evaluation.batch_size=5"])
    assert found == EvaluationConfig(ks=(7,), mask_seen=False, batch_size=5)
    with pytest.raises(ConfigError):
        override_section("evaluation", trained, ["predict.k=5"])
