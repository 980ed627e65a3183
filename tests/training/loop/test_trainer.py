from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig, MFConfig
from conf.training.objectives import SampledSoftmaxConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import EarlyStoppingConfig, FitConfig, TrainConfig
from tests.training.dynamic_runs import build_trainer
from training.checkpoint.manager import restore_newest
from training.checkpoint.saved_tensors import collect_state
from training.input.batches import build_eval_dataset
from training.loop.trainer import Trainer
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel
from training.monitoring.progress import LineProgress
from training.monitoring.run_logs import TrainingResult
from training.objectives.item_catalog import read_item_events
from training.objectives.user_items import TrainRows


def test_a_step_reads_what_model_and_objective_name(tiny_version: Path) -> None:
    trainer = build_trainer(configure({"name": "dssm", "embedding_dim": 4}), tiny_version)
    inputs = trainer.parts.epoch_input.inputs
    features = inputs.features
    assert len(features) == len(set(features))
    assert {*trainer.parts.model.user_inputs, *trainer.parts.model.item_inputs} <= set(features)
    looked_up = {name for lookup in inputs.lookups or () for name in lookup.features}
    assert looked_up <= set(features)
    assert {"history", "movie_id"} <= looked_up


DSSM = DSSMConfig(
    embedding_dim=8,
    user_hidden_units=(16,),
    history_pooling="position_weighted",
    embedding_l2=1e-4,
)
# All that draws: dropout, uniform negatives; and a schedule that depends on the step.
RANDOM_DSSM = DSSM.model_copy(
    update={
        "dropout": 0.2,
        "objective": SampledSoftmaxConfig(negatives={"source": "mixed", "count": 8}),
    }
)


class Messages(LineProgress):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str, **fields: object) -> None:
        self.texts.append(text)

    def step(self, status: object) -> None:
        pass

    def epoch(self, record: object, best: bool, metric: str | None) -> None:
        pass


def configure(model=DSSM, *, epochs: int = 2, **changes) -> TrainConfig:
    return TrainConfig(
        **{
            "dataset": "tiny",
            "name": "t",
            "model": model,
            "input": InputConfig(batch_size=64, shuffle_buffer=1000),
            "optimizer": OptimizerConfig(learning_rate=0.01, schedule="cosine"),
            "fit": FitConfig(epochs=epochs, steps_per_loop=5),
            **changes,
        }
    )


@pytest.fixture
def fit(tmp_path: Path, tiny_version: Path) -> Callable:
    """Trains and returns the trainer, its result and its run directory."""

    def run_fit(
        config: TrainConfig, name: str = "run", validate=None
    ) -> tuple[Trainer, TrainingResult, Path]:
        trainer, run = build_trainer(config, tiny_version), tmp_path / name
        run.mkdir()
        return trainer, trainer.fit(run, validate), run

    return run_fit


def weights(trainer: Trainer) -> list[np.ndarray]:
    return [variable.numpy() for variable in trainer.parts.model.trainable_variables]


@pytest.mark.parametrize("model", [DSSM, MFConfig(embedding_dim=8)])
def test_learns_what_popularity_cannot(
    model, fit, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    trainer, _, _ = fit(configure(model, epochs=8))
    test = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "test", 100)))
    items = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "catalog", 100)))
    vectors = trainer.parts.model.embed_items(items).numpy()
    scores = np.full((60, 42), -np.inf)
    scores[:, items["movie_id"].numpy()] = trainer.parts.model.embed_users(test).numpy() @ vectors.T
    popularity = np.tile(read_item_events(TrainRows(tiny_version, tiny_manifest, 1)), (60, 1))
    targets = test["movie_id"].numpy()
    # Nine of ten events stay in the user's group of ten items: 0.9 is as good as it gets.
    own, popular = (
        (s > s[np.arange(60), targets][:, None]).sum(axis=1) for s in (scores, popularity)
    )
    assert (own < 10).mean() > 0.65
    assert (popular < 10).mean() < 0.5


def test_the_number_of_steps_per_loop_changes_nothing(fit) -> None:
    many, one = (
        fit(configure(RANDOM_DSSM, fit=FitConfig(epochs=1, steps_per_loop=loop)), str(loop))[0]
        for loop in (FitConfig().steps_per_loop, 1)
    )
    assert all(np.array_equal(a, b) for a, b in zip(weights(many), weights(one), strict=True))


def test_the_best_epoch_is_kept_and_training_stops(fit, tiny_manifest: Manifest) -> None:
    values = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    seen: list[np.ndarray] = []

    def validate(model: RetrievalModel) -> dict[str, float]:
        seen.append(model.table_variables[0].numpy())
        return {"ndcg@10": next(values)}

    stopping = EarlyStoppingConfig(metric="ndcg@10", patience=2)
    config = configure(fit=FitConfig(epochs=9, early_stopping=stopping))
    _, result, run = fit(config, validate=validate)
    assert (result.best_epoch, result.epochs, result.stopped_early) == (2, 4, True)
    history = json.loads((run / "history.json").read_text())
    assert [entry["validation"]["ndcg@10"] for entry in history] == [0.1, 0.5, 0.4, 0.3]
    for which, epoch in (("best", 2), ("last", 4)):
        model = build_model(config.model, tiny_manifest, 77)
        restore_newest(run / "checkpoints" / which, collect_state(model=model), print)
        np.testing.assert_array_equal(model.table_variables[0].numpy(), seen[epoch - 1])


def test_history_and_tensorboard(fit) -> None:
    _, result, run = fit(configure(), validate=lambda model: {"ndcg@10": 0.25})
    entry = json.loads((run / "history.json").read_text())[0]
    assert entry["examples"] == 768  # 780 rows less the tail
    assert entry["examples_per_s"] == pytest.approx(768 / entry["seconds"])
    assert 0 <= entry["input_wait_share"] <= 1
    events = list((run / "logs").glob("events.*"))
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events[0]))
        for value in event.summary.value
    }
    assert {"train/loss", "validation/ndcg@10"} <= tags
    assert result.steps == 24
