"""Runs that are killed at any step and resumed: the same losses, every example once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError, InternalError
from conf.manifest import Manifest
from conf.training.models import SASRecConfig
from conf.training.train import CheckpointConfig, FitConfig, TrainConfig
from tests.machine import fill, mount_small_disk
from tests.training import killed_run
from tests.training.dynamic_runs import build_trainer
from tests.training.killed_run import (
    CONFIG,
    KEYS,
    ActsAfter,
    KilledError,
    Recorded,
    break_off,
    row_keys,
    train,
)  # fmt: skip
from tests.training.processes import start_forked
from training.checkpoint.checkpoint_files import Position, list_checkpoints
from training.distribution import strategy as strategies
from training.input.batches import build_eval_dataset
from training.loop.trainer import Trainer
from training.monitoring.run_logs import read_steps
from training.reader.training_data import TrainingData

STEPS = 12  # per epoch
EPOCHS = 2
EVERY_STEP = range(1, STEPS * EPOCHS + 1)
SOME_STEPS = (1, 12, 17)


class Twins:
    """Two compiled trainers of one config, so that no kill point has to compile its own."""

    def __init__(self, config: TrainConfig, data: TrainingData, recorded: Recorded) -> None:
        self.progress = ActsAfter(None, break_off)
        build = strategies.build_run_steps
        strategies.build_run_steps = recorded.wrap(build)
        try:
            self.killed = Trainer(config, data, tf.distribute.get_strategy(), self.progress)
            self.resumed = Trainer(config, data, tf.distribute.get_strategy(), self.progress)
        finally:
            strategies.build_run_steps = build
        self.recorded = recorded
        self.first = [variable.numpy() for variable in self.killed.parts.model.trainable_variables]

    def restart(self, trainer: Trainer) -> None:
        """Back to the first values, as in a new process; the optimizers' among them."""
        model, optimizers = trainer.parts.model, trainer.parts.optimizers
        for variable in (*optimizers.sparse.variables, *optimizers.dense.variables):
            if "learning_rate" not in variable.name:
                variable.assign(tf.zeros(variable.shape, variable.dtype))
        for counts in optimizers.objective_state:
            counts.assign(tf.ones_like(counts))
        for variable, value in zip(model.trainable_variables, self.first, strict=True):
            variable.assign(value)

    def run(self, trainer: Trainer, run: Path, kill_after: int | None = None) -> list[np.ndarray]:
        run.mkdir(exist_ok=True)
        self.restart(trainer)
        self.progress.after = kill_after
        trainer.fit(run, None)
        return [variable.numpy() for variable in trainer.parts.model.trainable_variables]


def steps_of(run: Path) -> list[tuple[int, int, float]]:
    return [(record.step, record.epoch, record.loss) for record in read_steps(run)]


def epoch_losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in json.loads((run / "history.json").read_text())]


def with_fit(**changes) -> TrainConfig:
    fit = {"epochs": EPOCHS, "early_stopping": None, **changes}
    return CONFIG.model_copy(update={"fit": FitConfig(**fit)})


@pytest.fixture(scope="module")
def data(tiny_version: Path, tiny_manifest: Manifest) -> TrainingData:
    return TrainingData(tiny_version, tiny_manifest)


@pytest.fixture(scope="module")
def train_rows(tiny_version: Path, tiny_manifest: Manifest) -> Counter:
    batch = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 1000, KEYS)))
    return Counter(row_keys(batch))


SEQUENCE = SASRecConfig.model_validate(
    {
        "embedding_dim": 4,
        "blocks": 1,
        "item_features": ["movie_id"],
        "objective": {"negatives": {"source": "uniform", "count": 12}, "mask": "user_items"},
    }
)
CUT = CheckpointConfig(every_steps=3, keep_last=1)
SAVES = {
    "calls of several steps": (EVERY_STEP, 5, CheckpointConfig(every_steps=7), CONFIG.model),
    "each step": (SOME_STEPS, 1, CheckpointConfig(every_steps=1, asynchronous=False), CONFIG.model),
    "calls cut by saves": (SOME_STEPS, 4, CUT, CONFIG.model),
    "shared negatives of sequences": ((17,), 4, CUT, SEQUENCE),
}


@pytest.fixture(autouse=True)
def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process has written is in the system's memory; syncing is for power cuts."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in list(SAVES)[:2] else ())
        for name in SAVES
    ],
)
def test_any_kill_point_changes_nothing(
    save: str, data: TrainingData, train_rows: Counter, tmp_path: Path
) -> None:
    kill_points, steps_per_loop, checkpoint, model = SAVES[save]
    config = with_fit(steps_per_loop=steps_per_loop, checkpoint=checkpoint)
    twins = Twins(config.model_copy(update={"model": model}), data, Recorded())
    whole_run = tmp_path / "whole"  # that nothing interrupts
    whole_weights = twins.run(twins.killed, whole_run)
    lines = steps_of(whole_run)
    assert lines[-1][0] == STEPS * EPOCHS
    for kill_after in kill_points:
        run = tmp_path / str(kill_after)
        twins.recorded.rows.clear()
        with pytest.raises(KilledError):
            twins.run(twins.killed, run, kill_after)
        before = dict(twins.recorded.rows)
        weights = twins.run(twins.resumed, run)
        assert steps_of(run) == lines, f"killed after step {kill_after}"
        assert epoch_losses(run) == epoch_losses(whole_run)
        assert all(np.array_equal(a, b) for a, b in zip(weights, whole_weights, strict=True))
        # Steps that were done again read the rows that they had read before.
        assert all(twins.recorded.rows[step] == rows for step, rows in before.items())
        check_rows(twins.recorded.rows, train_rows)
        shutil.rmtree(run)


def check_rows(rows: dict[int, list], train_rows: Counter) -> None:
    """Every step once, and no row in an epoch more often than the split has it."""
    assert sorted(rows) == list(range(STEPS * EPOCHS))
    for epoch in range(EPOCHS):
        seen = Counter(
            key for step in range(epoch * STEPS, (epoch + 1) * STEPS) for key in rows[step]
        )
        assert seen.total() == STEPS * CONFIG.input.batch_size
        assert not seen - train_rows


def test_checkpoints_by_the_clock(data: TrainingData, tmp_path: Path) -> None:
    config = with_fit(
        epochs=1,
        steps_per_loop=5,
        checkpoint=CheckpointConfig(every_minutes=1e-9, keep_last=9),
    )
    build_trainer(config, data.version_dir).fit(tmp_path, None)
    found = [entry.position for entry in list_checkpoints(tmp_path / "checkpoints" / "last")]
    assert [(p.epoch, p.batch) for p in found] == [(0, 5), (0, 10), (0, 12), (1, 0)]


def test_another_seed_is_refused(data: TrainingData, tmp_path: Path) -> None:
    config = with_fit(epochs=1)
    build_trainer(config, data.version_dir).fit(tmp_path, None)
    other = config.model_copy(update={"seed": 8})
    trainer = build_trainer(other, data.version_dir)
    with pytest.raises(InputDataError, match="another seed"):
        trainer.fit(tmp_path, None)


def wait_for_checkpoint(run: Path, position: Position, kept: int) -> None:
    """Waits until one is written and those before it are gone: until the disk is left alone."""
    last, end = run / "checkpoints" / "last", time.monotonic() + 300
    while True:
        found = list_checkpoints(last)
        if found and found[-1].position == position and len(list(last.iterdir())) == kept:
            return
        assert time.monotonic() < end, f"{position} in {list(last.iterdir())}"
        time.sleep(0.01)


def test_a_full_disk_ends_the_run_and_resuming_changes_nothing(
    data: TrainingData, tmp_path: Path
) -> None:
    config = with_fit(steps_per_loop=1, checkpoint=CheckpointConfig(every_steps=2))
    with mount_small_disk(tmp_path, 8 << 20) as disk:
        twins, run = Twins(config, data, Recorded()), disk / "run"
        whole_weights = twins.run(twins.killed, tmp_path / "whole")

        def fill_disk() -> None:
            wait_for_checkpoint(run, Position(1, 2), config.fit.checkpoint.keep_last)
            fill(disk, 20_000)

        progress = ActsAfter(STEPS + 3, fill_disk)
        twins.killed.parts = replace(twins.killed.parts, progress=progress)
        with pytest.raises(InternalError, match="cannot write"):
            twins.run(twins.killed, run)
        (disk / "filler").unlink()
        weights = twins.run(twins.resumed, run)
        assert all(np.array_equal(a, b) for a, b in zip(weights, whole_weights, strict=True))
        assert steps_of(run) == steps_of(tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(tiny_version: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorded]:
    """A run that nothing interrupts, and the rows of its steps."""
    run, rows = tmp_path_factory.mktemp("whole"), Recorded()
    train(tiny_version, run, rows)
    return run, rows


@pytest.mark.parametrize("kill", [pytest.param("17", marks=pytest.mark.exhaustive), "writing"])
def test_sigkill(
    kill: str, tiny_version: Path, whole: tuple[Path, Recorded], train_rows, tmp_path: Path
) -> None:
    """A process of its own is killed inside a compiled call, or while a checkpoint is written."""
    run = tmp_path / "run"
    run.mkdir()
    log = tmp_path / "rows.jsonl"
    process = start_forked(killed_run.main, str(tiny_version), str(run), str(log), kill)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole_run, rows = whole
    again = Recorded()
    train(tiny_version, run, again)
    assert min(again.rows) > 0  # it was resumed
    assert steps_of(run) == steps_of(whole_run)
    before = dict(json.loads(line) for line in log.read_text().splitlines())
    merged = {int(step): [tuple(key) for key in keys] for step, keys in before.items()}
    assert all(merged[step] == again.rows[step] for step in set(merged) & set(again.rows))
    merged |= again.rows
    assert merged == rows.rows
    check_rows(merged, train_rows)
