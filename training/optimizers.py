"""The pair of optimizers: Keras' Adam for dense weights, its lazy form for embedding tables."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from conf.training import OptimizerConfig
from training.embedding.lazy_optimizer import LazyAdam, LearningRate, sum_repeated_rows
from training.models.base import RetrievalModel


def build_learning_rate(config: OptimizerConfig, total_steps: int) -> LearningRate:
    """Returns the learning rate: a number, or a function of the zero-based step.

    `cosine` falls from the configured rate to zero over all steps (Loshchilov & Hutter 2017,
    "SGDR", eq. 5, without restarts).
    """
    if config.schedule == "constant":
        return config.learning_rate
    return keras.optimizers.schedules.CosineDecay(config.learning_rate, max(1, total_steps))


class Optimizers(tf.Module):
    """Applies one step's gradients to dense weights and tables.

    Build it under the strategy's scope, call `apply` in a replica context with gradients that
    sum over replicas to the gradient of the global loss.

    Args:
        config: Rates and clipping.
        model: The model whose variables are updated.
        total_steps: Steps of the whole run, for the schedule.
    """

    def __init__(self, config: OptimizerConfig, model: RetrievalModel, total_steps: int) -> None:
        super().__init__(name="optimizers")
        rate = build_learning_rate(config, total_steps)
        self._clip_norm = config.clip_norm
        betas = {"beta_1": config.beta_1, "beta_2": config.beta_2, "epsilon": config.epsilon}
        self._tables = model.table_variables
        self._dense = model.dense_variables
        self.sparse = LazyAdam(self._tables, rate, **betas)
        self.dense = None
        if self._dense:
            self.dense = keras.optimizers.Adam(rate, **betas)
            self.dense.build(self._dense)

    @property
    def variables_in_step_order(self) -> list[tf.Variable]:
        """Variables whose gradients `apply` expects: tables, then dense weights."""
        return [*self._tables, *self._dense]

    @property
    def step(self) -> tf.Variable:
        """Number of updates so far, int64 scalar."""
        return self.sparse.iterations

    def apply(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
        """Updates all variables once.

        Args:
            gradients: In the order of `variables_in_step_order`.
        """
        tables = [_as_slices(gradient) for gradient in gradients[: len(self._tables)]]
        dense = [
            tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients[len(self._tables) :], self._dense, strict=True)
        ]
        if self._clip_norm is not None:
            tables, dense = clip_global_norm(tables, dense, self._clip_norm)
        self.sparse.apply(tables, self._tables)
        if self.dense is not None:
            self.dense.apply(dense, self._dense)


def clip_global_norm(
    tables: Sequence[tf.IndexedSlices | None], dense: Sequence[tf.Tensor], clip_norm: float
) -> tuple[list[tf.IndexedSlices | None], list[tf.Tensor]]:
    """Scales gradients so that their sum over replicas has at most a given norm.

    The norm is that of the reduced gradient, with repeated rows summed: what one replica would
    see. Each replica's share is scaled by the same factor, so the sum stays right.

    Args:
        tables: Gradients of tables; ids may repeat.
        dense: Gradients of dense weights.
        clip_norm: Above 0.
    """
    squares = [tf.reduce_sum(tf.square(gradient)) for gradient in _sum_replicas(dense)]
    for slices in tables:
        if slices is not None:
            merged = sum_repeated_rows(_gather_slices(slices))
            squares.append(tf.reduce_sum(tf.square(merged.values)))
    norm = tf.sqrt(tf.add_n(squares))
    factor = clip_norm / tf.maximum(norm, clip_norm)
    scaled = [
        None if s is None else tf.IndexedSlices(s.values * factor, s.indices, s.dense_shape)
        for s in tables
    ]
    return scaled, [gradient * factor for gradient in dense]


def _sum_replicas(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    if not gradients or context.num_replicas_in_sync == 1:
        return gradients
    return context.all_reduce(tf.distribute.ReduceOp.SUM, list(gradients))


def _gather_slices(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return slices
    values, indices = context.all_gather([slices.values, slices.indices], axis=0)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _as_slices(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.IndexedSlices | None:
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.range(tf.shape(gradient, tf.int64)[0], dtype=tf.int64)
    return tf.IndexedSlices(gradient, rows, tf.shape(gradient))
