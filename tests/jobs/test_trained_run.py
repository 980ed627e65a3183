"""The commands after training: evaluate, predict, export, report."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import (
    EXPORT_FILE,
    find_exports,
    find_version,
    list_versions,
    roll_back,
)
from conf.artefacts.run import REPORT_FILE, read_json, resolve_run, write_json
from conf.errors import ConfigError, ExitCode, LaterLogError, UpstreamNotReadyError
from conf.publication.entries import hold_numbers
from jobs.compare import app as compare_app
from jobs.compare import print_comparison
from jobs.evaluate import app, evaluate
from jobs.export import app as export_app
from jobs.inspection.inspect_dataset import app as inspect_app
from jobs.models import app as models_app
from jobs.predict import app as predict_app
from jobs.reporting.report import app as report_app
from jobs.reporting.report import write_report
from jobs.support.run_app import run_app
from jobs.support.trained_run import override_section, restore_for_evaluation
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run
from tests.jobs.runs import write_tiny_run
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import find_checkpoint, load_run
from training.input.batches import build_eval_dataset


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


def test_ease_stands_beside_the_model_in_file_table_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = write_tiny_run(tmp_path, {"name": "dssm"}, TinyConfig(validation=False))
    assert run_app(app, ["--run", str(series), "--baselines"]) == ExitCode.OK
    run = resolve_run(str(series))
    metrics = read_json(run / "metrics.json")
    assert all("ease" in protocol["systems"] for protocol in metrics["protocols"])
    assert "ease" in read_json(run / "run_card.json")["metrics"]["systems"]
    said = f"EASE: {metrics['baselines']['ease']['pairs']:,} distinct pairs of 60 users of train"
    assert said in capsys.readouterr().out
    assert run_app(report_app, ["--run", str(series)]) == ExitCode.OK
    page = (run / REPORT_FILE).read_text(encoding="utf-8")
    assert said in page
    assert ">EASE</th>" in page
    with_lists = ["--run", str(series), "--baselines", "--predictions", "lists.jsonl"]
    assert run_app(app, with_lists) == ExitCode.CONFIG
    assert "stand beside the run's own model" in capsys.readouterr().err


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
        (["--split", "nope"], ExitCode.CONFIG, "no such split"),
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
    from conf.training.train import EvaluationConfig

    trained = EvaluationConfig(ks=(7,), mask_seen=False)
    found = override_section("evaluation", trained, ["evaluation.batch_size=5"])
    assert found == EvaluationConfig(ks=(7,), mask_seen=False, batch_size=5)
    with pytest.raises(ConfigError):
        override_section("evaluation", trained, ["predict.k=5"])


def test_inspect_shows_a_variable(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(resolve_run(str(series)))
    command = [run, "--variable", "movie_id", "--head", "3", "--json"]
    assert run_app(inspect_app, command) == ExitCode.OK
    shown = json.loads(capsys.readouterr().out)
    rows = load_run(run).model.tables["movie_id"].rows.numpy()
    assert (shown["dimensions"], shown["dtype"]) == (list(rows.shape), "float32")
    assert shown["norm"] == pytest.approx(np.linalg.norm(rows))
    np.testing.assert_array_equal([row["values"] for row in shown["first"]], rows[:3])
    assert run_app(inspect_app, [run, "--variable", "user_tower/dense/kernel"]) == ExitCode.OK
    assert "user_tower/dense/kernel" in capsys.readouterr().out
    assert run_app(inspect_app, [run, "--variable", "movieid"]) == ExitCode.CONFIG
    assert "movie_id" in capsys.readouterr().err


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
def ranking_series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(candidates=5)
    return write_tiny_run(tmp_path_factory.mktemp("rank"), RANKING, config)


def test_ranking_models_are_evaluated_by_task(
    ranking_series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["--run", str(ranking_series)]) == ExitCode.OK
    shown = capsys.readouterr().out
    for text in ("click", "AUC", "GAUC", "Log loss", "Mean prediction", "RMSE", "MAE", "0.5000"):
        assert text in shown
    assert run_app(app, ["--run", str(ranking_series), "--baselines"]) == ExitCode.CONFIG
    assert "--baselines rank the catalogue" in capsys.readouterr().err
    run = resolve_run(str(ranking_series))
    tasks = read_json(run / "metrics.json")["tasks"]
    card = read_json(run / "run_card.json")["metrics"]
    assert card["rows"] == 60
    assert card["tasks"]["click"]["model"]["auc"] == tasks["click"]["auc"]
    assert card["tasks"]["value"]["constant"]["rmse"] == tasks["value"]["constant"]["rmse"]
    assert run_app(report_app, ["--run", str(ranking_series)]) == ExitCode.OK
    page = (run / REPORT_FILE).read_text(encoding="utf-8")
    for text in ("Task click, binary.", "Task value, squared error.", "a constant", "GAUC"):
        assert text in page
    assert f"{tasks['value']['rmse']:.4f}" in page


def test_ranking_models_are_exported_and_predict(
    ranking_series: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = resolve_run(str(ranking_series))
    assert run_app(export_app, ["--run", str(ranking_series)]) == ExitCode.OK
    assert "outputs: click, value" in capsys.readouterr().out
    assert find_version(run / "export").name == "1"
    assert run_app(predict_app, ["--run", str(ranking_series), "--k", "3"]) == ExitCode.OK
    assert "first lists" in capsys.readouterr().out
    assert read_json(run / "run_card.json")["recommendations"]["split"] == "test"
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "name,user_id,gender,history,movie_id,genres\n"
        "a,1000,F,100|101,102,genre_0|genre_all\nb,-1,,,103,\n"
    )
    arguments = ["--run", str(ranking_series), "--input", str(rows), "--id", "name"]
    assert run_app(predict_app, [*arguments, "--log-format", "json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"scores": str(run / "scores.parquet")}
    table = pq.read_table(run / "scores.parquet")
    assert table.column_names == ["name", "click", "value"]
    assert table["name"].to_pylist() == ["a", "b"]
    assert read_json(run / "run_card.json")["scores"]["rows"] == 2
    for name in ("lists.json.gz", "lists.parquet"):  # Lists and scores have the same formats.
        target = str(tmp_path / name)
        assert run_app(predict_app, [*arguments, "--give", "lists", "--to", target]) == ExitCode.OK
        assert run_app(predict_app, [*arguments, "--to", str(tmp_path / f"s-{name}")]) == 0
    lists = pq.read_table(tmp_path / "lists.parquet").to_pylist()
    with gzip.open(tmp_path / "lists.json.gz", "rt") as lines:
        found = [json.loads(line) for line in lines]
    assert [(row["id"], row["items"]) for row in found] == [(r["id"], r["items"]) for r in lists]
    assert [row["id"] for row in found] == ["a", "b"]
    scores = pq.read_table(tmp_path / "s-lists.parquet").to_pylist()
    assert scores == table.to_pylist()
    capsys.readouterr()
    for more, said in (
        (["--give", "scores", "--k", "3"], "these options are about lists"),
        (["--to", str(tmp_path / "lists.gz")], "that ends in .parquet, .json"),
    ):
        assert run_app(predict_app, [*arguments, *more]) == ExitCode.CONFIG
        assert said in capsys.readouterr().err
    assert not (tmp_path / "lists.gz").exists()
    rows.write_text("user_id,gender,history,movie_id,genres\nx,F,,1,\n")
    assert run_app(predict_app, arguments[:4]) == ExitCode.INPUT_REFUSED
    assert f"{rows}, row 1: column 'user_id'" in capsys.readouterr().err
    assert run_app(predict_app, ["--run", str(run), "--id", "name"]) == ExitCode.CONFIG


@pytest.mark.parametrize("kind", ["ranking", "retrieval"])
def test_the_rows_of_a_split_are_scored_by_any_model(
    ranking_series: Path, predict_series: Path, tmp_path: Path, kind: str
) -> None:
    series, target = ranking_series if kind == "ranking" else predict_series, tmp_path / "s.json.gz"
    arguments = ["--run", str(series), "--split", "test", "--to", str(target)]
    assert run_app(predict_app, arguments) == ExitCode.OK
    with gzip.open(target, "rt") as lines:
        found = [json.loads(line) for line in lines]
    trained = load_run(resolve_run(str(series)))
    where, names = (trained.version_dir, trained.manifest), trained.model.inputs
    [rows] = build_eval_dataset(*where, "test", 1000, names)
    expected = (
        trained.model.predict(rows)
        if kind == "ranking"
        else {"score": np.sum(trained.model.embed_users(rows) * trained.model.embed_items(rows), 1)}
    )
    assert [row["row"] for row in found] == list(range(1, 61))
    for name, values in expected.items():
        np.testing.assert_allclose([row[name] for row in found], values, rtol=1e-5, atol=1e-6)
    assert set(found[0]) == {"row", *expected}
    assert run_app(predict_app, [*arguments, "--give", "lists"]) == ExitCode.OK
    with gzip.open(target, "rt") as lines:
        assert {"items", "scores"} < set(json.loads(next(lines)))


def _write_later(root: Path, name: str = "tiny", **changes: Any) -> Path:
    """A later version with other counts: most tokens have other ids, some are new."""
    config = TinyConfig(**{"users": 70, "items": 50, "seed": 1, **changes})
    return write_tiny_dataset(root, name, config, "20260102T000000Z-tiny")


def test_a_run_on_a_later_version_scores_as_its_export_does(
    ranking_series: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The export has the encoders of the run's own version inside: it takes raw values of any rows.
    later, run = _write_later(tmp_path), resolve_run(str(ranking_series))
    own = read_json(run / "metrics.json")
    command = ["--run", str(ranking_series), "--dataset", str(later)]
    assert run_app(app, [*command, "--export", str(run / "export")]) == ExitCode.OK
    assert "raw values" in capsys.readouterr().out
    replay = read_json(run / "metrics-served.json")
    assert (replay["dataset_version"], replay["replay"]["differing_rows"]) == (later.name, 0)
    assert replay["replay"]["rows"] == {"click": 70, "value": 70}
    assert run_app(app, command) == ExitCode.OK
    found = read_json(run / f"metrics-test-{later.name}.json")["tasks"]["click"]
    assert found["auc"] == pytest.approx(replay["tasks"]["click"]["auc"])
    assert read_json(run / "metrics.json") == own


@pytest.fixture(scope="module")
def predict_series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("predict"), {"name": "dssm"})


def test_every_user_gets_a_list(predict_series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(predict_app, ["--run", str(predict_series), "--k", "4"]) == ExitCode.OK
    assert "first lists" in capsys.readouterr().out
    run = resolve_run(str(predict_series))
    with gzip.open(run / "recommendations.json.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len({row["user"] for row in rows}) == len(rows) == 60
    assert {len(row["items"]) for row in rows} == {4}
    card = read_json(run / "run_card.json")
    assert card["recommendations"] == {
        "users": 60,
        "users_outside_vocabulary": 0,
        "file": str(run / "recommendations.json.gz"),
        "k": 4,
        "mask_seen": True,
        "split": "users",
        "as_of": None,
        "input": None,
        "only_users": None,
        "candidates": None,
        "checkpoint": "best",
    }


def test_lists_as_of_a_split_say_so(predict_series: Path, tmp_path: Path) -> None:
    run = resolve_run(str(predict_series))
    (tmp_path / "pool.csv").write_text("movie_id\n101\n102\n103\n")
    target = tmp_path / "lists.json.gz"
    command = ["--run", str(predict_series), "--as-of", "train", "--k", "2"]
    command += ["--candidates", str(tmp_path / "pool.csv"), "--to", str(target)]
    assert run_app(predict_app, command) == ExitCode.OK
    with gzip.open(target, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert {item for row in rows for item in row["items"]} == {101, 102, 103}
    card = read_json(run / "run_card.json")["recommendations"]
    assert (card["as_of"], card["split"], card["users"]) == ("train", None, 60)


def test_lists_are_measured_where_they_do_not_know_the_split(
    predict_series: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, known = str(predict_series), ["--set", "evaluation.ks=[5]"]
    assert run_app(predict_app, ["--run", run, "--as-of", "validation"]) == ExitCode.OK
    lists = resolve_run(run) / "recommendations.json.gz"
    command = ["--run", run, "--predictions", str(lists), *known]
    capsys.readouterr()
    assert run_app(app, command) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "60 users, 0 without a list" in shown
    assert "NDCG" in shown
    found = read_json(resolve_run(run) / "metrics-test-lists.json")["metrics"]
    whole = evaluate(predict_series, overrides=["evaluation.ks=[5]", "evaluation.per=user"])
    assert found == pytest.approx(whole["protocols"][0]["systems"]["model"])
    with monkeypatch.context() as patch:
        asked: list[Any] = []

        def restore(*args: Any) -> Any:
            asked.append(args[1])
            return restore_for_evaluation(*args)

        patch.setattr("jobs.evaluate.restore_for_evaluation", restore)
        assert run_app(app, [*command, "--checkpoint", "last"]) == ExitCode.OK
        assert asked == ["last"]
    assert run_app(app, [*command, "--split", "validation"]) == ExitCode.CONFIG
    assert "know the events of validation" in capsys.readouterr().err
    spelt = str(lists.parent / ".." / lists.parent.name / lists.name)
    other = ["--run", run, "--predictions", spelt, *known, "--split", "validation"]
    assert run_app(app, other) == ExitCode.CONFIG
    assert "know the events of validation" in capsys.readouterr().err
    assert run_app(predict_app, ["--run", run]) == ExitCode.OK
    assert run_app(app, command) == ExitCode.CONFIG
    assert "--as-of validation" in capsys.readouterr().err


def test_two_runs_are_compared_and_a_margin_is_a_gate(
    series: Path, predict_series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--run", str(series), "--against", str(series), "--margin"]
    assert run_app(compare_app, [*same, "0"]) == ExitCode.OK
    assert "passed: ndcg@10 is ahead by at least 0.0000" in capsys.readouterr().out
    assert run_app(compare_app, [*same, "0.01", "--log-format", "json"]) == ExitCode.GATE_FAILED
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["metric"], found["lead"]) == (False, "ndcg@10", 0.0)
    assert read_json(resolve_run(str(series)) / "comparison.json") == found
    one_user = ["--set", "evaluation.filter=[{feature: user_id, value: 3}]"]
    assert run_app(compare_app, [*same, "0", *one_user]) == ExitCode.GATE_FAILED
    shown = " ".join(capsys.readouterr().out.split())
    assert "too few users" in shown
    assert "not passed: ndcg@10 has no interval: it is of fewer than 20 users" in shown
    assert run_app(compare_app, [*same, "0", "--metric", "ndcg"]) == ExitCode.CONFIG
    others = ["--run", str(series), "--against", str(predict_series)]
    assert run_app(compare_app, others) == ExitCode.CONFIG
    assert "--dataset DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lead", "margin", "said"),
    [
        (-0.0625, -0.1, "passed: auc is behind by at most 0.0625"),
        (-0.0625, 0.0, "not passed: auc is behind by at most 0.0625"),
        (0.01, 0.02, "not passed: auc is ahead by at least 0.0100"),
    ],
)
def test_a_gate_says_what_is_ahead_and_what_is_behind(
    lead: float, margin: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"run": 0.5, "other": 0.5, "difference": 0.0, "low": None, "high": None}
    print_comparison({
        "split": "test", "protocol": "rows", "rows": 300, "users": 0, "run": "a", "against": "b",
        "metrics": {"auc": found}, "metric": "auc", "lead": lead, "margin": margin,
        "passed": lead >= margin,
    })  # fmt: skip
    shown = capsys.readouterr().out
    assert f"{said} with 95 % confidence; the margin is {margin}" in shown
    # Rows of a log without users are nobody's.
    assert "300 rows, of no users" in shown
    assert "too few rows" in shown


def test_runs_on_different_versions_are_compared_on_a_later_one(
    series: Path, predict_series: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = _write_later(tmp_path)
    command = ["--run", str(series), "--against", str(predict_series), "--log-format", "json"]
    assert run_app(compare_app, [*command, "--dataset", str(later)]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["dataset_version"], found["rows"]) == (later.name, 70)
    for name, at in (("run", series), ("other", predict_series)):
        alone = evaluate(at, dataset=str(later), overrides=["evaluation.sampled_negatives=null"])
        model = alone["protocols"][0]["systems"]["model"]
        assert found["metrics"]["ndcg@10"][name] == pytest.approx(model["ndcg@10"])


def test_a_filter_is_said_wherever_metrics_are_shown(
    ranking_series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--set", "evaluation.filter=[{feature: gender, value: 2}]"]
    run = resolve_run(str(ranking_series))
    said = "evaluation.filter: gender == 2: 30 of 60 rows"
    assert run_app(app, ["--run", str(run), *only]) == ExitCode.OK
    assert said in capsys.readouterr().out
    assert read_json(run / "metrics.json")["rows"] == 30
    assert read_json(run / "run_card.json")["metrics"]["filter"]["rows"] == 30
    assert run_app(report_app, ["--run", str(run)]) == ExitCode.OK
    assert f"30 rows of the test split ({said})" in (run / REPORT_FILE).read_text(encoding="utf-8")
    assert run_app(export_app, ["--run", str(run)]) == ExitCode.OK
    capsys.readouterr()
    served = ["--run", str(run), "--export", str(run / "export"), *only]
    assert run_app(app, served) == ExitCode.OK
    assert said in capsys.readouterr().out
    assert read_json(run / "metrics-served.json")["replay"]["rows"] == {"click": 30, "value": 30}
    assert run_app(inspect_app, [str(run)]) == ExitCode.OK
    assert said in " ".join(capsys.readouterr().out.split())
    assert run_app(compare_app, ["--run", str(run), "--against", str(run), *only]) == ExitCode.OK
    assert f"{said}, for both runs" in capsys.readouterr().out
    assert run_app(app, ["--run", str(run)]) == ExitCode.OK  # of all rows again
    card = read_json(run / "run_card.json")["metrics"]
    assert (card["rows"], card["filter"]) == (60, None)
    nobody = ["--set", "evaluation.filter=[{feature: gender, value: 77}]"]
    for command in (app, compare_app):
        asked = ["--run", str(run), *nobody]
        asked += ["--against", str(run)] if command is compare_app else []
        assert run_app(command, asked) == ExitCode.INPUT_REFUSED
        assert "evaluation.filter leaves no row" in capsys.readouterr().err
    evaluate(run)


def test_a_filter_of_the_run_is_not_taken_to_a_version_of_other_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_tiny_run(tmp_path, {"name": "mf"})
    later, run = _write_later(tmp_path / "later"), resolve_run(str(own))
    card = read_json(run / "run_card.json")

    def ask(filters: list[dict[str, Any]], *more: str) -> int:
        card["config"]["evaluation"]["filter"] = filters
        write_json(run / "run_card.json", card)
        return run_app(app, ["--run", str(own), "--dataset", str(later), *more])

    ids = [pq.read_table(at / "encoders" / "movie_id.parquet")["token"].to_pylist()
           for at in (Path(card["dataset"]["path"]), later)]  # fmt: skip
    moved = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    kept = [i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a == b]
    assert ask([{"feature": "movie_id", "op": "!=", "value": moved + 2}]) == ExitCode.CONFIG
    assert "movie_id" in capsys.readouterr().err
    assert ask([{"feature": "movie_id", "op": ">", "value": 2}]) == ExitCode.CONFIG
    for place in kept[:1]:
        assert ask([{"feature": "movie_id", "op": "!=", "value": place + 2}]) == ExitCode.OK
    assert ask([{"feature": "label", "value": 1}, {"feature": "genres", "value": 1}]) == ExitCode.OK
    given = ["--set", f"evaluation.filter=[{{feature: movie_id, op: '!=', value: {moved + 2}}}]"]
    assert ask([{"feature": "movie_id", "value": moved + 2}], *given) == ExitCode.OK


@pytest.mark.parametrize(
    ("name", "version_id", "changes", "said"),
    [
        ("other", "20260102T000000Z-tiny", {}, "other, and the run was trained on tiny"),
        ("tiny", "20250101T000000Z-tiny", {}, "may have been trained on its held-out rows"),
        ("tiny", "20260102T000000Z-tiny", {"keyed": True}, "compute features in other ways"),
    ],
)
def test_a_version_that_a_run_cannot_be_measured_on_is_refused(
    series: Path, tmp_path: Path, name: str, version_id: str, changes: dict, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = write_tiny_dataset(tmp_path, name, TinyConfig(**changes), version_id)
    command = ["--run", str(series), "--dataset", str(other)]
    assert run_app(app, command) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


def _publish(model: Path, dataset_version: str) -> None:
    """Publishes a version of a model, as far as its card is read."""
    files = {"saved_model.pb": {"bytes": 3}}
    with (
        hold_numbers(model, EXPORT_FILE) as held,
        held.next_entry(keep=2) as (staging, target),
    ):
        (staging / "saved_model.pb").write_bytes(b"abc")
        card = {"run_path": f"/run{target.name}", "dataset_version": dataset_version}
        write_json(staging / "export.json", {**card, "files": files})


def test_a_version_is_withdrawn_and_its_number_is_not_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: str) -> Any:
        capsys.readouterr()
        name, *options = arguments
        command = [name, str(model), *options, "--log-format", "json"]
        code = run_app(models_app, command)
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line) for line in lines] if code == ExitCode.OK else code

    model = tmp_path / "tiny"
    assert ask("published") == ask("list") == ExitCode.NOT_READY
    for day in ("20260101", "20260102"):
        _publish(model, day)
    assert ask("published") == [{"version": 2, "run": "/run2"}]
    assert ask("published", "--before", "versions/20260102") == [{"version": 1, "run": "/run1"}]
    assert ask("published", "--before", "20260101") == ExitCode.NOT_READY
    (tmp_path / "clicks" / "versions" / "20260102").mkdir(parents=True)
    (tmp_path / "clicks" / "versions" / "20260102" / "manifest.json").touch()
    (tmp_path / "clicks" / "CURRENT").write_text("20260102\n")
    assert ask("published", "--before", str(tmp_path / "clicks")) == [
        {"version": 1, "run": "/run1"}
    ]
    assert ask("published", "--before", "clicks") == ExitCode.CONFIG
    assert ask("rollback", "--to", "7") == ExitCode.CONFIG
    assert ask("rollback") == [{"published": 1, "withdrawn": [2]}]
    assert ask("rollback", "--to", "1") == [{"published": 1, "withdrawn": []}]  # a repeated task
    assert ask("rollback") == ExitCode.CONFIG  # nothing is before it
    assert [(v["version"], v["published"], v["withdrawn"]) for v in ask("list")] == [
        (1, True, False),
        (2, False, True),
    ]
    _publish(model, "20260103")
    assert list_versions(model) == [1, 3]
    (model / "1" / "saved_model.pb").write_bytes(b"")
    assert ask("rollback") == ExitCode.INPUT_REFUSED
    assert list_versions(model) == [1, 3]
    for day in ("20260104", "20260105"):
        _publish(model, day)
    assert list_versions(model) == [4, 5]  # two are kept, and of the withdrawn ones as many
    assert ask("rollback", "--to", "4") == [{"published": 4, "withdrawn": [5]}]
    assert [v["version"] for v in ask("list")] == [2, 4, 5]
    with (
        hold_numbers(model, EXPORT_FILE),
        pytest.raises(UpstreamNotReadyError, match="being written"),
    ):
        roll_back(model, 4)


def test_a_run_of_earlier_days_does_not_replace_one_that_knows_later_ones(
    ranking_series: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise LaterLogError("this version ends earlier")

    monkeypatch.setattr("jobs.compare.restore_run", refuse)
    command = ["--run", str(ranking_series), "--against", "later"]
    assert run_app(compare_app, command) == ExitCode.CONFIG
    capsys.readouterr()
    command += ["--margin", "-1"]
    assert run_app(compare_app, [*command, "--log-format", "json"]) == ExitCode.GATE_FAILED
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["why"]) == (False, "this version ends earlier")
    assert run_app(compare_app, command) == ExitCode.GATE_FAILED
    assert "not passed: later: this version ends earlier" in capsys.readouterr().out


def test_ranking_runs_are_compared_by_task(
    ranking_series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--run", str(ranking_series), "--against", str(ranking_series)]
    assert run_app(compare_app, [*command, "--log-format", "json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["passed"]) == ("auc", None)
    known = evaluate(ranking_series)["tasks"]["click"]
    assert found["metrics"]["auc"]["run"] == pytest.approx(known["auc"])
    assert found["metrics"]["log_loss"]["other"] == pytest.approx(known["log_loss"])
    assert sum(group["rows"] for group in known["slices"]["item_frequency"]) == known["rows"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--as-of", "train", "--split", "test"], "both say which rows"),
        (["--as-of", "train", "--input", "rows.csv"], "both say which rows"),
        (["--users", "users.csv", "--split", "test"], "both say which rows"),
        (["--as-of", "never"], "'train', 'validation'"),
        (["--candidates", "pool.xml"], "format of the input is not known"),
    ],
)
def test_lists_of_two_minds_are_refused(
    predict_series: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(predict_app, ["--run", str(predict_series), *options]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


def test_the_run_s_own_length_is_the_default(
    predict_series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_app(predict_app, ["--run", str(predict_series), "--log-format", "json"]) == ExitCode.OK
    )
    file = Path(json.loads(capsys.readouterr().out)["recommendations"])
    with gzip.open(file, "rt") as lines:
        assert len(json.loads(next(lines))["items"]) == 20


def _raw_batch(run: Path, split: str, card: dict) -> dict[str, tf.Tensor]:
    """The raw tokens that a split's records were encoded from, as a client would send them."""
    version = Path(read_json(run / "run_card.json")["dataset"]["path"])
    manifest = read_manifest(version)
    signature = "user_embedding" if split == "users" else "item_embedding"
    inputs = {i["name"]: i for i in card["signatures"][signature]["inputs"]}
    [encoded] = build_eval_dataset(version, manifest, split, 1000, tuple(inputs))
    raw = {}
    for name, values in encoded.items():
        encoding = manifest.schema[name].encoding
        table = pq.read_table(version / "encoders" / f"{encoding}.parquet")
        tokens = [inputs[name]["pad_token"], None, *table["token"].to_pylist()]
        rows = values.numpy().tolist()
        raw[name] = tf.constant(
            [[tokens[i] for i in row] if isinstance(row, list) else tokens[row] for row in rows],
            tf.int64 if inputs[name]["dtype"] == "int64" else tf.string,
        )
    return raw


@pytest.mark.parametrize(
    "model",
    [
        {"name": "dssm", "user_hidden_units": [8]},
        {"name": "mf", "embedding_dim": 8},
    ],
)
def test_towers_fed_with_raw_tokens_give_the_exported_vectors(
    model: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = write_tiny_run(tmp_path, model)
    assert run_app(export_app, ["--run", str(series)]) == ExitCode.OK
    assert "40 items, 60 users" in capsys.readouterr().out
    run = resolve_run(str(series))
    export = find_version(run / "export")
    card = read_json(export / "export.json")
    served = tf.saved_model.load(str(export))
    assert card["model"] == model["name"]
    assert read_json(run / "run_card.json")["timing"]["export_seconds"] > 0
    for signature, name, split in (
        ("user_embedding", "users", "users"),
        ("item_embedding", "items", "catalog"),
    ):
        table = pq.read_table(export / "embeddings" / f"{name}.parquet")
        raw = _raw_batch(run, split, card)
        found = served.signatures[signature](**raw)["embedding"].numpy()
        vectors = dict(zip(table["key"].to_pylist(), table["vector"].to_pylist(), strict=True))
        keys = raw["user_id" if split == "users" else "movie_id"].numpy().tolist()
        np.testing.assert_allclose(found, [vectors[key] for key in keys], atol=1e-6)


def test_json_names_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = write_tiny_run(tmp_path, {"name": "mf"})
    assert run_app(export_app, ["--run", str(series), "--log-format", "json"]) == ExitCode.OK
    target = Path(json.loads(capsys.readouterr().out)["export"])
    assert (target / "saved_model.pb").is_file()
    once = ["--run", str(series), "--once", "--log-format", "json"]
    assert run_app(export_app, once) == ExitCode.OK
    assert Path(json.loads(capsys.readouterr().out)["export"]) == target
    assert list_versions(target.parent) == [1]
    card, point = read_json(target / EXPORT_FILE), find_checkpoint(resolve_run(str(series)))
    assert card["checkpoint"] == {"name": "best", "epoch": point.epoch, "batch": point.batch}
    wanted = (point.epoch, point.batch)
    for checkpoint, count in ((wanted, 1), ((wanted[0] + 1, wanted[1]), 0), (None, 1)):
        assert len(find_exports(target.parent, card["run_path"], checkpoint)) == count
    arguments = ["--run", str(series), "--to", str(tmp_path / "models"), "--name", "a/b"]
    assert run_app(export_app, arguments) == ExitCode.CONFIG


@pytest.fixture(scope="module")
def report_series(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    config = FakeConfig(users=30, items=12, title=None)
    return write_run(root / "runs", write_dataset(root / "datasets", config), config).parent.parent


def test_a_series_stands_for_its_last_finished_run(report_series, capsys):
    assert run_app(report_app, ["--run", str(report_series)]) == 0
    report = Path(capsys.readouterr().out.strip())
    assert report.name == REPORT_FILE
    assert report.parent.parent == report_series / "runs"
    assert report.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_writing_again_gives_the_same_bytes_and_leaves_nothing_behind(report_series):
    report = write_report(report_series)
    first = report.read_bytes()
    before = sorted(entry.name for entry in report.parent.iterdir())
    assert write_report(report.parent).read_bytes() == first
    assert sorted(entry.name for entry in report.parent.iterdir()) == before


def test_a_failure_keeps_the_earlier_report(report_series, tmp_path, monkeypatch):
    run = shutil.copytree(write_report(report_series).parent, tmp_path / "run")
    first = (run / REPORT_FILE).read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    assert (run / REPORT_FILE).read_bytes() == first
    assert [entry.name for entry in run.glob(".*")] == []


def test_no_run_is_not_ready(tmp_path, capsys):
    with pytest.raises(UpstreamNotReadyError):
        write_report(tmp_path)
    assert run_app(report_app, ["--run", str(tmp_path)]) == 4
    assert "sluice train" in capsys.readouterr().err


def test_needs_neither_side(report_series):
    code = (
        "import sys; from jobs.reporting.report import write_report; from pathlib import Path;"
        f"import jobs.inspection.inspect_dataset; write_report(Path({str(report_series)!r}));"
        "print([m for m in ('tensorflow', 'keras', 'pyspark') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
