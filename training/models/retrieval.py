"""Retrieval models: users and items as vectors of one space, compared by dot product.

A user has one vector, or several; an item's score is the largest of their dot products with it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from training.embedding.key_mapping import read_keys
from training.input.batches import Batch, Features
from training.models.model import Model
from training.networks.network import StepContext


def score_rows(users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
    """Scores an item `[batch, dim]` for each row: float32 `[batch]`.

    The dot product with the user `[batch, dim]`, of `[batch, interests, dim]` the largest.
    """
    if users.shape.rank == 2:
        return tf.reduce_sum(users * items, axis=1)
    return tf.reduce_max(tf.reduce_sum(users * items[:, tf.newaxis], axis=2), axis=1)


def score_catalogue(users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
    """Scores all items `[items, dim]` for each row, as `score_rows` does: float32 `[batch, items]`.

    One interest after the other: two such matrices are held.
    """
    each = [users] if users.shape.rank == 2 else tf.unstack(users, axis=1)
    scores = tf.matmul(each[0], items, transpose_b=True)
    for vectors in each[1:]:
        scores = tf.maximum(scores, tf.matmul(vectors, items, transpose_b=True))
    return scores


def choose_vectors(users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
    """Returns the vector of each row that is nearest to an item, by dot product: `[batch, dim]`.

    Cen et al. 2020, "Controllable multi-interest framework for recommendation", model training: the
    interest of the largest dot product with the target is the one that learns it. Of equals the
    first; no gradient flows through the choice.
    """
    scores = tf.reduce_sum(users * items[:, tf.newaxis], axis=2)
    chosen = tf.argmax(scores, axis=1)
    return tf.gather_nd(users, tf.stack([tf.range(tf.size(chosen, tf.int64)), chosen], axis=1))


@dataclass(frozen=True)
class Queries:
    """What the loss of a batch is computed of: user vectors, each with the item that it must find.

    All rows have as many queries, padding included: those of the width of the batch.
    """

    vectors: tf.Tensor  # float32 `[n, dim]`; where the weight is 0 they are finite.
    target_ids: tf.Tensor  # `[n]`, as the dataset holds the item's id.
    weights: tf.Tensor  # float32 `[n]`, of each in the loss of its row; 0 at padding.
    rows: tf.Tensor  # int64 `[n]`, the row of the batch that each is of, ascending.
    row_count: tf.Tensor  # int32 scalar, rows of the batch.
    per_row: int = 1  # The most of a row, padding included.

    def sum_losses(self, losses: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each row of the batch: the weighted sum of its queries' losses.

        Weights depend on no other row, so replicas and parts of a batch add up to the same.
        """
        if self.per_row == 1:
            return losses
        each = tf.where(self.weights > 0.0, losses * self.weights, 0.0)
        return tf.math.unsorted_segment_sum(each, self.rows, self.row_count)

    def find_kept(self) -> tf.Tensor:
        """Returns the places of the queries whose weight is not 0, int64 `[kept]`."""
        return tf.where(self.weights > 0.0)[:, 0]

    def without_padding(self) -> Queries:
        """Returns the queries whose weight is not 0: fewer to compute, of no known number."""
        if self.per_row == 1:
            return self
        kept = self.find_kept()
        parts = (self.vectors, self.target_ids, self.weights, self.rows)
        vectors, targets, weights, rows = (tf.gather(part, kept) for part in parts)
        return Queries(vectors, targets, weights, rows, self.row_count, self.per_row)


class RetrievalModel(Model):
    """Maps users and items to vectors; the score of a pair is their dot product."""

    queries_per_row: int = 1  # Of `embed_queries`, padding included.
    interests: int | None = None  # Vectors of a user; None: one, without an axis of its own.
    user_inputs: tuple[str, ...]  # Features that `embed_users` reads.
    item_inputs: tuple[str, ...]
    temperature: float  # Divides scores in the loss.

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.user_inputs, *self.item_inputs)))

    def describe_inputs(self) -> dict[str, list[str]]:
        return {"user": list(self.user_inputs), "item": list(self.item_inputs)}

    @abstractmethod
    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns user vectors, `[batch, dim]` or `[batch, interests, dim]`.

        Features, at least `user_inputs`, are scalars `[batch]`, or lists `[batch, length]` padded
        with 0 or ragged; `training` is the pass of a training step, None elsewhere.
        """

    @abstractmethod
    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns item vectors, `[batch, dim]`; arguments as in `embed_users`."""

    def embed_queries(self, batch: Batch, item_key: str, training: StepContext) -> Queries:
        """Returns what a loss over items is computed of: one query a row, its item the target.

        Of a user's several vectors the one nearest to the target is the query. Models that learn at
        every position of a sequence return one for each position.
        """
        vectors = self.embed_users(batch, training)
        if vectors.shape.rank == 3:
            vectors = choose_vectors(vectors, self.embed_items(batch, training))
        targets = read_keys(batch, item_key)
        count = tf.shape(vectors)[0]
        rows = tf.range(tf.size(targets, tf.int64))
        return Queries(vectors, targets, tf.ones([count]), rows, count)


def require_retrieval(model: Model) -> RetrievalModel:
    if not isinstance(model, RetrievalModel):
        raise ConfigError(
            "this needs a retrieval model: users and items as vectors",
            received="model.kind = ranking",
            allowed="model.kind = retrieval",
        )
    return model


def tell_later_items(model: Model, manifest: Manifest) -> tuple[str, ...]:
    """Says that held-out rows are ranked by what the catalogue knows of the time behind them."""
    later = list_later_inputs(model, manifest) if isinstance(model, RetrievalModel) else []
    told = f"the catalogue holds {', '.join(later)} as of the end of the log: validation and test "
    return (f"{told}are ranked with what came later",) if later else ()


def list_later_inputs(model: RetrievalModel, manifest: Manifest) -> list[str]:
    """Returns the features of items that the catalogue has of another time than rows have them.

    Rolling counts and dictionaries as of a time change; a catalogue has them as they stand at the
    end of the log, and train rows as they stood before their events.
    """
    build = manifest.source.config
    changing = {rolling["name"] for rolling in build.get("rolling") or ()}
    for join in build.get("joins") or ():
        if join.get("valid_from"):
            source = build["sources"][join["source"]]
            changing |= {column["name"] for column in source["columns"]} - {source["key"]}
    of = {feature["name"]: feature.get("column") for feature in build.get("features") or ()}
    return [name for name in model.item_inputs if of.get(name) in changing]
