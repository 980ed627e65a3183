"""Runs whose probabilities are calibrated: fitted, evaluated, loaded, exported, refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions, read_card
from conf.artefacts.run import CALIBRATION_FILE, METRICS_FILE, read_json, write_json
from conf.errors import ConfigError, InputDataError, SluiceError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE
from conf.schema import fingerprint
from conf.training.train import TrainConfig
from jobs.evaluate import evaluate, print_metrics
from jobs.reporting.report import write_report
from jobs.support.formatting import format_metric
from tests.training.loop.test_trainer import Messages
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.apply.endpoint import evaluate_served
from training.apply.export import Export
from training.checkpoint.restore import TrainedModel, load_run
from training.evaluation.evaluate import evaluate_split
from training.export.saved_model import write_export
from training.fit import fit_run
from training.input.batches import build_eval_dataset
from training.loading.loaded_model import LoadedModel
from training.models.calibration import Calibration, fit_isotonic
from training.models.ranking import RankingModel
from training.monitoring.progress import TrainingProgress

HALVES = {0: 0.5, 1: 0.5}


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    config = TinyConfig(users=150, own_group=0.6, leave_out=3)
    return write_tiny_dataset(folder, config=config)


def configure(version: Path, root: Path, **sections: Any) -> TrainConfig:
    model = {"kind": "ranking", "network": "deepfm", "params": {"hidden_units": [8]},
             "embedding_dim": 4, "calibration": "isotonic"}  # fmt: skip
    return TrainConfig.model_validate(
        {
            "dataset": str(version),
            "name": "calibrated",
            "root": str(root),
            "optimizer": {"learning_rate": 0.05},
            "fit": {"epochs": 4, "early_stopping": {"metric": "auc", "patience": 9}},
            **sections,
            "model": {**model, **sections.get("model", {})},
            "input": {"batch_size": 64, **sections.get("input", {})},
        }
    )


@pytest.fixture(scope="module")
def run(version: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns too long, so that it is too sure."""
    return fit_run(configure(version, tmp_path_factory.mktemp("runs")), TrainingProgress())


def predict(
    trained: TrainedModel, split: str, task: str = "label"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-odds without calibration, predictions and labels of a split."""
    model = trained.model
    assert isinstance(model, RankingModel)
    names = (*model.inputs, "label")
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, split, 9999, names)
    raw = model.compute_uncalibrated_logits(batch)[task].numpy()
    return raw, model.predict(batch)[task].numpy(), batch["label"].numpy() > 0.5


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_run_is_calibrated_by_its_validation_rows(run: Path, which: Any) -> None:
    trained = load_run(run, which)
    logits, _, labels = predict(trained, "validation")
    assert trained.model.calibrations == {"label": fit_isotonic(logits, labels)}
    raw, probabilities, labels = predict(trained, "test")
    line = trained.model.calibrations["label"].apply(raw).numpy()
    np.testing.assert_allclose(probabilities, sigmoid(line), rtol=1e-5)
    order = np.argsort(raw, kind="stable")
    assert (np.diff(line[order]) >= 0).all()


def test_evaluation_tells_what_calibration_has_changed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = evaluate(run)
    found = metrics["tasks"]["label"]
    before, after = found["uncalibrated"]["calibration"], found["calibration"]
    assert after["expected_error"] < before["expected_error"]
    assert found["log_loss"] < found["uncalibrated"]["log_loss"]
    logits, probabilities, labels = predict(load_run(run), "test")
    losses = [-np.log(np.where(labels, p, 1 - p)).mean() for p in (sigmoid(logits), probabilities)]
    np.testing.assert_allclose(
        losses, [found["uncalibrated"]["log_loss"], found["log_loss"]], rtol=1e-4
    )
    assert read_json(run / METRICS_FILE)["tasks"]["label"]["uncalibrated"] == found["uncalibrated"]
    print_metrics(metrics)
    told = (format_metric(part["expected_error"]) for part in (before, after))
    line = "expected calibration error {} before, {} after".format(*told)
    assert line in " ".join(capsys.readouterr().out.split())
    assert line in write_report(run).read_text()


def test_exports_and_replays_are_calibrated(run: Path, tmp_path: Path) -> None:
    trained = load_run(run)
    model = trained.model
    assert isinstance(model, RankingModel)
    export = write_export(trained, ExportOptions(tmp_path))
    [output] = read_card(export)["outputs"]
    assert Calibration.of(output["calibration"]) == model.calibrations["label"]
    _, difference = evaluate_served(trained, "test", Export(export))
    assert difference.rows == {"label": 450}
    assert not difference.differing
    served = LoadedModel(export)
    items = np.tile(np.arange(100, 140), (450, 1))
    names = [n for n in served.inputs["rank_items_encoded"] if n != "items"]
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, "test", 9999, names)
    given = {**{name: batch[name].numpy() for name in names}, "items": items}
    scores = served.call("score_items_encoded", given)["label"]
    odds = served.call("rank_items_encoded", given)["label"]
    np.testing.assert_allclose(scores, sigmoid(odds), rtol=1e-5)


def test_probabilities_after_balanced_classes_are_those_of_the_log(
    version: Path, tmp_path: Path
) -> None:
    shares = {0: 0.9, 1: 0.1}
    balance = {"class_balance": {"shares": shares}}
    simple = {"network": "lr", "params": {}, "features": ["gender"]}
    config = configure(version, tmp_path, input=balance, fit={"epochs": 8},
                       model={"calibration": None, **simple})  # fmt: skip
    trained = load_run(fit_run(config, TrainingProgress()))
    raw, probabilities, labels = predict(trained, "train")
    rate = read_manifest(version).label_rate["train"]
    assert sigmoid(raw).mean() == pytest.approx(0.1, rel=0.2)
    assert probabilities.mean() == pytest.approx(rate, rel=0.05)
    w = 0.9 / 0.1 * rate / (1 - rate)
    p = sigmoid(raw)
    np.testing.assert_allclose(probabilities, p / (p + (1 - p) / w), rtol=1e-4)
    assert labels.mean() == pytest.approx(rate)
    found = evaluate_split(trained, "test")["tasks"]["label"]
    assert found["log_loss"] < found["uncalibrated"]["log_loss"]
    both = configure(version, tmp_path, input=balance, fit={"epochs": 1}, model=simple)
    fitted = load_run(fit_run(both, TrainingProgress()))
    logits, _, labels = predict(fitted, "validation")
    assert fitted.model.calibrations == {"label": fit_isotonic(logits, labels)}


def test_a_calibration_that_does_harm_is_left_out_and_told(version: Path, tmp_path: Path) -> None:
    held_out = {"validation": {"hash_of": "user_id", "share": 0.1}}
    told = Messages()
    run = fit_run(configure(version, tmp_path, input=held_out, fit={"epochs": 1}), told)
    [line] = [text for text in told.texts if "is not calibrated" in text]
    found = re.fullmatch(
        r"task label of the best checkpoint is not calibrated: over five folds of the \d+ rows to "
        r"validate on, log loss is ([\d.]+) with it and ([\d.]+) without", line,
    )  # fmt: skip
    assert found is not None
    assert float(found[1]) > float(found[2])
    trained = load_run(run)
    assert not trained.model.calibrations
    assert "uncalibrated" not in evaluate_split(trained, "test")["tasks"]["label"]


def test_a_task_without_a_fit_still_undoes_balanced_classes(version: Path, tmp_path: Path) -> None:
    balance = {"class_balance": {"shares": HALVES}}
    run = fit_run(
        configure(version, tmp_path, input=balance, fit={"epochs": 1}), TrainingProgress()
    )
    content = json.loads((run / CALIBRATION_FILE).read_text())
    content.pop("fingerprint")
    content["checkpoints"][0]["tasks"] = {}
    write_json(run / CALIBRATION_FILE, {**content, "fingerprint": fingerprint(content)})
    undone = load_run(run).model.calibrations
    assert undone == load_run(run, is_calibrated=False).model.calibrations
    assert undone["label"].logits == (0.0,)


def test_what_cannot_be_calibrated_is_refused_before_training(
    version: Path, tmp_path: Path
) -> None:
    def refuse(version: Path, kind: type[SluiceError], message: str, **sections: Any) -> None:
        sections["fit"] = {"epochs": 1, "early_stopping": None}
        with pytest.raises(kind, match=message):
            fit_run(configure(version, tmp_path / "runs", **sections), TrainingProgress())

    rates = {**read_manifest(version).label_rate, "validation": 1.0}
    other = shutil.copytree(version, tmp_path / "other" / "versions" / version.name)
    (other / MANIFEST_FILE).write_text(replace(read_manifest(version), label_rate=rates).dumps())
    refuse(other, InputDataError, "450 rows, all of label 1")
    blind = write_tiny_dataset(tmp_path, config=TinyConfig(users=20, validation=False))
    refuse(blind, ConfigError, "no rows to validate on")
    error = {"tasks": {"label": {"objective": "squared_error"}}}
    refuse(version, ConfigError, "no task of the model", model=error)
    assert not (tmp_path / "runs").exists()


def test_a_run_without_its_calibration_or_with_another_is_not_loaded(
    version: Path, tmp_path: Path
) -> None:
    run = fit_run(configure(version, tmp_path, fit={"epochs": 1}), TrainingProgress())
    file = run / CALIBRATION_FILE
    whole = file.read_text()
    content = json.loads(whole)
    content["checkpoints"][0]["tasks"]["label"]["log_odds"][0] -= 1.0
    cases: list[tuple[str | None, type[SluiceError], str]] = [
        (None, UpstreamNotReadyError, "no calibration yet"),
        (json.dumps(content), InputDataError, "damaged"),
        ("{", InputDataError, "not valid JSON"),
        (whole.replace('"epoch": 1', '"epoch": 2'), InputDataError, "damaged|epoch"),
    ]
    for text, kind, message in cases:
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(kind, match=message):
            load_run(run)
    file.write_text(whole)
    assert load_run(run).model.calibrations


def test_a_run_that_was_killed_before_the_fit_is_fitted_by_resume(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(version, tmp_path, fit={"epochs": 1})
    with monkeypatch.context() as patch:
        patch.setattr("training.fit.fit_calibrations", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fit_run(config, TrainingProgress())
    [unfinished] = (tmp_path / "calibrated" / "runs").iterdir()
    with pytest.raises(UpstreamNotReadyError, match="no calibration yet"):
        load_run(unfinished)
    assert fit_run(config, TrainingProgress(), resume=True) == unfinished
    trained = load_run(unfinished)
    logits, _, labels = predict(trained, "validation")
    assert trained.model.calibrations == {"label": fit_isotonic(logits, labels)}


def test_each_binary_task_is_calibrated_and_no_other(version: Path, tmp_path: Path) -> None:
    tasks = {
        "a": {"label": "label"},
        "b": {"label": "label"},
        "c": {"label": "label", "objective": "squared_error"},
    }
    model = {"network": "shared_bottom", "params": {"hidden_units": [4]}, "tasks": tasks}
    config = configure(version, tmp_path, model=model, fit={"epochs": 1, "early_stopping": None})
    trained = load_run(fit_run(config, TrainingProgress()))
    (a, _, labels), (b, _, _) = (predict(trained, "validation", name) for name in "ab")
    lines = {"a": fit_isotonic(a, labels), "b": fit_isotonic(b, labels)}
    assert trained.model.calibrations == lines
    assert lines["a"] != lines["b"]
    raw, values, _ = predict(trained, "validation", "c")
    np.testing.assert_array_equal(values, raw)
