"""Metrics of the label: how well a row's own score tells positives from negatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from training.metrics import auc, constant_log_loss, log_loss

if TYPE_CHECKING:
    from training.models.base import RetrievalModel


@dataclass
class LabelScores:
    """Collects one score and one label per row: 5 bytes each, as exact AUC needs them all.

    Attributes:
        model: Trained model.
        label: Name of the label feature.
    """

    model: RetrievalModel
    label: str
    _labels: list[NDArray[np.bool_]] = field(default_factory=list)
    _scores: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read."""
        return (self.label, *self.model.user_inputs, *self.model.item_inputs)

    def update(self, features: dict[str, Any]) -> None:
        """Adds a batch: the dot product of each row's user with its own target item.

        Args:
            features: Features by name. The label is `[rows]`, or ragged `[rows, None]` where
                records may lack it; rows without one are left out.
        """
        users = self.model.embed_users({n: features[n] for n in self.model.user_inputs})
        items = self.model.embed_items({n: features[n] for n in self.model.item_inputs})
        dots = np.einsum("rd,rd->r", np.asarray(users), np.asarray(items))
        label = features[self.label]
        if isinstance(label, tf.RaggedTensor):
            dots, label = dots[label.value_rowids().numpy()], label.flat_values
        self._scores.append(dots.astype(np.float32))
        self._labels.append(np.asarray(label) > 0.5)

    def result(self, temperature: float | None, train_rate: float | None) -> dict[str, Any] | None:
        """Returns AUC and log loss beside those of a constant prediction; None without a label.

        Args:
            temperature: What scores are divided by to give logits; None where the objective
                does not calibrate them, which leaves log loss undefined.
            train_rate: Share of positive labels in the train split, which the constant predicts;
                None: that of the rows themselves.
        """
        labels = np.concatenate(self._labels)
        scores = np.concatenate(self._scores)
        if not len(labels):
            return None
        rate = float(labels.mean()) if train_rate is None else train_rate
        return {
            "rows": len(labels),
            "auc": auc(labels, scores),
            "log_loss": None if temperature is None else log_loss(labels, scores / temperature),
            "constant": {"auc": 0.5, "log_loss": constant_log_loss(labels, rate), "rate": rate},
        }
