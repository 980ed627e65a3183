"""What is validated on: the validation split, or rows that are held out of train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.run import read_json
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.metrics import register_metric
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig, MFConfig, RankingConfig
from conf.training.objectives import BinaryConfig, SampledSoftmaxConfig
from conf.training.train import EarlyStoppingConfig, EvaluationConfig, FitConfig, TrainConfig
from training.fit import fit_run
from training.input.batches import build_eval_dataset
from training.loop.plan import selection_metric
from training.loop.validation import build_validate, find_best_epoch, should_stop
from training.models.registry import build_model
from training.monitoring.progress import build_progress
from training.monitoring.run_logs import EpochRecord, read_history
from training.reader.training_data import TrainingData

NAN = float("nan")


def records(values: list[float | None], metric: str = "ndcg@10") -> list[EpochRecord]:
    losses = values if metric == "loss" else [1.0] * len(values)
    return [
        EpochRecord(i + 1, loss, 1.0, 10, 10.0, 0.1, {} if value is None else {metric: value})
        for i, (value, loss) in enumerate(zip(values, losses, strict=True))
    ]


@pytest.mark.parametrize(
    ("metric", "values", "best", "stop"),
    [
        ("ndcg@10", [0.3, 0.2], 1, False),
        ("ndcg@10", [0.1, 0.3, 0.2], 2, False),
        ("ndcg@10", [0.3, 0.3, 0.1], 1, True),  # the first of equals
        ("ndcg@10", [0.3, 0.2, 0.4], 3, False),
        ("ndcg@10", [NAN, 0.1], 2, False),
        ("loss", [3.0, 1.0, 2.0], 2, False),
        # While it is not defined the latest weights are as good as any, and nothing stops.
        ("own_f1", [None, None, None], 3, False),
        ("own_f1", [None, 0.2, None, 0.1], 2, True),
        ("own_f1", [-0.3, None], 1, False),
    ],
)
def test_the_best_epoch_and_whether_training_stops(metric, values, best: int, stop: bool) -> None:
    register_metric("own_f1", "higher")
    history, config = records(values, metric), EarlyStoppingConfig(metric=metric, patience=2)
    assert find_best_epoch(history, metric) == best
    assert should_stop(history, config) is stop
    assert not should_stop(history, None)
    assert not should_stop([], config)


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


def measure(config: TrainConfig, version: Path, manifest: Manifest):
    """A model, its validation metrics, and the rows that are held out."""
    model = build_model(config.model, manifest, 3)
    validate = build_validate(config, TrainingData(version, manifest))
    rows = next(iter(build_eval_dataset(version, manifest, "train", 10_000, held_out=config.input)))
    return model, validate(model), rows


def rank_alone(model, rows, met: list[set[int]], items) -> np.ndarray:
    """The rank of each row's item among those that its user has not met."""
    scores = model.embed_users(rows).numpy() @ model.embed_items(items).numpy().T
    ids, ranks = items["movie_id"].numpy().tolist(), []
    for row, item in enumerate(rows["movie_id"].numpy().tolist()):
        kept = [i for i, other in enumerate(ids) if other == item or other not in met[row]]
        ranks.append((scores[row, kept] >= scores[row, ids.index(item)]).sum())
    return np.array(ranks)


@pytest.mark.parametrize(
    ("keys", "mask_seen"),
    [(("user_id",), True), (("user_id", "movie_id"), True), (("user_id", "movie_id"), False)],
)
def test_held_out_rows_are_ranked_without_what_their_user_has_met(
    keys: tuple[str, ...], tiny_version: Path, tiny_manifest: Manifest, *, mask_seen: bool
) -> None:
    held_out = InputConfig(batch_size=32, validation={"hash_of": list(keys), "share": 0.3})
    evaluation = EvaluationConfig(mask_seen=mask_seen)
    config = configure(tiny_version, input=held_out, evaluation=evaluation)
    model, found, rows = measure(config, tiny_version, tiny_manifest)
    every = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000)))
    pairs = [list(zip(*(b[n].numpy().tolist() for n in ("user_id", "movie_id")), strict=True))
             for b in (every, rows)]  # fmt: skip
    trained, users = set(pairs[0]) - set(pairs[1]), {user for user, _ in pairs[1]}
    # Of users who are held out whole, the row's history alone says what they had met.
    assert bool(users & {user for user, _ in trained}) is (len(keys) > 1)
    met = [
        {other for owner, other in trained if owner == user} | set(history) if mask_seen else set()
        for (user, _), history in zip(pairs[1], rows["history"].numpy().tolist(), strict=True)
    ]
    items = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "catalog", 1000)))
    ranks = rank_alone(model, rows, met, items)
    assert 100 < len(ranks) < 400
    assert found["mrr"] == pytest.approx((1 / ranks).mean())
    assert found["hit_rate@10"] == pytest.approx((ranks <= 10).mean())


def test_rows_with_labels_are_scored(tiny_version: Path, tiny_manifest: Manifest) -> None:
    config = configure(tiny_version, BinaryConfig())
    model, found, rows = measure(config, tiny_version, tiny_manifest)
    logits = tf.reduce_sum(model.embed_users(rows) * model.embed_items(rows), axis=1)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(rows["label"], logits / model.temperature)
    auc = tf.keras.metrics.AUC(num_thresholds=5000, from_logits=True)
    auc.update_state(rows["label"], logits)
    assert found["loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)
    assert found["auc"] == pytest.approx(float(auc.result()), abs=2e-3)


@pytest.mark.parametrize(
    ("model", "metric", "allowed"),
    [
        (DSSMConfig(), "auc", "ndcg@10"),
        (DSSMConfig(), "ndcg@7", "evaluation.ks"),
        (RankingConfig(), "rmse", "auc, gauc, log_loss"),
        (RankingConfig(), "ndcg@10", "auc, gauc, log_loss"),
        (
            RankingConfig(tasks={"a": {"objective": "squared_error"}, "b": {}}),
            "a/rmse",
            "rmse, mae, b/auc",
        ),
    ],
)
def test_metrics_that_are_not_measured_are_refused_before_training(
    model: DSSMConfig | RankingConfig, metric: str, allowed: str, tiny_version: Path
) -> None:
    plain = configure(tiny_version, input=InputConfig(batch_size=32))
    stopping = EarlyStoppingConfig(metric=metric)
    fit = plain.fit.model_copy(update={"early_stopping": stopping})
    config = plain.model_copy(update={"model": model, "fit": fit})
    with pytest.raises(ConfigError, match=r"early_stopping\.metric") as caught:
        selection_metric(config)
    assert allowed in caught.value.render()


def test_a_run_is_chosen_by_its_held_out_loss(tiny_version: Path, tmp_path: Path, capsys) -> None:
    config = configure(tiny_version, BinaryConfig(), root=str(tmp_path))
    run = fit_run(config, build_progress("text", 3600))
    assert "not ndcg@10" in capsys.readouterr().err
    losses = [record.validation["loss"] for record in read_history(run)]
    assert np.isfinite(losses).all()
    card = read_json(run / "run_card.json")
    assert card["training"]["best_epoch"] == int(np.argmin(losses)) + 1
