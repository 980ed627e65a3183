"""What every ranking system answers: a score per user and catalogue item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from training.retrieval import ItemIndex, check_finite

if TYPE_CHECKING:
    from training.models.base import RetrievalModel


class Scorer(Protocol):
    """A system that can be evaluated.

    Attributes:
        name: Name of the system in the metrics.
    """

    name: str

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue for a batch of users.

        Batches come in the order of the split, each once.

        Args:
            features: The batch.
            rows: Its number of rows.

        Returns:
            `[rows, items]` float32, higher is better; may be read-only.
        """
        ...


class ModelScorer:
    """Dot products of a trained model's user vectors with the item index.

    Args:
        model: Trained model.
        index: Its item vectors.
    """

    name = "model"

    def __init__(self, model: RetrievalModel, index: ItemIndex) -> None:
        self._model = model
        self._transposed = index.vectors.T

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue, `[rows, items]`.

        Raises:
            InputDataError: A user vector holds NaN or infinity.
        """
        inputs = {name: features[name] for name in self._model.user_inputs}
        vectors = np.asarray(self._model.embed_users(inputs), dtype=np.float32)
        check_finite("user", np.arange(rows), vectors)
        return vectors @ self._transposed
