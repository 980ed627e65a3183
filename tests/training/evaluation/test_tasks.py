from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.checkpoint.restore import TrainedModel
from training.encoders import vocabularies
from training.evaluation import tasks
from training.evaluation.metrics import GroupedAUC, StreamedAUC, StreamedCalibration
from training.evaluation.scored_rows import RowColumns, UserGroups
from training.evaluation.systems import score_pairs
from training.evaluation.tasks import ErrorScores, LabelScores, evaluate_tasks
from training.input.batches import build_eval_dataset
from training.loop.validation import build_validate
from training.models.ranking import RankingModel
from training.models.registry import build_model
from training.reader.training_data import TrainingData

ROWS = st.lists(st.tuples(st.booleans(), st.floats(-12, 12, width=16)), min_size=1, max_size=60)


@given(ROWS, st.integers(1, 12), st.integers(1, 4))
def test_equals_a_walk_over_the_bins(rows: list[tuple[bool, float]], bins: int, parts: int) -> None:
    y = np.array([label for label, _ in rows], dtype=bool)
    z = np.array([logit for _, logit in rows])
    streamed = StreamedCalibration(bins)
    for part in np.array_split(np.arange(len(rows)), parts):
        streamed.update(y[part], z[part])
    p = 1 / (1 + np.exp(-z))
    found = streamed.result()
    members = [np.clip(np.floor(p * bins), 0, bins - 1) == b for b in range(bins)]
    error = sum(abs(p[m].mean() - y[m].mean()) * m.mean() for m in members if m.any())
    assert found["expected_error"] == pytest.approx(error, abs=1e-9)
    assert [b["rows"] for b in found["bins"]] == [int(m.sum()) for m in members if m.any()]
    assert found["ratio"] == (pytest.approx(p.mean() / y.mean()) if y.any() else None)


FLOATS = st.floats(width=32, allow_nan=False)
SCORE_HISTOGRAM_ROWS = st.lists(st.tuples(st.booleans(), FLOATS | st.integers(-2, 2)), max_size=60)


def pairwise(labels: np.ndarray, scores: np.ndarray) -> float | None:
    positive, negative = scores[labels][:, None], scores[~labels][None, :]
    if not positive.size or not negative.size:
        return None
    return float(np.mean((positive > negative) + 0.5 * (positive == negative)))


def stream(labels: np.ndarray, scores: np.ndarray, exact_rows: int, parts: int = 3):
    streamed = StreamedAUC(exact_rows)
    for part in np.array_split(np.arange(len(labels)), parts):
        streamed.update(labels[part], scores[part])
    return streamed.result()


@given(SCORE_HISTOGRAM_ROWS, st.integers(0, 100))
def test_the_value_of_all_pairs_lies_within_the_error(
    rows: list[tuple[bool, float]], exact_rows: int
) -> None:
    labels = np.array([label for label, _ in rows], dtype=bool)
    scores = np.array([score for _, score in rows], dtype=np.float32)
    expected, found = pairwise(labels, scores), stream(labels, scores, exact_rows)
    if expected is None:
        assert found is None
        return
    assert abs(found.value - expected) <= found.error + 1e-12
    if len(rows) <= exact_rows:
        assert found.error == 0.0


def test_scores_of_few_values_are_exact_in_the_histogram_too() -> None:
    labels = np.array([True, False, True, False])
    scores = np.array([-0.0, 0.0, 2.0, -1.5], dtype=np.float32)
    assert stream(labels, scores, 0).value == pairwise(labels, scores)


def test_many_rows_are_close() -> None:
    rng = np.random.default_rng(1)
    labels = rng.random(4000) < 0.2
    scores = ((rng.normal(size=4000) + labels) * 50 - 100).astype(np.float32)
    found = stream(labels, scores, exact_rows=10)
    assert abs(found.value - pairwise(labels, scores)) <= found.error < 1e-3


GROUPED_AUC_ROWS = st.lists(
    st.tuples(st.integers(-3, 6), st.booleans(), st.integers(-3, 3)), max_size=60
)


@given(GROUPED_AUC_ROWS, st.integers(0, 70), st.integers(1, 5))
def test_equals_the_pairs_of_each_user_in_memory_and_on_disk(
    rows: list[tuple[int, bool, int]], kept_rows: int, parts: int
) -> None:
    grouped = GroupedAUC(kept_rows)
    array = np.array(rows, dtype=np.int64).reshape(-1, 3)
    for part in np.array_split(array, parts):
        grouped.update(part[:, 0], part[:, 1] == 1, part[:, 2].astype(np.float32))
    owns = [array[array[:, 0] == user] for user in np.unique(array[:, 0])]
    areas = [(pairwise(own[:, 1] == 1, own[:, 2]), len(own)) for own in owns]
    areas = [(area, size) for area, size in areas if area is not None]
    count = sum(size for _, size in areas)
    value = sum(area * size for area, size in areas if area) / count if count else None
    for _ in range(2):  # asking does not change the answer
        found, _ = grouped.result()
        assert (found["users"], found["rows"]) == (len(areas), count)
        assert found["value"] == pytest.approx(value, abs=1e-12)


def test_scores_are_dot_products_of_each_row_in_float64(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    model = TinyTowers(tiny_manifest)
    users = UserGroups("user_id", range(2, 10**6))
    columns, collected = RowColumns(users, label="label"), LabelScores(2.0, users, train_rate=0.25)
    labels, dots = [], []
    for batch in build_eval_dataset(tiny_version, tiny_manifest, "test", 13):
        collected.add(columns.read(batch, score_pairs(model, batch)))
        labels.append(batch["label"].numpy())
        vectors = model.embed_users(batch).numpy().astype(np.float64)
        dots.append((vectors * model.embed_items(batch).numpy()).sum(axis=1))
    y, z = np.concatenate(labels), np.concatenate(dots)
    found = collected.result()
    assert found["auc"] == pytest.approx(pairwise(y == 1, z), abs=1e-6)
    p = 1 / (1 + np.exp(-z / 2.0))
    expected = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert found["log_loss"] == pytest.approx(expected, rel=1e-5)
    constant = -np.mean(y * np.log(0.25) + (1 - y) * np.log(0.75))
    assert found["constant"] == {"auc": 0.5, "rate": 0.25, "log_loss": pytest.approx(constant)}
    assert found["rows"] == len(y)
    assert found["auc_error"] == 0.0
    assert found["calibration"]["ratio"] == pytest.approx(p.mean() / y.mean(), rel=1e-5)


@pytest.mark.parametrize(("first", "ids"), [(2, [0, 1, 5, 5]), (5, [0, 3, 5, 5])])
def test_rows_of_unknown_users_are_in_no_group(first: int, ids: list[int]) -> None:
    users = UserGroups("user_id", range(first, 80))
    collected = LabelScores(users=users)
    batch = {"label": np.array([1.0, 0.0, 1.0, 0.0]), "user_id": np.array(ids)}
    scores = np.array([1, 2, 4, 3], np.float32)
    collected.add(RowColumns(users, label="label").read(batch, scores))
    expected = {"value": 1.0, "users": 1, "rows": 2, "rows_of_unknown_users": 2}
    assert collected.result()["gauc"] == expected


def test_validation_leaves_out_buckets_of_users_as_evaluation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = TinyConfig(users=30, events_per_user=14, leave_out=4, own_group=0.5)
    version = write_tiny_dataset(tmp_path / "version", config=several)
    manifest = read_manifest(version)
    sections = {"model": {"kind": "ranking"}, "evaluation": {"slices": []}}
    config = TrainConfig.model_validate({"dataset": "d", "name": "n", **sections})
    model = build_model(config.model, manifest, 3)
    assert isinstance(model, RankingModel)

    def measure() -> dict[str, Any]:
        trained = TrainedModel(Path(), model, config, manifest, version)
        found = evaluate_tasks(trained, model, "validation")["label"]["gauc"]
        validate = build_validate(config, TrainingData(version, manifest))
        assert validate is not None
        assert validate(model)["gauc"] == found["value"]
        return dict(found)

    whole, plan = measure(), vocabularies.read_plan(version, manifest)
    specs = [replace(s, oov_buckets=9 if s.name == "user_id" else None) for s in plan.vocabularies]
    bucketed = replace(plan, vocabularies=tuple(specs))
    monkeypatch.setattr(vocabularies, "read_plan", lambda *_: bucketed)
    part = measure()
    assert part["rows_of_unknown_users"] == 9 * several.leave_out
    assert part["users"] < whole["users"]
    assert part["value"] != whole["value"]


def test_one_class_has_no_auc_and_no_rate_means_that_of_the_rows() -> None:
    collected = LabelScores()
    collected.add(RowColumns(label="label").read({"label": tf.ones([3])}, np.ones(3, np.float32)))
    found = collected.result()
    assert [found[name] for name in ("auc", "log_loss", "calibration", "gauc")] == [None] * 4
    assert found["constant"] == {"auc": 0.5, "rate": 1.0, "log_loss": 0.0}


def _weighted_rows(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    labels = (rng.random(rows) < 0.3).astype(np.float64)
    return {
        "label": labels,
        "user": rng.integers(2, 62, rows),
        "weight": rng.integers(0, 5, rows).astype(np.float32),
        "score": np.round(rng.normal(size=rows) + labels, 1).astype(np.float32),
    }


def _flatten(values: Any, name: str = "") -> dict[str, Any]:
    """Numbers by the names that lead to them, without the counts of rows."""
    if not isinstance(values, dict | list):
        is_number = isinstance(values, float | int) and not name.endswith("/rows")
        return {name: values} if is_number else {}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    return {n: v for key, own in items for n, v in _flatten(own, f"{name}/{key}").items()}


@pytest.mark.parametrize("exact_rows", [10, 10**6])
def test_a_row_of_weight_two_is_as_good_as_the_row_twice(
    exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = _weighted_rows(900)
    repeats = batch["weight"].astype(int)
    repeated = {name: np.repeat(column, repeats) for name, column in batch.items()}
    monkeypatch.setattr(tasks, "StreamedAUC", partial(StreamedAUC, exact_rows))
    users = UserGroups("user", range(2, 62))
    weighted = RowColumns(users, label="label", weight="weight")
    plain = RowColumns(users, label="label")
    for build in (partial(LabelScores, 1.0, users, 3), partial(ErrorScores, 0.2, 3)):
        found, expected = build(), build()
        for part in np.array_split(np.arange(900), 3):
            own = {name: column[part] for name, column in batch.items()}
            found.add(weighted.read(own, own["score"]).take_counted())
        expected.add(plain.read(repeated, repeated["score"]).take_counted())
        assert found.result()["rows"] == np.count_nonzero(repeats)
        wanted = _flatten(expected.result())
        assert _flatten(found.result()) == pytest.approx(wanted, nan_ok=True)


def test_weights_that_are_none_are_refused() -> None:
    columns = RowColumns(label="label", weight="weight")
    for bad in (-1.0, np.nan):
        batch = {"label": np.ones(2), "weight": np.array([1.0, bad])}
        with pytest.raises(InputDataError, match="weight 'weight'"):
            columns.read(batch, np.ones(2, np.float32))


def test_rows_without_a_label_are_not_counted() -> None:
    lacking, batch = RowColumns(label="label", may_lack=True), {"label": np.array([1.0, np.nan])}
    assert lacking.read(batch, np.ones(2)).is_counted.tolist() == [True, False]
    assert RowColumns(label="label").read(batch, np.ones(2)).is_counted.all()
    ragged = {"label": tf.ragged.constant([[1.0], [], [0.0]])}
    rows = RowColumns(label="label").read(ragged, np.arange(3.0)).take_counted()
    assert (rows.labels.tolist(), rows.scores.tolist()) == ([1.0, 0.0], [0.0, 2.0])
