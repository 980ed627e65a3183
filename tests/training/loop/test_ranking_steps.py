"""Runs of a network with dropout and batch normalization: resumed, on replicas, by steps."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.artefacts.dataset import read_manifest
from conf.training.models import RankingConfig
from conf.training.train import TrainConfig
from tests.training import killed_run
from tests.training.dynamic_runs import TABLES, build_trainer, read_state
from tests.training.killed_run import RANKING, Recorded
from tests.training.processes import start_forked
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.checkpoint_files import Position, list_checkpoints
from training.loop.trainer import Trainer
from training.loop.validation import Validate, build_validate
from training.monitoring.run_logs import (
    TrainingResult,
    read_history,
    read_step_validations,
    read_steps,
)
from training.reader.training_data import TrainingData

PARAMS = {"hidden_units": [8], "dropout": 0.2, "batch_normalization": True}
OWN = {
    "network": "tests.training.toy_models:build_own_network",
    "params": {"units": 8},
    "pooling": {"history": {"combiner": "none"}},
}
STEPS = 12  # of an epoch
HALVES = {"compute": {"mixed_precision": True}, "optimizer": {"accumulate_steps": 2}}


def configure(**sections: Any) -> TrainConfig:
    model = {
        "kind": "ranking",
        "network": "deepfm",
        "params": PARAMS,
        "embedding_dim": 4,
        "embeddings": sections.pop("embeddings", {}),
        **sections.pop("model", {}),
    }
    fit = {
        "steps_per_loop": 5,
        "early_stopping": None,
        "checkpoint": {"every_steps": 7, "at_start": True, "keep_last": 9},
        **sections.pop("fit", {"epochs": 2}),
    }
    optimizer = {"learning_rate": 0.02, **sections.pop("optimizer", {})}
    return TrainConfig.model_validate(
        {
            "dataset": "tiny",
            "name": "t",
            "model": model,
            "input": {"batch_size": 64, "shuffle_buffer": 300},
            "optimizer": optimizer,
            "evaluation": {"batch_size": 16},
            "fit": fit,
            **sections,
        }
    )


@dataclass(frozen=True)
class Trained:
    """A run that nothing has interrupted, and its trainer."""

    trainer: Trainer
    validate: Validate | None
    run: Path
    result: TrainingResult
    state: dict[str, np.ndarray]


def train(sections: dict[str, Any], version: Path, run: Path) -> Trained:
    config = configure(**sections)
    trainer = build_trainer(config, version)
    validate = build_validate(config, TrainingData(version, read_manifest(version)))
    result = trainer.fit(run, validate)
    return Trained(trainer, validate, run, result, read_state(trainer))


def resume(trained: Trained, position: Position, run: Path) -> dict[str, np.ndarray]:
    """Goes on from one of the run's checkpoints, as after a kill; returns the state at the end."""
    name = f"{position.epoch:05d}-{position.batch:09d}"
    shutil.copytree(trained.run / "checkpoints/last" / name, run / "checkpoints/last" / name)
    for file in ("metrics.jsonl", "validations.jsonl"):
        if (trained.run / file).exists():
            shutil.copy(trained.run / file, run / file)
    trained.trainer.fit(run, trained.validate)
    return read_state(trained.trainer)


def check_same(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(state) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def list_losses(run: Path) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_steps(run)]


@pytest.mark.parametrize(
    ("sections", "keyed"),
    [({"embeddings": TABLES}, True), pytest.param(HALVES, False, marks=pytest.mark.exhaustive)],
    ids=["dynamic tables", "bfloat16 in parts"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    sections: dict[str, Any], keyed: bool, tmp_path: Path
) -> None:
    version = write_tiny_dataset(tmp_path / "data", config=TinyConfig(keyed=keyed))
    (tmp_path / "whole").mkdir()
    whole = train(sections, version, tmp_path / "whole")
    check_same(resume(whole, Position(0, 7), tmp_path / "part"), whole.state)
    assert list_losses(tmp_path / "part") == list_losses(whole.run)
    losses = [record.loss for record in read_history(whole.run)]
    assert losses[1] < losses[0]
    check_moving_statistics(whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [{}, OWN], ids=["built in", "one's own"])
def test_sigkill_changes_nothing(model: dict[str, Any], tiny_version: Path, tmp_path: Path) -> None:
    """A process of its own is killed inside a compiled call of the second epoch."""
    config = RANKING
    if model:
        own = {"kind": "ranking", "embedding_dim": 4, **model}
        config = RANKING.model_copy(update={"model": RankingConfig.model_validate(own)})
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    whole = killed_run.train(tiny_version, tmp_path / "whole", Recorded(), config)
    run, log = str(tmp_path / "part"), str(tmp_path / "rows.jsonl")
    process = start_forked(killed_run.main, str(tiny_version), run, log, "17", config)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again = Recorded()
    part = killed_run.train(tiny_version, tmp_path / "part", again, config)
    assert STEPS < min(again.rows) <= 17
    check_same(read_state(part), read_state(whole))
    assert list_losses(tmp_path / "part") == list_losses(tmp_path / "whole")
    found, expected = (read_step_validations(tmp_path / name) for name in ("part", "whole"))
    assert found == expected
    assert len(found) == 6


def check_moving_statistics(trained: Trained) -> None:
    network = trained.trainer.parts.model.networks[0].weights
    moved = {name: v.numpy() for name, v in network.items() if "moving" in name}
    assert {value.dtype for value in moved.values()} == {np.dtype(np.float32)}
    means = [value for name, value in moved.items() if "mean" in name]
    variances = [value for name, value in moved.items() if "variance" in name]
    assert len(means) == len(variances) == 1
    assert np.abs(means[0]).max() > 1e-3
    assert np.abs(variances[0] - 1.0).max() > 1e-3


@pytest.fixture(scope="module")
def by_steps(tiny_version: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Seventeen steps, validated every four, with all that can be looked at."""
    fit = {
        "max_steps": 17,
        "validation": {"every_steps": 4, "batches": 1},
        "early_stopping": {"by": "steps", "patience": 99},
    }
    return train({"model": OWN, "fit": fit}, tiny_version, tmp_path_factory.mktemp("by_steps"))


def test_training_ends_with_the_last_step_within_an_epoch(by_steps: Trained) -> None:
    first, last = read_history(by_steps.run)
    assert (first.examples, last.examples) == (STEPS * 64, 5 * 64)
    assert first.examples_per_s == pytest.approx(first.examples / first.seconds)
    assert (by_steps.result.steps, by_steps.result.stopped_early) == (17, False)
    assert read_steps(by_steps.run)[-1].step == 17
    losses = {record.step: record.loss for record in read_steps(by_steps.run)}
    assert last.loss == pytest.approx((4 * losses[16] + losses[17]) / 5, rel=0.2)
    check_moving_statistics(by_steps)


def test_validations_between_epochs_choose_the_weights(by_steps: Trained) -> None:
    records = read_step_validations(by_steps.run)
    assert [(record.step, record.epoch) for record in records] == [
        (4, 1), (8, 1), (12, 1), (16, 2),
    ]  # fmt: skip
    best = max(records, key=lambda record: record.validation["auc"])
    assert (by_steps.result.best_step, by_steps.result.best_epoch) == (best.step, best.epoch)
    (kept,) = list_checkpoints(by_steps.run / "checkpoints/best")
    assert kept.position.step(STEPS) == best.step
    # Of the first 16 rows alone, so other numbers than those of the epoch's end.
    epoch = read_history(by_steps.run)[0].validation
    assert epoch.keys() == records[2].validation.keys()
    assert epoch != records[2].validation


def test_a_validation_that_was_cut_off_is_made_again(by_steps: Trained, tmp_path: Path) -> None:
    """The state of step 4 was saved, and the process killed while it was validated."""
    shutil.copytree(by_steps.run / "checkpoints", tmp_path / "from/checkpoints")
    before = replace(by_steps, run=tmp_path / "from")
    check_same(resume(before, Position(0, 4), tmp_path / "part"), by_steps.state)
    found = read_step_validations(tmp_path / "part")
    assert found == read_step_validations(by_steps.run)


def patch_trainer(trainer: Trainer, patch: pytest.MonkeyPatch, values, **checkpoint) -> None:
    """Lets validations between epochs give these values of auc, with a patience of one."""
    found, plan = iter(values), trainer.parts.plan
    stopping = plan.config.fit.early_stopping.model_copy(update={"patience": 1})
    saving = plan.config.fit.checkpoint.model_copy(update=checkpoint)
    updates = {"early_stopping": stopping, "checkpoint": saving}
    fit = plan.config.fit.model_copy(update=updates)
    config = plan.config.model_copy(update={"fit": fit})
    parts = replace(
        trainer.parts,
        plan=replace(plan, config=config),
        validate_steps=lambda model: {"auc": next(found)},
    )
    patch.setattr(trainer, "parts", parts)
    patch.setattr(parts.epoch_input, "config", config)


def test_training_stops_where_validations_bring_nothing_better(
    by_steps: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = by_steps.trainer
    patch_trainer(trainer, monkeypatch, [0.5, 0.7, 0.6, 0.65])
    result = trainer.fit(tmp_path, lambda model: {"auc": 0.9})
    assert (result.steps, result.best_step, result.stopped_early) == (12, 8, True)
    (kept,) = list_checkpoints(tmp_path / "checkpoints/best")
    assert kept.position == Position(0, 8)


def test_a_run_that_was_killed_after_its_last_validation_ends(
    by_steps: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Validations have ended the first epoch; its end was not saved."""
    trainer = by_steps.trainer
    patch_trainer(trainer, monkeypatch, [0.7, 0.6], every_steps=4)
    runs = [tmp_path / name for name in ("whole", "part")]
    results = [trainer.fit(runs[0], lambda model: {"auc": 0.5})]
    for name in ("last/00000-000000008", "best/00000-000000004"):
        shutil.copytree(runs[0] / "checkpoints" / name, runs[1] / "checkpoints" / name)
    for file in ("metrics.jsonl", "validations.jsonl"):
        shutil.copy(runs[0] / file, runs[1] / file)
    results.append(trainer.fit(runs[1], lambda model: {"auc": 0.5}))
    assert (results[0].steps, results[0].best_step, results[0].stopped_early) == (8, 4, True)
    assert results[1] == results[0]
    assert read_history(runs[1])[0].examples == 8 * 64
