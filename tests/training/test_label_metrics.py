from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from tests.training.towers import TinyTowers
from training.input import build_eval_dataset
from training.label_metrics import LabelScores


def test_scores_are_dot_products_of_each_row_in_float64(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    model = TinyTowers(tiny_manifest)
    collected = LabelScores(model, "label", "user_id", temperature=2.0)
    labels, dots, users_of = [], [], []
    for batch in build_eval_dataset(tiny_version, tiny_manifest, "test", 13, collected.inputs):
        collected.update(batch)
        labels.append(batch["label"].numpy())
        users_of.append(batch["user_id"].numpy())
        users = model.embed_users(batch).numpy().astype(np.float64)
        dots.append((users * model.embed_items(batch).numpy()).sum(axis=1))
    y, z = np.concatenate(labels), np.concatenate(dots)
    found = collected.result(train_rate=0.25)
    pairs = z[y == 1][:, None] - z[y == 0][None, :]
    assert found["auc"] == pytest.approx(np.mean(pairs > 0), abs=1e-6)
    p = 1 / (1 + np.exp(-z / 2.0))
    expected = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert found["log_loss"] == pytest.approx(expected, rel=1e-5)
    constant = -np.mean(y * np.log(0.25) + (1 - y) * np.log(0.75))
    assert found["constant"] == {"auc": 0.5, "rate": 0.25, "log_loss": pytest.approx(constant)}
    assert found["rows"] == len(y)
    assert found["auc_error"] == 0.0
    assert found["calibration"]["ratio"] == pytest.approx(p.mean() / y.mean(), rel=1e-5)
    ids = np.concatenate(users_of)
    by_user = {u: (y[ids == u], z[ids == u]) for u in set(ids)}
    expected = [
        (np.mean(zs[ys == 1][:, None] > zs[ys == 0][None, :]), len(ys))
        for ys, zs in by_user.values()
        if 0 < ys.sum() < len(ys)
    ]
    values, sizes = np.array(expected).reshape(-1, 2).T
    assert found["gauc"]["users"] == len(sizes)
    if len(sizes):
        assert found["gauc"]["value"] == pytest.approx(np.average(values, weights=sizes))


def test_rows_of_unknown_users_are_in_no_group(tiny_manifest: Manifest) -> None:
    collected = LabelScores(TinyTowers(tiny_manifest), "label", "user_id")
    ids = np.array([0, 1, 5, 5])
    collected._add(ids, np.array([True, False, True, False]), np.array([1, 2, 4, 3], np.float32))
    assert collected.result(None)["gauc"] == {"value": 1.0, "users": 1, "rows": 2}


def test_one_class_has_no_auc_and_no_rate_means_that_of_the_rows(
    tiny_manifest: Manifest,
) -> None:
    collected = LabelScores(TinyTowers(tiny_manifest), "label")
    one = tf.ones([3], tf.int64)
    lists = tf.ones([3, 2], tf.int64)
    collected.update(
        {
            "label": tf.ones([3]),
            "user_id": one,
            "gender": one,
            "history": lists,
            "movie_id": one,
            "genres": lists,
        }
    )
    found = collected.result(train_rate=None)
    assert found["auc"] is None
    assert found["log_loss"] is None
    assert found["calibration"] is None
    assert found["gauc"] is None
    assert found["constant"] == {"auc": 0.5, "rate": 1.0, "log_loss": 0.0}
