"""Calibration: from what a network says to log-odds that are those of the labels.

A calibration is a rising line through knots of log-odds, so that the order of rows stays:

    class balance   one knot. Where rows of label 0 are drawn at w times the rate of label 1,
                    log-odds lack log w: q = p / (p + (1 - p) / w), He et al. 2014, "Practical
                    lessons from predicting clicks on ads at Facebook", section 6.3
    isotonic        the rates of held-out rows, made rising: Zadrozny & Elkan 2002, "Transforming
                    classifier scores into accurate multiclass probability estimates", section 3.2

The rates come from the pool of adjacent violators (Ayer et al. 1955). Steps would give many rows
one score, so the line joins the middles of the steps (Oron & Flournoy 2017, "Centered isotonic
regression", section 2.2), here in log-odds; beyond the outer ones it goes on with slope 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.models import ModelConfig, RankingConfig

FloatArray = NDArray[np.float64]
# Least weight of a row beside the heaviest: sums of any are finite.
_LEAST_WEIGHT = 1e-300
_FOLDS = 5


@dataclass(frozen=True)
class Calibration:
    """A line of rising knots, float32 numbers, from a network's log-odds to calibrated ones."""

    logits: tuple[float, ...]
    log_odds: tuple[float, ...]

    @classmethod
    def of(cls, knots: Mapping[str, Sequence[float]]) -> Calibration:
        return cls(tuple(knots["logits"]), tuple(knots["log_odds"]))

    def to_json(self) -> dict[str, list[float]]:
        return {"logits": list(self.logits), "log_odds": list(self.log_odds)}

    def apply(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns calibrated log-odds of float32 logits, in the same shape and order."""
        first, last = (self.log_odds[end] - self.logits[end] for end in (0, -1))
        if len(self.logits) == 1:
            return logits + first
        x, y = (tf.constant(values, tf.float32) for values in (self.logits, self.log_odds))
        slopes = np.diff(self.log_odds) / np.diff(self.logits)
        flat = tf.reshape(logits, [-1])
        # Not searched from the right: a NaN stays one, whatever is found for it.
        left = tf.clip_by_value(tf.searchsorted(x, flat) - 1, 0, len(self.logits) - 2)
        inside = tf.gather(y, left) + (flat - tf.gather(x, left)) * tf.gather(
            tf.constant(slopes, tf.float32), left
        )
        outside = tf.where(flat < x[0], flat + first, flat + last)
        found = tf.where((flat < x[0]) | (flat > x[-1]), outside, inside)
        return tf.reshape(found, tf.shape(logits))


def requires_fit(config: ModelConfig) -> bool:
    """Whether training ends with a fit of calibrations."""
    return isinstance(config, RankingConfig) and config.calibration is not None


def find_keep_rate(config: InputConfig, manifest: Manifest, label: str) -> float | None:
    """Returns the rate, above 0, at which training draws rows of label 0 beside those of label 1.

    Rows that the build down-samples are none of them: their weights make up for it in the loss.
    None: nothing draws them otherwise, or the manifest does not know what the shares were before.
    """
    balance = config.class_balance
    hidden = config.filter or config.mix  # Rows read have other shares of labels.
    if balance is None or balance.feature != label or hidden:
        return None
    rate = manifest.find_label_rate(label).get("train")
    negative, positive = balance.shares.get(0, 0.0), balance.shares.get(1, 0.0)
    if rate is None or not 0.0 < rate < 1.0 or not negative or not positive:
        return None
    return negative / positive * rate / (1.0 - rate)


@dataclass(frozen=True)
class TaskFit:
    """A calibration of all rows, of which `rarer` have the rarer label.

    `loss` is the log loss of five folds, each calibrated by the others; `error` is the standard
    error of its difference from the loss without.
    """

    line: Calibration
    rarer: int
    loss: float
    loss_before: float
    error: float

    @property
    def is_kept(self) -> bool:
        """Whether the rows do not say that it does harm."""
        return self.loss - self.loss_before <= self.error


def fit_task(
    logits: NDArray[np.float32],
    labels: NDArray[np.bool_],
    weights: FloatArray,
    before: Calibration | None = None,
) -> TaskFit:
    """Fits a calibration to rows as `fit_isotonic`, and measures it on five folds of them.

    `before` is what log-odds go through without it.
    """
    # Folds of like shares of both labels.
    order = np.lexsort((np.random.default_rng(0).random(len(labels)), labels))
    folds = np.argsort(order) % _FOLDS
    calibrated = np.zeros_like(logits)
    for out in (folds == fold for fold in range(_FOLDS)):
        line = fit_isotonic(logits[~out], labels[~out], weights[~out])
        calibrated[out] = line.apply(logits[out])
    losses = _find_losses(labels, calibrated)
    losses_before = _find_losses(labels, logits if before is None else before.apply(logits))
    share = weights / weights.max()
    share = share / share.sum()
    loss, loss_before = float(share @ losses), float(share @ losses_before)
    error = np.linalg.norm(share * (losses - losses_before - (loss - loss_before)))
    rarer = int(min(labels.sum(), (~labels).sum()))
    return TaskFit(fit_isotonic(logits, labels, weights), rarer, loss, loss_before, float(error))


def _find_losses(labels: NDArray[np.bool_], logits: NDArray[np.floating]) -> FloatArray:
    z = np.asarray(logits, np.float64)
    return np.asarray(np.logaddexp(0.0, z) - np.where(labels, z, 0.0))


def fit_isotonic(
    logits: NDArray[np.floating], labels: NDArray[np.bool_], weights: FloatArray | None = None
) -> Calibration:
    """Fits a calibration to rows.

    A step of one label alone would be a probability of 0 or 1: of its own rows, half a row is of
    the label that it lacks, of that label's lightest. Steps are pooled again after that.

    Args:
        logits: `[rows]`, log-odds of a network, finite.
        labels: `[rows]`, whether each is a positive.
        weights: `[rows]`, above 0, what each counts for; None: 1.
    """
    own = np.ones(len(labels)) if weights is None else weights
    own = np.maximum(own / own.max(), _LEAST_WEIGHT)
    x, place = np.unique(logits.astype(np.float32), return_inverse=True)
    w = np.bincount(place, own, len(x)).astype(np.float64)
    steps = _pool(x.astype(np.float64), np.bincount(place, own * labels, len(x)) / w, w)
    middle, rate, _ = _pool(steps[0], _keep_from_ends(*steps[1:], own, labels), steps[2])
    knots = np.stack([middle, np.log(rate) - np.log1p(-rate)]).astype(np.float32)
    # Steps that are one number in float32 are one knot.
    kept = np.concatenate(([True], (np.diff(knots) > 0).all(axis=0)))
    return Calibration(*(tuple(values) for values in knots[:, kept].tolist()))


def _pool(
    x: FloatArray, rates: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns the middle, the rate and the weight of each step of rates that rise."""
    starts = pool_adjacent_violators(rates, weights)
    total = np.add.reduceat(weights, starts)
    middle, rate = (np.add.reduceat(weights * values, starts) / total for values in (x, rates))
    return middle, rate, total


def _keep_from_ends(
    rates: FloatArray, totals: FloatArray, weights: FloatArray, labels: NDArray[np.bool_]
) -> FloatArray:
    """Returns the rates of steps, half a row of each step's own from 0 and 1."""
    lightest = (weights.min(where=of, initial=1.0) for of in (labels, ~labels))
    low, high = (np.minimum(0.5, 0.5 * lacking / totals) for lacking in lightest)
    return np.clip(rates, low, np.minimum(1.0 - high, np.nextafter(1.0, 0.0)))


def pool_adjacent_violators(values: FloatArray, weights: FloatArray) -> NDArray[np.intp]:
    """Returns where the steps of the nearest rising sequence begin, by weighted squares.

    Args:
        values: `[n]`, 1 or more.
        weights: `[n]`, above 0.

    Returns:
        Rising positions, the first 0; the mean of a step is above that of the one before.
    """
    starts: list[int] = []
    sums: list[tuple[float, float]] = []
    for position, (value, weight) in enumerate(zip(values.tolist(), weights.tolist(), strict=True)):
        start, total, mass = position, value * weight, weight
        while sums and sums[-1][0] * mass >= total * sums[-1][1]:
            before, its_mass = sums.pop()
            start, total, mass = starts.pop(), total + before, mass + its_mass
        starts.append(start)
        sums.append((total, mass))
    return np.array(starts, np.intp)
