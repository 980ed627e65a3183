"""Metrics of one's own: what they are given, where they are shown, what is refused and told."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from conf.errors import ConfigError, ExitCode, OwnCodeError
from conf.metrics import find_direction, is_minimised
from conf.training.train import EvaluationConfig, TrainConfig
from jobs.reporting.report import write_report
from jobs.support.formatting import read_task_metrics
from training.checkpoint.restore import load_run
from training.evaluation.evaluate import evaluate_split
from training.fit import fit_run, plan_run
from training.input.batches import build_eval_dataset
from training.monitoring.progress import NoProgress
from training.monitoring.run_logs import EpochRecord, read_history
from training.refit import fit_chosen

METRICS = """
import numpy as np

def brier(labels, scores):
    return np.mean((labels - scores) ** 2)

def accuracy(labels, scores, weights, threshold=0.5):
    return np.average((scores > threshold) == (labels > 0.5), weights=weights)

def undefined(labels, scores):
    return None if len(labels) != 16 else 0.5

def sorting(labels, scores):
    scores.sort()
    return scores[0]

def writing(labels, scores):
    scores.setflags(write=True)
    return scores[0]

def imaginary(labels, scores):
    return np.complex64(1j)

def huge(labels, scores):
    return 10**400

def enormous(labels, scores):
    return 1e39

def leaving(labels, scores):
    raise SystemExit(0)

def few(labels, scores, most=16):
    if len(labels) > most:
        raise RuntimeError("not these")
    return float(np.mean(scores))

def rows(labels, scores):
    return labels - scores

def words(labels, scores):
    return "much"

def broken(labels, scores):
    return labels["no"]

def of_ranks(ranks, k):
    return ranks[:, 0] <= k
"""


class Messages(NoProgress):
    """Keeps what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.bests: list[bool] = []

    def message(self, text: str, **fields: Any) -> None:
        self.texts.append(text)

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        self.bests.append(best)


GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"
OWN_MODULES = {"own_metrics.py": METRICS}
pytestmark = pytest.mark.usefixtures("in_own_folder")


def own(function: str, **settings: Any) -> dict[str, Any]:
    return {"function": f"own_metrics:{function}", **settings}


def plan(version: Path, root: Path, metrics: dict[str, Any], **settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(version),
            "name": "own",
            "root": str(root),
            "model": {"kind": "ranking", "network": "lr", "embedding_dim": 4},
            "input": {"batch_size": 64},
            "evaluation": {"metrics": metrics},
            "fit": {"epochs": 2},
            **settings,
        }
    )


def test_metrics_are_those_of_all_rows_in_epochs_and_evaluation(
    tiny_version: Path, tmp_path: Path
) -> None:
    metrics = {
        "own_brier": own("brier", direction="lower"),
        "own_accuracy": own("accuracy", params={"threshold": 0.4}),
    }
    fit = {"epochs": 3, "early_stopping": {"metric": "own_brier", "patience": 5}}
    run = fit_run(plan(tiny_version, tmp_path, metrics, fit=fit), NoProgress())
    history = read_history(run)
    found = [record.validation["own_brier"] for record in history]
    assert all(0 < value < 1 for value in found)
    assert is_minimised("own_brier")
    assert is_minimised("like/own_brier")
    card = json.loads((run / "run_card.json").read_text())
    assert card["training"]["best_epoch"] == int(np.argmin(found)) + 1
    trained = load_run(run)
    values = evaluate_split(trained, "test")["tasks"]["label"]
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, "test", 1000)
    labels = batch["label"].numpy()
    scores = trained.model.predict(batch)["label"].numpy()
    expected = {
        "own_brier": np.mean((labels - scores) ** 2),
        "own_accuracy": np.mean((scores > 0.4) == (labels > 0.5)),
    }
    assert values["own"] == pytest.approx(expected, rel=1e-5)
    shown = read_task_metrics(values)
    assert shown["own_brier"] == (pytest.approx(expected["own_brier"], rel=1e-5), None)
    (run / "metrics.json").write_text(json.dumps(evaluate_split(trained, "test")))
    assert write_report(run).read_text().count("own_accuracy") >= 2  # Of epochs, and of the test.


def test_a_metric_that_is_not_defined_on_a_split_is_told(
    tiny_version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit = {"epochs": 3, "early_stopping": {"metric": "own_none", "patience": 1}}
    config = plan(tiny_version, tmp_path, {"own_none": own("undefined")}, fit=fit)
    messages = Messages()
    with caplog.at_level(logging.WARNING):
        run = fit_run(config, messages)
    assert "metric own_none of task label is not defined on these" in caplog.text
    history = read_history(run)
    assert not any("own_none" in record.validation for record in history)
    # Nothing is known to be better than the last epoch, and nothing stops.
    training = json.loads((run / "run_card.json").read_text())["training"]
    assert (training["best_epoch"], training["selected_by"]) == (3, None)
    assert any("own_none was not defined in any epoch" in text for text in messages.texts)
    assert not any(messages.bests)
    values = evaluate_split(load_run(run), "test")["tasks"]["label"]
    assert values["own"] == {"own_none": None}
    assert 0 < values["auc"] < 1


def test_a_refit_by_a_metric_that_is_not_defined_says_what_to_change(
    tiny_version: Path, tmp_path: Path
) -> None:
    fit = {"epochs": 1, "early_stopping": {"metric": "own_none"}, "refit": True}
    rows = {"batch_size": 64, "validation": {"hash_of": "user_id", "share": 0.3}}
    config = plan(tiny_version, tmp_path, {"own_none": own("undefined")}, fit=fit, input=rows)
    with pytest.raises(ConfigError, match=r"not defined on the held-out") as caught:
        fit_chosen(config, NoProgress())
    assert "fit.early_stopping.metric" in str(caught.value.fix)
    assert "space" not in str(caught.value.fix)


@pytest.mark.parametrize("function", ["huge", "enormous"])
def test_a_number_above_what_curves_hold_is_none(
    function: str, tiny_version: Path, tmp_path: Path
) -> None:
    run = fit_run(plan(tiny_version, tmp_path, {"own_huge": own(function)}), NoProgress())
    assert "own_huge" not in read_history(run)[0].validation


@pytest.mark.parametrize("validation", [None, {"every_steps": 2}])
def test_a_metric_that_fails_on_the_split_loses_no_step(
    validation: dict[str, int] | None, tiny_version: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The function is corrected, and training goes on where it was."""
    fit = {"epochs": 2, "validation": validation}
    config = plan(tiny_version, tmp_path / "a", {"own_few": own("few")}, fit=fit)
    messages = Messages()
    with pytest.raises(OwnCodeError, match=r"fails on \d\d rows"):
        fit_run(config, messages)
    assert any("the state is saved" in text and "--resume" in text for text in messages.texts)
    monkeypatch.setattr(sys.modules["own_metrics"], "few", lambda labels, scores: scores.mean())
    resumed = read_history(fit_run(config, messages, resume=True))
    where = "resuming in epoch 1 after step " + ("2" if validation else "12")
    assert where in messages.texts
    whole = read_history(
        fit_run(config.model_copy(update={"root": str(tmp_path / "b")}), NoProgress())
    )
    assert [r.loss for r in resumed] == [r.loss for r in whole]
    assert [r.validation for r in resumed] == [r.validation for r in whole]


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        (own("rows"), r"ndarray of shape \(16,\).*np\.average"),
        (own("words"), "str of shape"),
        (own("sorting"), "(?s)fails on 16 rows.*read-only"),
        (own("writing"), "(?s)fails on 16 rows.*WRITEABLE"),
        (own("imaginary"), "complex64 of shape"),
        (own("leaving"), r"fails on 16 rows.*SystemExit in \S*own_metrics\.py:\d+"),
        (own("broken"), r"fails on 16 rows.*own_metrics\.py:\d+"),
        (own("accuracy", params={"treshold": 1}), "did you mean 'threshold'"),
        (own("bier"), "did you mean 'brier'"),
        (own("of_ranks"), r"ranks of retrieval models.*\(ranks, k\).*\(labels, scores\)"),
        ({"function": "own_metric:brier"}, "No module named.*PYTHONPATH"),
        ({"function": "training:brier"}, "Sluice's own"),
        ({"function": "math:hypot"}, "does not tell its parameters"),
    ],
)
def test_faults_of_a_metric_are_said_before_anything_is_written(
    metric: dict[str, Any], error: str, tiny_version: Path, tmp_path: Path
) -> None:
    config = plan(tiny_version, tmp_path / "runs", {"own_metric": metric})
    with pytest.raises(ConfigError, match="(?s)" + error) as caught:
        plan_run(config)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "runs").exists()


def test_metrics_have_names_of_their_own(tiny_version: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="own_"):
        EvaluationConfig.model_validate({"metrics": {"auc": own("brier")}})
    for asked in ("own_bier", "own_brier@10"):
        stopping = {"epochs": 1, "early_stopping": {"metric": asked}}
        with pytest.raises(ConfigError, match="did you mean 'own_brier'"):
            plan_run(plan(tiny_version, tmp_path, {"own_brier": own("brier")}, fit=stopping))
    assert find_direction("own_brier") == "higher"


def test_the_metric_of_the_guide_chooses_the_epoch(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GUIDE.read_text("utf-8").split("## A metric")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [text] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "own_measures.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_measures", raising=False)
    asked = yaml.safe_load(text)
    config = plan(tiny_version, tmp_path / "runs", {}, **asked)
    run = fit_run(config, NoProgress())
    assert "own_top_precision" in read_history(run)[0].validation
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "own_measures")
    with pytest.raises(ConfigError, match=r"(?s)own_top_precision cannot be imported.*PYTHONPATH"):
        evaluate_split(load_run(run), "test")
