from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig, MFConfig
from conf.training.train import EarlyStoppingConfig, FitConfig, TrainConfig
from tests.training.dynamic_runs import build_trainer
from tests.training.killed_run import CONFIG
from training.checkpoint.manager import restore_newest
from training.checkpoint.saved_tensors import collect_state
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history
from training.objectives.user_items import TrainRows

DSSM = DSSMConfig(
    embedding_dim=8,
    user_hidden_units=(16,),
    history_pooling="position_weighted",
    embedding_l2=1e-4,
)


class Messages(TrainingProgress):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str, **fields: object) -> None:
        self.texts.append(text)


def configure(model=DSSM, **fit) -> TrainConfig:
    settings = InputConfig(batch_size=64, shuffle_buffer=1000)
    updates = {"model": model, "input": settings, "fit": FitConfig(**fit)}
    return CONFIG.model_copy(update=updates)


@pytest.mark.parametrize("model", [DSSM, MFConfig(embedding_dim=8)])
def test_learns_what_popularity_cannot(
    model, tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    trainer = build_trainer(configure(model, epochs=8), tiny_version)
    trainer.fit(tmp_path, None)
    test = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "test", 100)))
    items = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "catalog", 100)))
    vectors = trainer.parts.model.embed_items(items).numpy()
    scores = np.full((60, 42), -np.inf)
    scores[:, items["movie_id"].numpy()] = trainer.parts.model.embed_users(test).numpy() @ vectors.T
    popularity = np.tile(TrainRows(tiny_version, tiny_manifest, 1).count_items("events"), (60, 1))
    targets = test["movie_id"].numpy()
    # Nine of ten events stay in the user's group of ten items: 0.9 is as good as it gets.
    own, popular = (
        (s > s[np.arange(60), targets][:, None]).sum(axis=1) for s in (scores, popularity)
    )
    assert (own < 10).mean() > 0.65
    assert (popular < 10).mean() < 0.5


def test_the_number_of_steps_per_loop_changes_nothing(tiny_version: Path, tmp_path: Path) -> None:
    found = []
    for loop in (FitConfig().steps_per_loop, 1):
        config = configure(CONFIG.model, epochs=1, steps_per_loop=loop)
        trainer, run = build_trainer(config, tiny_version), tmp_path / str(loop)
        run.mkdir()
        trainer.fit(run, None)
        found.append([variable.numpy() for variable in trainer.parts.model.trainable_variables])
    for many, one in zip(*found, strict=True):
        np.testing.assert_array_equal(many, one)


def test_the_best_epoch_is_kept_and_training_stops(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    values = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    seen: list[np.ndarray] = []

    def validate(model: RetrievalModel) -> dict[str, float]:
        seen.append(model.table_variables[0].numpy())
        return {"ndcg@10": next(values)}

    stopping = EarlyStoppingConfig(metric="ndcg@10", patience=2)
    config = configure(epochs=9, early_stopping=stopping)
    result = build_trainer(config, tiny_version).fit(tmp_path, validate)
    assert (result.best_epoch, result.epochs, result.stopped_early) == (2, 4, True)
    history = [record.validation["ndcg@10"] for record in read_history(tmp_path)]
    assert history == [0.1, 0.5, 0.4, 0.3]
    for which, epoch in (("best", 2), ("last", 4)):
        model = build_model(config.model, tiny_manifest, 77)
        restore_newest(tmp_path / "checkpoints" / which, collect_state(model=model), print)
        np.testing.assert_array_equal(model.table_variables[0].numpy(), seen[epoch - 1])
