"""Epochs of steps: their input, where calls end, and what ends training that is not finite."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError, TrainingDivergedError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.input import InputConfig
from conf.training.train import (
    CheckpointConfig,
    DevicesConfig,
    EarlyStoppingConfig,
    FitConfig,
    TrainConfig,
)
from tests.machine import some_of
from tests.training.killed_run import CONFIG
from tests.training.tiny_dataset import rewrite_label
from training.checkpoint.checkpoint_files import EpochSums, Position, ResumeState, list_checkpoints
from training.checkpoint.manager import restore_newest
from training.checkpoint.saved_tensors import collect_state, find_non_finite
from training.distribution.strategy import build_run_steps, build_strategy
from training.distribution.workers import NullWriter, Workers
from training.input.batches import build_eval_dataset
from training.loop.epochs import EpochInput, EpochRunner, RunContext, StepInputs, StopRequest
from training.loop.plan import StepPlan
from training.loop.trainer import Trainer
from training.loop.validation import StepValidations
from training.monitoring.progress import TrainingProgress
from training.objectives.item_objectives import SampledSoftmax
from training.reader.training_data import TrainingData

counts = st.integers(1, 40)


def ends(start: int, epoch: int, steps: int, loop: int, every: int | None) -> list[int]:
    """Batches at which calls end that begin at a batch."""
    plan = StepPlan(steps, 6 * steps, loop, () if every is None else (every,))
    found, batch = [], start
    while batch < steps:
        count = plan.count_steps_of_call(Position(epoch, batch))
        assert 1 <= count <= loop
        batch += count
        found.append(batch)
    assert batch == steps
    return found


@given(counts, counts, st.none() | counts, st.integers(0, 5))
def test_calls_end_at_the_same_batches_wherever_a_run_is_resumed(
    steps: int, loop: int, every: int | None, epoch: int
) -> None:
    whole = ends(0, epoch, steps, loop, every)
    for index, start in enumerate(whole):
        assert ends(start, epoch, steps, loop, every) == whole[index + 1 :]
    if every is not None:
        due = [batch for batch in range(1, steps + 1) if (epoch * steps + batch) % every == 0]
        assert set(due) <= set(whole)


def test_the_rest_of_an_epoch_is_its_tail(tiny_version: Path, tiny_manifest: Manifest) -> None:
    def add_ids(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.cast(tf.reduce_sum(batch["movie_id"] * tf.range(64, dtype=tf.int64)), tf.float32)

    epochs = build_input(tiny_version, tiny_manifest)
    whole = run_epoch(epochs, Position(1, 0), add_ids)
    assert len(whole) == 12
    np.testing.assert_array_equal(run_epoch(epochs, Position(1, 5), add_ids), whole[5:])
    again = epochs.read_batch(Position(1, 7))
    assert float(add_ids(again)) == whole[7]
    assert run_epoch(epochs, Position(1, 12), add_ids) == []


LOGS = (NullWriter(), NullWriter())
NEVER = StepValidations(None, None, [], LOGS, lambda state: {})


def run_from(epochs: EpochInput, start: Position, run_steps, saved, validations: Any = NEVER):
    workers = Workers(tf.distribute.get_strategy())
    context = RunContext(Path(), saved, *LOGS, TrainingProgress(), StopRequest(), workers)
    state = ResumeState(start, EpochSums(), 0)
    return EpochRunner(epochs, run_steps, context).run(state, None, validations)


def count_rows(batch: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.cast(tf.shape(batch["movie_id"])[0], tf.float32)


def run_epoch(epochs: EpochInput, start: Position, step=count_rows) -> list[float]:
    """Runs the steps from a position to the end of its epoch; returns the loss of each."""
    run_steps, losses = build_run_steps(tf.distribute.get_strategy(), step), []

    def record(iterator, steps: tf.Tensor):
        result = run_steps(iterator, steps)
        losses.extend(result.losses.numpy().tolist())
        return result

    end = run_from(epochs, start, record, Unsaved())
    assert end.position == Position(start.epoch, epochs.steps_per_epoch)
    assert end.sums.loss == pytest.approx(sum(losses))
    return losses


class Unsaved:
    """Checkpoints of a run that saves nothing."""

    saved = None

    def check(self) -> None: ...


class Saved(Unsaved):
    """Checkpoints of a run that keep their positions."""

    def __init__(self) -> None:
        self.positions: list[Position] = []

    def save(self, state: ResumeState, *, best: bool) -> None:
        self.saved = state.position
        self.positions.append(state.position)


def build_input(version: Path, manifest: Manifest, inputs=("movie_id",), **changes) -> EpochInput:
    settings = InputConfig.model_validate({"batch_size": 64, **changes.pop("input", {})})
    config = TrainConfig(dataset="d", name="n", input=settings, **changes)
    data, strategy = TrainingData(version, manifest), tf.distribute.get_strategy()
    return EpochInput(config, data, strategy, StepInputs(tuple(inputs)))


FILTER = {"filter": [{"feature": "history", "op": ">", "value": 3}]}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (FILTER, range(1, 12)),
        ({"validation": {"hash_of": "user_id", "share": 0.3}}, range(1, 12)),
        ({"on_corrupt": "skip_record"}, [12]),
        ({"mix": 0.4}, [20]),
    ],
)
def test_an_epoch_has_the_steps_that_its_input_gives(
    settings: dict, steps, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    if "mix" in settings:
        settings = {"mix": [{"dataset": str(tiny_version), "weight": settings["mix"]}]}
    epochs = build_input(tiny_version, tiny_manifest, input=settings)
    assert epochs.steps_per_epoch in steps
    assert run_epoch(epochs, Position(0, 0)) == [64.0] * epochs.steps_per_epoch


def test_an_id_that_no_row_of_a_table_stands_for_is_named(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    specs = [
        replace(spec, vocabulary_size=30) if spec.name == "user_id" else spec
        for spec in tiny_manifest.schema.features
    ]
    manifest = replace(tiny_manifest, schema=FeatureSchema(tuple(specs)))

    def look_up(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        with tf.device("CPU:0"):  # GPUs read zeros beyond a table.
            return tf.reduce_sum(tf.gather(tf.zeros([30]), batch["user_id"]))

    settings = {"shuffle_buffer": 1000}
    epochs = build_input(tiny_version, manifest, ("gender", "user_id"), input=settings)
    with pytest.raises(InputDataError, match="an id that its feature") as caught:
        run_epoch(epochs, Position(0, 0), look_up)
    assert "is not in [0, 30)" in str(caught.value.received)


def test_what_an_epoch_left_out_is_the_same_wherever_it_is_resumed(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    totals = []
    for start in (0, 2, 12):
        epochs = build_input(tiny_version, tiny_manifest, input={**FILTER, "shuffle_buffer": 100})
        run_epoch(epochs, Position(1, min(start, epochs.steps_per_epoch)))
        totals.append(epochs.left_out.totals())
    short = sum(
        int(length <= 3)
        for batch in build_eval_dataset(tiny_version, tiny_manifest, "train", 1000, ["history"])
        for length in np.count_nonzero(batch["history"], axis=1)
    )
    assert totals == [{"filtered_rows": short}] * 3


class StopsAfterFirst(StepValidations):
    """Validations of which the first is the best, and enough."""

    def should_stop(self) -> bool:
        return bool(self.records)


def run_two_steps(version: Path, stop: str, checkpoints: Saved) -> None:
    """Reads 16 rows, or some more, of a shard."""
    steps = {"max_steps": {"max_steps": 2, "checkpoint": {"every_steps": 2}}}
    epochs = build_input(
        version,
        read_manifest(version),
        input={"batch_size": 8, "shuffle_buffer": 16, "interleave_shards": 1},
        fit=FitConfig.model_validate({"steps_per_loop": 2, **steps.get(stop, {})}),
    )
    run_steps = build_run_steps(tf.distribute.get_strategy(), count_rows)
    stopping = EarlyStoppingConfig(metric="auc")
    enough = StopsAfterFirst(1, stopping, [], LOGS, lambda state: {"auc": 0.5})
    validations = enough if stop == "validation" else NEVER
    run_from(epochs, Position(0, 0), run_steps, checkpoints, validations)


@pytest.mark.parametrize("stop", ["max_steps", "validation"])
def test_shards_that_a_run_reads_in_part_are_compared_before_its_end_is_saved(
    stop: str, tmp_path: Path, tiny_version: Path
) -> None:
    version = tmp_path / "d"
    shutil.copytree(tiny_version, version)
    sound, changed = Saved(), Saved()
    run_two_steps(version, stop, sound)
    assert sound.positions == [Position(0, 2)]
    for shard in range(4):
        rewrite_label(version, 194, shard)
    with pytest.raises(InputDataError, match=r"is not the file that was written"):
        run_two_steps(version, stop, changed)
    assert changed.positions == []


CULPRIT = Position(1, 4)  # step 17 of the run


def build_trainer(data: TrainingData, monkeypatch, *, replicas: int = 1, **fit) -> Trainer:
    """A trainer whose objective is not finite in one step of the run."""
    checkpoint = CheckpointConfig(every_steps=1)
    settings = {"epochs": 2, "early_stopping": None, "checkpoint": checkpoint, **fit}
    config = CONFIG.model_copy(update={"fit": FitConfig(**settings)})
    compute = SampledSoftmax.__call__

    def tripping(objective, model, batch, training) -> tf.Tensor:
        losses = compute(objective, model, batch, training)
        hit = training.seed[1] == 8 * CULPRIT.step(12)  # the counter of random numbers
        return tf.where(hit, tf.constant(np.inf), losses)

    monkeypatch.setattr(SampledSoftmax, "__call__", tripping)
    return Trainer(
        config, data, build_strategy(DevicesConfig(cpu_replicas=replicas)), TrainingProgress()
    )


@pytest.fixture
def data(tiny_version: Path, tiny_manifest: Manifest) -> TrainingData:
    return TrainingData(tiny_version, tiny_manifest)


@pytest.mark.parametrize(
    ("fit", "replicas"),
    [
        ({"steps_per_loop": 5}, 1),
        pytest.param(
            {"steps_per_loop": 12, "checkpoint": CheckpointConfig()},
            2,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_training_ends_at_the_batch_that_is_at_fault(
    fit, replicas: int, data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    trainer = build_trainer(data, monkeypatch, replicas=replicas, **fit)
    with pytest.raises(TrainingDivergedError, match="epoch 2, at step 5") as caught:
        trainer.fit(tmp_path, None)
    assert caught.value.exit_code == 5
    newest = list_checkpoints(tmp_path / "checkpoints" / "last")[-1].position
    assert newest == (Position(1, 0) if "checkpoint" in fit else CULPRIT)
    state = collect_state(model=trainer.parts.model, optimizers=trainer.parts.optimizers)
    restore_newest(tmp_path / "checkpoints" / "last", state, print)
    assert int(trainer.parts.optimizers.step.numpy()) == newest.step(12)
    assert find_non_finite(state.variables.items()) is None


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("every_steps", "asynchronous"),
    some_of(itertools.product([4, 12], [True, False]), [(4, False), (12, True)]),
)
def test_state_that_bursts_where_no_loss_shows_it_is_not_saved(
    asynchronous: bool, every_steps: int, data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    """Found when it is saved, inside of an epoch and at its end."""
    checkpoint = CheckpointConfig(every_steps=every_steps, asynchronous=asynchronous)
    fit = FitConfig(epochs=1, steps_per_loop=4, early_stopping=None, checkpoint=checkpoint)
    config = CONFIG.model_copy(update={"fit": fit})
    trainer = Trainer(config, data, tf.distribute.get_strategy(), TrainingProgress())
    run_steps, calls = trainer.parts.run_steps, itertools.count(1)

    def bursting(iterator, steps: tf.Tensor):
        result = run_steps(iterator, steps)
        if next(calls) == every_steps // 4:
            slot = trainer.parts.optimizers.sparse.slots["second_moment"][0]
            slot.assign(tf.fill(slot.shape, np.inf))
        return result

    monkeypatch.setattr(trainer, "parts", replace(trainer.parts, run_steps=bursting))
    message = rf"epoch 1, at step {every_steps}\n.*second_moment.* is not finite"
    with pytest.raises(TrainingDivergedError, match=message):
        trainer.fit(tmp_path, None)
    assert list_checkpoints(tmp_path / "checkpoints" / "last") == []


def test_features_that_are_no_numbers_are_named_and_no_rate_is_blamed(
    data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    trainer = build_trainer(data, monkeypatch, steps_per_loop=5)
    read = trainer.parts.epoch_input.read_batch
    odd = {
        "price": tf.constant([1.0, np.nan, 3.0]),
        "age": tf.constant([20.0, 30.0, 9e8]),
        "tags": tf.SparseTensor([[0, 1], [2, 5]], [np.inf, 2.0], [3, 9]),
    }
    monkeypatch.setattr(trainer.parts.epoch_input, "read_batch", lambda at: {**read(at), **odd})
    with pytest.raises(TrainingDivergedError, match="NaN or infinity in price, tags") as caught:
        trainer.fit(tmp_path, None)
    assert "learning_rate" not in str(caught.value)
