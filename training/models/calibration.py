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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.manifest import Manifest
from conf.training.input import InputConfig


@dataclass(frozen=True)
class Calibration:
    """A rising line from a network's log-odds to calibrated ones.

    Attributes:
        logits: Knots, float32 numbers, rising.
        log_odds: What they become, rising.
    """

    logits: tuple[float, ...]
    log_odds: tuple[float, ...]

    @classmethod
    def of_keep_rate(cls, keep_rate: float) -> Calibration:
        """Returns the correction where rows of label 0 were kept at a rate, above 0."""
        return cls((0.0,), (math.log(keep_rate),))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Reads what `to_json` gives.

        Raises:
            ValueError: It is no rising line.
        """
        found = cls(*(tuple(map(float, data[name])) for name in ("logits", "log_odds")))
        if not found.logits or len(found.logits) != len(found.log_odds):
            raise ValueError("a calibration needs as many log-odds as logits, one or more")
        for values in (found.logits, found.log_odds):
            if not np.isfinite(values).all() or (np.diff(np.array(values, np.float32)) <= 0).any():
                raise ValueError("the knots of a calibration must rise")
        return found

    def to_json(self) -> dict[str, list[float]]:
        """Returns the knots."""
        return {"logits": list(self.logits), "log_odds": list(self.log_odds)}

    def apply(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns calibrated log-odds.

        Args:
            logits: float32, any shape.

        Returns:
            float32 of the same shape, in the same order.
        """
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


def find_keep_rate(config: InputConfig, manifest: Manifest, label: str) -> float | None:
    """Returns the rate at which training draws rows of label 0, as against those of label 1.

    Rows that the build down-samples are none of them: their weights make up for it in the loss.

    Args:
        config: How the train split is read.
        manifest: The dataset version.
        label: A binary label.

    Returns:
        The rate, above 0; None: nothing draws them otherwise, or the manifest does not know what
        the shares were before.
    """
    balance = config.class_balance
    if balance is None or balance.feature != label or hides_label_rate(config):
        return None
    rate = manifest.find_label_rate(label).get("train")
    negative, positive = balance.shares.get(0, 0.0), balance.shares.get(1, 0.0)
    if rate is None or not 0.0 < rate < 1.0 or not negative or not positive:
        return None
    return negative / positive * rate / (1.0 - rate)


def hides_label_rate(config: InputConfig) -> bool:
    """Whether rows that are read have other shares of labels than the manifest says."""
    return bool(config.filter or config.mix)
