"""Metrics of the label: how well a row's own score tells positives from negatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.manifest import Manifest
from conf.schema import OOV_ID
from training.calibration import Calibration
from training.grouped_auc import GroupedAUC
from training.metrics import constant_log_loss
from training.score_histogram import StreamedAUC

if TYPE_CHECKING:
    from training.models.base import RetrievalModel


@dataclass
class LabelScores:
    """Takes one score and one label per row, in memory that does not grow with the rows.

    Attributes:
        model: Trained model.
        label: Name of the label feature.
        user: Name of the feature that rows are grouped by for GAUC; None: no GAUC.
        temperature: What scores are divided by to give logits; None where the objective does not
            calibrate them, which leaves log loss and calibration undefined.
    """

    model: RetrievalModel
    label: str
    user: str | None = None
    temperature: float | None = None
    _rows: int = 0
    _positives: int = 0
    _auc: StreamedAUC = field(default_factory=StreamedAUC)
    _gauc: GroupedAUC = field(default_factory=GroupedAUC)
    _calibration: Calibration = field(default_factory=Calibration)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read."""
        users = () if self.user is None else (self.user,)
        return (self.label, *self.model.user_inputs, *self.model.item_inputs, *users)

    def update(self, features: dict[str, Any]) -> None:
        """Adds a batch: the dot product of each row's user with its own target item.

        Args:
            features: Features by name. The label is `[rows]`, or ragged `[rows, None]` where
                records may lack it; rows without one are left out.
        """
        users = self.model.embed_users({n: features[n] for n in self.model.user_inputs})
        items = self.model.embed_items({n: features[n] for n in self.model.item_inputs})
        dots = np.einsum("rd,rd->r", np.asarray(users), np.asarray(items))
        ids = None if self.user is None else np.asarray(features[self.user])
        label = features[self.label]
        if isinstance(label, tf.RaggedTensor):
            rows = label.value_rowids().numpy()
            dots, label = dots[rows], label.flat_values
            ids = None if ids is None else ids[rows]
        self._add(ids, np.asarray(label) > 0.5, dots.astype(np.float32))

    def _add(
        self, ids: NDArray[np.int64] | None, labels: NDArray[np.bool_], scores: NDArray[np.float32]
    ) -> None:
        self._rows += len(labels)
        self._positives += int(labels.sum())
        self._auc.update(labels, scores)
        if ids is not None:
            known = ids > OOV_ID  # Users outside the vocabulary share an id and are many.
            self._gauc.update(ids[known], labels[known], scores[known])
        if self.temperature is not None:
            self._calibration.update(labels, scores / self.temperature)

    def result(self, train_rate: float | None) -> dict[str, Any] | None:
        """Returns the metrics beside those of a constant prediction; None without a label.

        Args:
            train_rate: Share of positive labels in the train split, which the constant predicts;
                None: that of the rows themselves.
        """
        if not self._rows:
            return None
        found = self._positives / self._rows
        rate = found if train_rate is None else train_rate
        auc = self._auc.result()
        return {
            "rows": self._rows,
            "auc": None if auc is None else auc.value,
            "auc_error": None if auc is None else auc.error,
            "gauc": None if self.user is None else self._gauc.result(),
            "log_loss": self._calibration.log_loss,
            "calibration": self._calibration.result(),
            "constant": {"auc": 0.5, "log_loss": constant_log_loss(found, rate), "rate": rate},
        }


def find_user_ids(manifest: Manifest) -> str | None:
    """Returns the feature that tells users apart by an id of a vocabulary, or None."""
    user = manifest.keys.user
    if user is None:
        return None
    spec = manifest.schema[user]
    return user if spec.vocabulary_size is not None and spec.shape == () else None
