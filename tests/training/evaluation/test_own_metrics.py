"""User metrics: what they are given, where they are shown, what is refused and told."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.artefacts.run import read_json
from conf.errors import ExitCode, OwnCodeError
from conf.load import override_config
from conf.manifest import Manifest
from conf.metrics import is_minimised
from conf.training.train import TrainConfig
from jobs.evaluate import evaluate_lists
from jobs.reporting.report import write_report
from tests.training.apply.predictions import write_lists
from tests.training.loop.test_trainer import Messages
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.apply.answers import Source
from training.checkpoint.restore import TrainedModel, load_run
from training.evaluation.evaluate import compare_runs, evaluate_split
from training.fit import fit_run
from training.input.batches import build_eval_dataset
from training.loop.parts import build
from training.loop.plan import read_plan
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history

SOURCE = """
import numpy as np

def brier(labels, scores):
    return np.mean((labels - scores) ** 2)

def accuracy(labels, scores, weights, threshold=0.5):
    return np.average((scores > threshold) == (labels > 0.5), weights=weights)

def undefined(labels, scores):
    return None if len(labels) != 16 else 0.5

def enormous(labels, scores):
    return 1e39

def sorting(labels, scores):
    scores.sort()
    return scores[0]

def rows(labels, scores):
    return labels - scores

def few(labels, scores, most=16):
    if len(labels) > most:
        raise RuntimeError("not these")
    return float(np.mean(scores))

def found(ranks, k):
    return np.any(ranks <= k, axis=1)

def share(ranks, k):
    return np.sum(ranks <= k, axis=1) / np.sum(~np.isnan(ranks), axis=1)

def missed(ranks, k, cost=1.0):
    relevant = ~np.isnan(ranks)
    return cost * np.sum(relevant & ~(ranks <= k), axis=1) / relevant.sum(axis=1)

BUFFER = np.zeros(5000)

def buffered(ranks, k):
    BUFFER[: len(ranks)] = np.any(ranks <= k, axis=1)
    return BUFFER[: len(ranks)]

def mean(ranks, k):
    return np.mean(ranks <= k)

def mean_of_all(ranks, k):
    return np.full(len(ranks), np.mean(ranks <= k))

def no_number(ranks, k):
    return np.sum(ranks, axis=1)

def sorting_ranks(ranks, k):
    ranks.sort()
    return ranks[:, 0]

def few_ranks(ranks, k, most=16):
    if len(ranks) > most:
        raise RuntimeError("not these")
    return np.any(ranks <= k, axis=1)
"""


GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"
OWN_MODULES = {"mine.py": SOURCE}
KS = (1, 5, 10)
LR = {"kind": "ranking", "network": "lr", "embedding_dim": 4}
MF = {"name": "mf", "embedding_dim": 4}
pytestmark = pytest.mark.usefixtures("in_own_folder")


def own(function: str, **settings: Any) -> dict[str, Any]:
    return {"function": f"mine:{function}", **settings}


OF_RANKS = {
    "own_found": own("found"),
    "own_share": own("share"),
    "own_missed": own("missed", params={"cost": 2.0}, direction="lower"),
    "own_buffered": own("buffered"),
}


def plan(version: Path, root: Path, metrics: dict[str, Any], **settings: Any) -> TrainConfig:
    given = {"dataset": str(version), "name": "own", "root": str(root), "model": MF,
             "input": {"batch_size": 64}, "evaluation": {"metrics": metrics, "ks": KS},
             "fit": {"epochs": 2}, **settings}  # fmt: skip
    return TrainConfig.model_validate(given)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version whose users have several held-out events, some of unknown items."""
    config = TinyConfig(users=30, items=500, events_per_user=18, leave_out=3, own_group=0.3)
    return write_tiny_dataset(tmp_path_factory.mktemp("several"), config=config)


def equal_built_in(values: dict[str, float]) -> bool:
    """Whether user metrics are those of Sluice that they repeat, at every cut-off."""
    for k in KS:
        hit, recall = values[f"hit_rate@{k}"], values[f"recall@{k}"]
        assert values[f"own_found@{k}"] == values[f"own_buffered@{k}"] == hit
        assert values[f"own_share@{k}"] == pytest.approx(recall)
        assert values[f"own_missed@{k}"] == pytest.approx(2 - 2 * recall)
    return True


def test_metrics_of_tasks_are_those_of_all_rows_in_epochs_and_evaluation(
    tiny_version: Path, tmp_path: Path
) -> None:
    metrics = {
        "own_brier": own("brier", direction="lower"),
        "own_accuracy": own("accuracy", params={"threshold": 0.4}),
    }
    fit = {"epochs": 3, "early_stopping": {"metric": "own_brier", "patience": 5}}
    run = fit_run(plan(tiny_version, tmp_path, metrics, fit=fit, model=LR), TrainingProgress())
    found = [record.validation["own_brier"] for record in read_history(run)]
    assert is_minimised("own_brier")
    assert read_json(run / "run_card.json")["training"]["best_epoch"] == int(np.argmin(found)) + 1
    trained = load_run(run)
    evaluated = evaluate_split(trained, "test")
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, "test", 1000)
    labels = batch["label"].numpy()
    scores = trained.model.predict(batch)["label"].numpy()
    expected = {
        "own_brier": np.mean((labels - scores) ** 2),
        "own_accuracy": np.mean((scores > 0.4) == (labels > 0.5)),
    }
    assert evaluated["tasks"]["label"]["own"] == pytest.approx(expected, rel=1e-5)
    (run / "metrics.json").write_text(json.dumps(evaluated))
    assert write_report(run).read_text().count("own_accuracy") >= 2  # Of epochs, and of the test.


def test_a_metric_that_is_not_defined_on_a_split_is_told(
    tiny_version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit = {"epochs": 3, "early_stopping": {"metric": "own_none", "patience": 1}}
    metrics = {"own_none": own("undefined"), "own_huge": own("enormous")}
    messages = Messages()
    with caplog.at_level(logging.WARNING):
        run = fit_run(plan(tiny_version, tmp_path, metrics, fit=fit, model=LR), messages)
    assert "metric own_none of task label is not defined on these" in caplog.text
    assert not any({"own_none", "own_huge"} & set(r.validation) for r in read_history(run))
    # Nothing is known to be better than the last epoch, and nothing stops.
    training = read_json(run / "run_card.json")["training"]
    assert (training["best_epoch"], training["selected_by"]) == (3, None)
    assert any("own_none was not defined in any epoch" in text for text in messages.texts)
    values = evaluate_split(load_run(run), "test")["tasks"]["label"]
    assert values["own"] == {"own_none": None, "own_huge": None}


def test_metrics_of_ranks_are_shown_where_ranking_metrics_are(
    several: Path, tmp_path: Path
) -> None:
    stopping = {"metric": "own_missed@5", "patience": 5}
    fit = {"epochs": 3, "early_stopping": stopping, "validation": {"every_steps": 3}}
    run = fit_run(plan(several, tmp_path, OF_RANKS, fit=fit), TrainingProgress())
    history = read_history(run)
    assert all(equal_built_in(dict(record.validation)) for record in history)
    lines = (run / "validations.jsonl").read_text().splitlines()
    assert all(equal_built_in(json.loads(line)["validation"]) for line in lines)
    missed = [record.validation["own_missed@5"] for record in history]
    assert read_json(run / "run_card.json")["training"]["best_epoch"] == int(np.argmin(missed)) + 1
    trained = load_run(run)
    found = evaluate_split(trained, "test", baselines=True)
    for protocol in found["protocols"]:
        assert all(map(equal_built_in, protocol["systems"].values()))
        for against in protocol["differences"]["against"].values():
            assert against["own_found@10"] == against["hit_rate@10"]
    groups = found["slices"]["item_frequency"]
    assert all(equal_built_in(group["systems"][s]) for group in groups for s in group["systems"])
    per_user = override_config(trained.config, {"evaluation.per": "user"}, "x")
    users = evaluate_split(replace(trained, config=per_user), "test")
    assert equal_built_in(users["protocols"][0]["systems"]["model"])
    file = tmp_path / "lists.json.gz"
    write_lists(trained, file, 12, Source(as_of="validation"))
    assert equal_built_in(evaluate_lists(run, file)["metrics"])
    assert write_report(run).read_text().count("own_missed@5") >= 2


def test_runs_are_compared_by_them_with_the_first_ones_direction(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    config = plan(tiny_version, tmp_path, OF_RANKS)
    where = (config, tiny_manifest, tiny_version)
    models = (TinyTowers(tiny_manifest, seed=seed) for seed in (3, 4))
    first, second = (TrainedModel(Path(), model, *where) for model in models)
    plan(tiny_version, tmp_path, {"own_missed": own("missed")})
    found = compare_runs(first, second, "test")["metrics"]
    assert is_minimised("own_missed@5")
    assert found["own_found@5"] == found["hit_rate@5"]
    recall, missed = found["recall@5"], found["own_missed@5"]
    assert missed["difference"] == pytest.approx(-2 * recall["difference"])
    assert missed["low"] == pytest.approx(-2 * recall["high"])


PLACE = r"in \S*mine\.py:\d+"


@pytest.mark.parametrize(
    ("model", "metric", "error"),
    [
        (LR, own("rows"), "fails on 16 rows.*TypeError"),
        (LR, own("sorting"), f"fails on 16 rows.*{PLACE}.*read-only"),
        (LR, own("accuracy", params={"treshold": 1}), "unexpected keyword argument 'treshold'"),
        (MF, own("mean"), "fails on 16 rows.*ValueError"),
        (MF, own("no_number"), "not finite"),
        (MF, own("mean_of_all"), "beside other rows"),
        (MF, own("sorting_ranks"), "fails on 16 rows.*read-only"),
    ],
)
def test_faults_of_a_metric_are_said_before_anything_is_written(
    model: dict[str, Any], metric: dict[str, Any], error: str, tiny_version: Path, tmp_path: Path
) -> None:
    config = plan(tiny_version, tmp_path / "runs", {"own_metric": metric}, model=model)
    with pytest.raises(OwnCodeError, match="(?s)" + error) as caught:
        build(read_plan(config))
    assert caught.value.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("model", "function", "validation"),
    [(LR, "few", {"every_steps": 2}), (MF, "few_ranks", None)],
)
def test_a_metric_that_fails_on_the_split_loses_no_step(
    model: dict[str, Any], function: str, validation: dict[str, int] | None, tiny_version: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The function is corrected, and training goes on where it was."""
    fit = {"epochs": 2, "validation": validation}
    config = plan(tiny_version, tmp_path / "a", {"own_few": own(function)}, fit=fit, model=model)
    messages = Messages()
    with pytest.raises(OwnCodeError, match=rf"(?s)fails on \d\d rows.*{PLACE}"):
        fit_run(config, messages)
    assert any("the state is saved" in text and "--resume" in text for text in messages.texts)
    right = {"few": lambda labels, scores: scores.mean(), "few_ranks": lambda r, k: r[:, 0] < k}
    monkeypatch.setattr(sys.modules["mine"], function, right[function])
    resumed = read_history(fit_run(config, messages, resume=True))
    where = "resuming in epoch 1 after step " + ("2" if validation else "12")
    assert where in messages.texts
    whole = read_history(
        fit_run(config.model_copy(update={"root": str(tmp_path / "b")}), TrainingProgress())
    )
    assert [r.loss for r in resumed] == [r.loss for r in whole]
    assert [r.validation for r in resumed] == [r.validation for r in whole]
