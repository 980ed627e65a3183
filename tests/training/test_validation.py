"""What is validated on: the validation split, or rows that are held out of train."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.training import (
    BinaryConfig,
    EarlyStoppingConfig,
    FitConfig,
    InputConfig,
    MFConfig,
    SampledSoftmaxConfig,
    TrainConfig,
)
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.chunks import TrainingData
from training.fit import fit_run, plan_run
from training.input import build_eval_dataset, build_held_out_dataset
from training.models import build_model
from training.progress import build_progress
from training.validation import (
    build_validate,
    check_held_out,
    is_validated,
    selection_metric,
)

HELD_OUT = {"hash_of": "user_id", "share": 0.3}


def configure(dataset: Path, objective=None, root: str = "unused", **changes) -> TrainConfig:
    return TrainConfig(
        **{
            "dataset": str(dataset),
            "name": "t",
            "root": root,
            "model": MFConfig(embedding_dim=4, objective=objective or SampledSoftmaxConfig()),
            "input": InputConfig(batch_size=32, validation=HELD_OUT),
            "fit": FitConfig(epochs=2, early_stopping=EarlyStoppingConfig(metric="ndcg@10")),
            **changes,
        }
    )


def held_out_rows(version: Path, manifest: Manifest, config: TrainConfig) -> dict:
    dataset = build_held_out_dataset(version, manifest, config.input, 10_000)
    return next(iter(dataset))


def test_held_out_rows_are_ranked(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = configure(tiny_version)
    model = build_model(config.model, tiny_manifest, 3)
    validate = build_validate(config, TrainingData(tiny_version, tiny_manifest))
    assert validate is not None
    found = validate(model)
    rows = held_out_rows(tiny_version, tiny_manifest, config)
    items = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "catalog", 1000)))
    scores = model.embed_users(rows).numpy() @ model.embed_items(items).numpy().T
    column = {int(item): i for i, item in enumerate(items["movie_id"])}
    own = np.array([column[int(item)] for item in rows["movie_id"]])
    ranks = (scores >= scores[np.arange(len(own)), own][:, None]).sum(axis=1)
    assert 100 < len(own) < 400
    assert found["hit_rate@10"] == pytest.approx((ranks <= 10).mean())
    assert found["mrr"] == pytest.approx((1 / ranks).mean())


def test_rows_with_labels_are_scored(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = configure(tiny_version, BinaryConfig())
    model = build_model(config.model, tiny_manifest, 3)
    validate = build_validate(config, TrainingData(tiny_version, tiny_manifest))
    assert validate is not None
    found = validate(model)
    rows = held_out_rows(tiny_version, tiny_manifest, config)
    logits = tf.reduce_sum(model.embed_users(rows) * model.embed_items(rows), axis=1)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(rows["label"], logits / model.temperature)
    auc = tf.keras.metrics.AUC(num_thresholds=5000, from_logits=True)
    auc.update_state(rows["label"], logits)
    assert found["loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)
    assert found["auc"] == pytest.approx(float(auc.result()), abs=2e-3)


def test_the_metric_that_chooses(tiny_version: Path, tiny_manifest: Manifest) -> None:
    assert selection_metric(configure(tiny_version)) == "ndcg@10"
    assert selection_metric(configure(tiny_version, BinaryConfig())) == "loss"
    plain = InputConfig(batch_size=32)
    assert selection_metric(configure(tiny_version, BinaryConfig(), input=plain)) == "ndcg@10"
    assert is_validated(configure(tiny_version, input=plain), tiny_manifest)


def test_without_rows_to_validate_on(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=20, validation=False))
    data = TrainingData(version, Manifest.loads((version / "manifest.json").read_text()))
    config = configure(version)
    assert build_validate(config, data) is not None
    empty = configure(version, input=InputConfig(batch_size=32))
    assert (build_validate(empty, data) is None) == (not data.manifest.has_split("validation"))


def test_a_share_that_holds_out_nothing_is_refused(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    nothing = InputConfig(batch_size=32, validation={"hash_of": "user_id", "share": 1e-9})
    config = configure(tiny_version, input=nothing, root=str(tmp_path / "runs"))
    with pytest.raises(InputDataError, match="holds out no rows"):
        check_held_out(config, TrainingData(tiny_version, tiny_manifest))
    with pytest.raises(InputDataError, match="holds out no rows"):
        fit_run(config, build_progress("json", 3600))
    assert not (tmp_path / "runs").exists()


def test_a_run_is_chosen_by_its_held_out_loss(tiny_version: Path, tmp_path: Path, capsys) -> None:
    config = configure(tiny_version, BinaryConfig(), root=str(tmp_path))
    assert plan_run(config)["selected_by"] == "loss"
    assert not list(tmp_path.iterdir())  # a plan keeps no counts
    run = fit_run(config, build_progress("text", 3600))
    told = capsys.readouterr().err
    assert "loss of the held-out rows chooses the epoch, not ndcg@10" in told
    history = json.loads((run / "history.json").read_text())
    card = json.loads((run / "run_card.json").read_text())
    losses = [entry["validation"]["loss"] for entry in history]
    assert card["training"]["best_epoch"] == int(np.argmin(losses)) + 1
    assert all(np.isfinite(losses))
