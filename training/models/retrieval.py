"""Retrieval models: users and items as vectors of one space, compared by dot product."""

from __future__ import annotations

from abc import abstractmethod

import tensorflow as tf

from conf.errors import ConfigError
from training.input.batches import Features
from training.models.model import Model
from training.networks.network import TrainingPass


class RetrievalModel(Model):
    """Maps users and items to vectors; the score of a pair is their dot product.

    Attributes:
        user_inputs: Names of the features that `embed_users` reads.
        item_inputs: Names of the features that `embed_items` reads.
        temperature: Divisor of the scores in the loss.
    """

    user_inputs: tuple[str, ...]
    item_inputs: tuple[str, ...]
    temperature: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the features that either side reads."""
        return tuple(dict.fromkeys((*self.user_inputs, *self.item_inputs)))

    def describe_inputs(self) -> dict[str, list[str]]:
        """Returns the names of the features of each side."""
        return {"user": list(self.user_inputs), "item": list(self.item_inputs)}

    @abstractmethod
    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, dim]`.

        Args:
            features: At least `user_inputs`: scalars `[batch]`, lists `[batch, length]` padded
                with 0 or ragged.
            training: The pass of a training step; None elsewhere.
        """

    @abstractmethod
    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, dim]`; arguments as in `embed_users`."""


def require_retrieval(model: Model) -> RetrievalModel:
    """Returns a model that embeds users and items.

    Raises:
        ConfigError: It scores rows, and has no vectors to compare.
    """
    if not isinstance(model, RetrievalModel):
        raise ConfigError(
            "this needs a retrieval model: users and items as vectors",
            received="model.kind = ranking",
            allowed="model.kind = retrieval",
        )
    return model
