"""Calibration of log-odds: steps of rates, the line through them, and the rate of drawn rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import Manifest
from conf.training.input import InputConfig
from training.evaluation.metrics import find_log_losses
from training.models.calibration import (
    Calibration,
    find_keep_rate,
    fit_isotonic,
    fit_task,
)
from training.reader.rows import DecodedRows, balance_classes


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    return float(find_log_losses(labels, logits).mean())


LINE = Calibration((-1.0, 0.5, 2.0), (-3.0, 0.0, 0.25))
HALVES = {0: 0.5, 1: 0.5}
FEMALE = {"feature": "gender", "value": 2}


def sigmoid(x: Any) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def rise(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest rising sequence as its minimax formula (Robertson et al. 1988, theorem 1.4.4)."""
    places = range(len(values))

    def mean(a: int, b: int) -> float:
        return float(np.average(values[a : b + 1], weights=weights[a : b + 1]))

    return np.array(
        [max(min(mean(a, b) for b in places if b >= i) for a in places if a <= i) for i in places]
    )


def test_a_fit_joins_the_middles_of_the_steps() -> None:
    # Rates by logit: 0, 1/2, 1/4 and 1; the two in the middle are one step of 2/6.
    logits = np.float32([-2, -2, -1, -1, 1, 1, 1, 1, 3])
    labels = np.array([0, 0, 0, 1, 0, 0, 0, 1, 1], bool)
    found = fit_isotonic(logits, labels)
    np.testing.assert_allclose(found.logits, [-2.0, 1 / 3, 3.0], rtol=1e-6)
    # Half a row of a step's own from 0 and 1: 0.5 / 2, and 0.5 / 1.
    np.testing.assert_allclose(sigmoid(found.log_odds), [1 / 4, 1 / 3, 1 / 2], rtol=1e-5)
    order = np.random.default_rng(1).permutation(9)
    assert fit_isotonic(logits[order], labels[order]) == found


@given(st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=1, max_size=40))
def test_rates_are_those_of_the_minimax_formula_pooled_twice(rows: list[tuple[int, bool]]) -> None:
    x, labels = np.array(sorted(rows), float).T
    values, counts = np.unique(x, return_counts=True)
    steps = rise(np.array([labels[x == value].mean() for value in values]), counts)
    half = 0.5 / np.array([counts[np.isclose(steps, step)].sum() for step in steps])
    expected = rise(np.clip(steps, half, 1 - half), counts)
    found = fit_isotonic(x, labels.astype(bool))
    starts = np.flatnonzero(np.diff(expected, prepend=-1.0) > 1e-9)
    np.testing.assert_allclose(sigmoid(found.log_odds), expected[starts], rtol=1e-5)
    middles = np.add.reduceat(values * counts, starts) / np.add.reduceat(counts, starts)
    np.testing.assert_allclose(found.logits, middles, rtol=1e-5, atol=1e-6)


def draw_noisy_rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """900 log-odds that are right, and labels."""
    rng = np.random.default_rng(seed)
    logits = -1.0 + 0.2 * rng.normal(size=900)
    return logits.astype(np.float32), rng.random(900) < sigmoid(logits)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_right_already_is_not_made_worse_by_few_rows(seed: int) -> None:
    """Steps of few rows that are nearly sure of their label cost up to 0.2 on other rows."""
    logits, labels = draw_noisy_rows(seed)
    fit = fit_task(logits[:450], labels[:450], np.ones(450))
    after = fit.line.apply(logits[450:]) if fit.is_kept else logits[450:]
    rise = log_loss(labels[450:], np.asarray(after)) - log_loss(labels[450:], logits[450:])
    assert rise < 0.03


def test_a_fit_is_left_out_where_folds_say_that_it_does_harm() -> None:
    for seed in (0, 2, 3, 4):
        logits, labels = (part[:450] for part in draw_noisy_rows(seed))
        fit = fit_task(logits, labels, np.ones(450))
        assert fit.loss > fit.loss_before + fit.error
        assert not fit.is_kept
    logits, labels = draw_noisy_rows(0)
    wrong = fit_task(4.0 * logits, labels, np.ones(900))
    assert wrong.is_kept
    assert wrong.loss < wrong.loss_before - wrong.error
    assert wrong.loss_before == pytest.approx(log_loss(labels, 4.0 * logits))
    # What log-odds go through without a fit is what it is compared with.
    undone = fit_task(logits + 3.0, labels, np.ones(900), Calibration((0.0,), (-3.0,)))
    assert undone.loss_before == pytest.approx(log_loss(labels, logits), abs=1e-5)


def test_folds_know_weights_and_rows_of_one_label_but_one() -> None:
    logits, labels = draw_noisy_rows(1)
    lone = np.arange(900) == 17
    assert np.isfinite(fit_task(logits, lone, np.ones(900)).loss)
    one, other = (fit_task(logits, labels, np.full(900, scale)) for scale in (1.0, 1e-9))
    assert (one.line, one.rarer) == (other.line, other.rarer)
    found = [(fit.loss, fit.loss_before, fit.error) for fit in (one, other)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)


def test_a_weight_of_two_is_the_row_twice() -> None:
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=60).astype(np.float32), rng.random(60) < 0.4
    weights = rng.integers(1, 3, 60)
    twice = fit_isotonic(np.repeat(logits, weights), np.repeat(labels, weights))
    found = fit_isotonic(logits, labels, weights.astype(float))
    assert found.logits == twice.logits
    np.testing.assert_allclose(found.log_odds, twice.log_odds, rtol=1e-6)


def test_a_fit_brings_probabilities_to_the_rates() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(-1.0, 1.5, 40_000)
    labels = rng.random(40_000) < sigmoid(truth)
    wrong = (2.5 * truth + 1.0).astype(np.float32)  # Too sure, and too high.
    found = fit_isotonic(wrong[:20_000], labels[:20_000])
    after = sigmoid(found.apply(tf.constant(wrong[20_000:])))
    assert np.abs(sigmoid(wrong[20_000:]) - sigmoid(truth[20_000:])).mean() > 0.1
    assert np.abs(after - sigmoid(truth[20_000:])).mean() < 0.02


def test_the_line_is_straight_between_knots_and_goes_on_beyond_them() -> None:
    z = np.linspace(-4, 5, 37).astype(np.float32).reshape(1, 37)
    inside = np.interp(z, LINE.logits, LINE.log_odds)
    expected = np.where(z < -1, z - 2.0, np.where(z > 2, z - 1.75, inside))
    found = LINE.apply(tf.constant(z))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (np.diff(found.numpy()[0]) > 0).all()  # The order stays, without ties.
    assert np.isnan(LINE.apply(tf.constant([np.nan]))[0])
    assert LINE.apply(tf.zeros([0, 3])).shape == (0, 3)


def test_saves_and_loads(tmp_path: Path) -> None:
    assert Calibration.of(LINE.to_json()) == LINE
    module = tf.Module()
    module.apply = tf.function(LINE.apply, input_signature=[tf.TensorSpec([None, None])])
    tf.saved_model.save(module, str(tmp_path))
    z = tf.random.stateless_normal([4, 5], [1, 2])
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path)).apply(z), LINE.apply(z))


@pytest.mark.parametrize("rate", [0.02, 0.5, 3.0])
def test_a_keep_rate_is_undone_as_he_et_al_do(rate: float) -> None:
    p = np.linspace(0.05, 0.95, 19)
    logits = (np.log(p) - np.log1p(-p)).astype(np.float32)
    found = sigmoid(Calibration((0.0,), (float(np.log(rate)),)).apply(tf.constant(logits)))
    np.testing.assert_allclose(found, p / (p + (1 - p) / rate), rtol=1e-5)


def test_the_keep_rate_of_balanced_classes_is_what_the_input_draws(
    tiny_manifest: Manifest,
) -> None:
    labels = np.repeat([1, 0], [30, 970])
    rows = DecodedRows(1000, {"label": labels}, {})
    shares = {0: 0.6, 1: 0.4}
    drawn = balance_classes(rows, "label", shares, [0]).dense["label"]
    manifest = replace(tiny_manifest, label_rate={"train": 0.03})
    config = InputConfig(class_balance={"shares": shares})
    found = find_keep_rate(config, manifest, "label")
    expected = ((drawn == 0).sum() / 970) / ((drawn == 1).sum() / 30)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 0.03),
        ({"class_balance": {"feature": "gender", "shares": HALVES}}, 0.03),
        ({"class_balance": {"shares": {0: 1.0, 1: 0.0}}}, 0.03),
        ({"class_balance": {"shares": HALVES}}, 0.0),
        ({"class_balance": {"shares": HALVES}, "filter": [FEMALE]}, 0.03),
        ({"class_balance": {"shares": HALVES}, "mix": [{"dataset": "d", "weight": 0.5}]}, 0.03),
    ],
)  # fmt: skip
def test_a_keep_rate_that_nothing_tells_is_not_guessed(
    settings: dict[str, Any], rate: float, tiny_manifest: Manifest
) -> None:
    manifest = replace(tiny_manifest, label_rate={"train": rate})
    assert find_keep_rate(InputConfig.model_validate(settings), manifest, "label") is None
