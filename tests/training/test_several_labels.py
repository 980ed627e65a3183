"""Several labels, of which rows may lack some: such a row weighs 0 in the label's own task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import MANIFEST_FILE, Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.storage.atomic_output import write_text_atomic
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, describe_shard, write_tiny_dataset
from training.checkpoint.restore import TrainedModel, load_run
from training.evaluation.evaluate import compare_runs, evaluate_split
from training.evaluation.metrics import auc, find_log_losses
from training.evaluation.tasks import summarize_tasks
from training.fit import fit_run
from training.input.batches import Batch, build_eval_dataset, build_train_dataset
from training.models.calibration import fit_isotonic
from training.models.ranking import RankingModel
from training.monitoring.progress import TrainingProgress
from training.networks.network import StepContext
from training.objectives.objective import TaskLosses, build_objective
from training.reader.batch_reader import open_batches

TASKS = {"click": {"label": "label"}, "stars": {"label": "rating", "objective": "squared_error"}}
MODEL = {
    "kind": "ranking", "network": "shared_bottom", "embedding_dim": 4, "tasks": TASKS,
    "params": {"hidden_units": [4]}, "calibration": "isotonic",
}  # fmt: skip


def edit(version: Path, split: SplitInfo, ratings: str = "grades") -> SplitInfo:
    """Of three rows the first has the label alone, the second a rating alone, the third both."""
    shards = []
    for shard in split.shards:
        path = version / shard.path
        records = [bytes(r.numpy()) for r in tf.data.TFRecordDataset(str(path))]
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number, record in enumerate(records):
                example = tf.train.Example.FromString(record)
                features = example.features.feature
                if number % 3:
                    grade = number % 5 if ratings == "grades" else float(ratings)
                    features["rating"].float_list.value.append(grade)
                if number % 3 == 1:
                    del features["label"]
                writer.write(example.SerializeToString())
        shards.append(describe_shard(version, shard.path, shard.rows))
    return SplitInfo(split.name, tuple(shards))


def write_version(root: Path, ratings: str = "grades") -> tuple[Path, Manifest]:
    version = write_tiny_dataset(root, config=TinyConfig(users=60))
    old = read_manifest(version)
    events = ("train", "validation", "test")
    splits = [edit(version, s, ratings) if s.name in events else s for s in old.splits]
    rating = FeatureSpec("rating", "float32", "label")
    schema = FeatureSchema((*old.schema.features, rating))
    manifest = replace(old, splits=tuple(splits), schema=schema)
    write_text_atomic(version / MANIFEST_FILE, manifest.dumps())
    return version, manifest


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    return write_version(tmp_path_factory.mktemp("two"))


def configure(version: Path, root: Path, **changes) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(version), "name": "two", "root": str(root), "model": MODEL,
            "input": {"batch_size": 32}, "optimizer": {"learning_rate": 0.02},
            "fit": {"epochs": 2}, **changes,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(two: tuple[Path, Manifest], tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    root = tmp_path_factory.mktemp("runs")
    return load_run(fit_run(configure(two[0], root), TrainingProgress()))


def read_whole(trained: TrainedModel, split: str) -> Batch:
    names = (*trained.model.inputs, "label", "rating", "user_id")
    [batch] = build_eval_dataset(
        trained.version_dir, trained.manifest, split, 9999, tuple(dict.fromkeys(names))
    )
    return batch


def test_what_a_row_lacks_is_nan(two: tuple[Path, Manifest]) -> None:
    config = configure(two[0], Path()).input
    for batches in (
        build_train_dataset(*two, config, epoch=0, seed=1, features=["label", "rating"]),
        open_batches(two[0], 32, features=["label", "rating"], drop_remainder=True),
    ):
        lacking = [
            np.stack([np.isnan(np.asarray(batch[name])) for name in ("label", "rating")], axis=1)
            for batch in batches
        ]
        found, counts = np.unique(np.concatenate(lacking), axis=0, return_counts=True)
        assert found.tolist() == [[False, False], [False, True], [True, False]]
        assert counts.min() > 0.9 * counts.max()


@pytest.mark.parametrize(("op", "value", "passing"), [("==", 1, False), ("!=", 1, True)])
def test_a_row_without_the_label_passes_what_leaves_a_value_out(
    op: str, value: float, passing: bool, two: tuple[Path, Manifest]
) -> None:
    asked = [{"feature": "label", "op": op, "value": value}]
    batches = list(open_batches(two[0], 8, filter=asked, features=["label"], shuffle=False))
    labels = np.concatenate([np.asarray(batch["label"]) for batch in batches])
    assert np.isnan(labels).any() == passing
    assert (labels[~np.isnan(labels)] == 1).all() == (not passing)


class Constant:
    """A model whose scores are variables."""

    temperature = 1.0

    def __init__(self, rows: int) -> None:
        rng = np.random.default_rng(0)
        self.logits = {name: tf.Variable(rng.normal(size=rows), dtype=tf.float32) for name in TASKS}

    def compute_logits(self, batch: Batch, training: StepContext | None = None):
        return self.logits


def test_a_row_without_a_label_weighs_nothing_in_its_own_task(trained: TrainedModel) -> None:
    objective = build_objective(
        trained.config.model, trained.version_dir, trained.manifest, trained.model, 32
    )
    assert isinstance(objective, TaskLosses)
    labels, ratings = np.array([1, np.nan, 0, 1]), np.array([np.nan, 4, 2, 0.5])
    batch = {name: tf.constant(v, tf.float32) for name, v in
             (("label", labels), ("rating", ratings))}  # fmt: skip
    model = Constant(4)
    with tf.GradientTape() as tape:
        losses = objective(model, batch, None)
    clicks, stars = (model.logits[name].numpy().astype(np.float64) for name in TASKS)
    expected = np.nan_to_num(np.logaddexp(0, clicks) - labels * clicks)
    expected += np.nan_to_num(np.square(stars - ratings))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gradients = tape.gradient(losses, list(model.logits.values()))
    assert [np.flatnonzero(g.numpy() == 0).tolist() for g in gradients] == [[1], [0]]
    assert all(np.isfinite(g.numpy()).all() for g in gradients)


def test_metrics_are_of_the_rows_that_have_the_label(trained: TrainedModel) -> None:
    model, batch = trained.model, read_whole(trained, "test")
    assert isinstance(model, RankingModel)
    found = evaluate_split(trained, "test")["tasks"]
    logits = {name: value.numpy() for name, value in model.compute_logits(batch).items()}
    labels, ratings = batch["label"].numpy(), batch["rating"].numpy()
    clicked, rated = ~np.isnan(labels), ~np.isnan(ratings)
    assert (found["click"]["rows"], found["stars"]["rows"]) == (clicked.sum(), rated.sum())
    assert 0 < clicked.sum() < len(labels)
    own, scores = labels[clicked] > 0.5, logits["click"][clicked]
    assert found["click"]["log_loss"] == pytest.approx(find_log_losses(own, scores).mean())
    assert found["click"]["auc"] == pytest.approx(auc(own, scores))
    errors = logits["stars"][rated] - ratings[rated]
    assert found["stars"]["rmse"] == pytest.approx(np.sqrt(np.square(errors).mean()), rel=1e-5)
    history = trained.run_dir / "history.json"
    assert "NaN" not in history.read_text()


def test_a_task_is_calibrated_on_the_rows_that_have_its_label(trained: TrainedModel) -> None:
    model, batch = trained.model, read_whole(trained, "validation")
    assert isinstance(model, RankingModel)
    labels = batch["label"].numpy()
    known = ~np.isnan(labels)
    logits = model.compute_uncalibrated_logits(batch)["click"].numpy()
    expected = fit_isotonic(logits[known], labels[known] > 0.5, np.ones(int(known.sum())))
    assert model.calibrations == {"click": expected}


def test_runs_are_compared_on_the_rows_that_have_the_label(trained: TrainedModel) -> None:
    found = compare_runs(trained, trained, "test")["metrics"]
    whole = evaluate_split(trained, "test")["tasks"]
    assert found["log_loss"]["run"] == pytest.approx(whole["click"]["log_loss"])
    assert found["stars/rmse"]["run"] == pytest.approx(whole["stars"]["rmse"], rel=1e-5)


def test_a_retrieval_model_is_validated_on_the_held_out_rows_that_have_the_label(
    two: tuple[Path, Manifest], tmp_path: Path
) -> None:
    model = {"kind": "retrieval", "name": "mf", "embedding_dim": 4, "objective": {"kind": "binary"}}
    held_out = {"batch_size": 32, "validation": {"hash_of": "user_id", "share": 0.3}}
    config = configure(two[0], tmp_path, model=model, input=held_out, fit={"epochs": 1})
    run = fit_run(config, TrainingProgress())
    assert "NaN" not in (run / "history.json").read_text()
    assert load_run(run).model.named_variables


def test_a_task_without_a_row_has_no_part_in_the_loss(trained: TrainedModel) -> None:
    assert isinstance(trained.model, RankingModel)
    found = {"click": {"rows": 2, "log_loss": 0.5}, "stars": {}}
    assert summarize_tasks(trained.model, found)["loss"] == 0.5
    assert np.isnan(summarize_tasks(trained.model, {"click": {}, "stars": {}})["loss"])
