"""The pair of optimizers: a Keras optimizer for dense weights, a lazy one for embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from conf.training import OptimizerConfig
from training.dense_optimizer import build_dense_optimizer
from training.embedding.lazy_optimizer import LazyOptimizer, sum_repeated_rows
from training.embedding.rules import build_rule
from training.gradients import Gradient, as_slices, clip_dense_values, clip_global_norm
from training.loss_scale import LossScale, are_finite
from training.models.base import RetrievalModel
from training.schedules import build_learning_rate

KnownRows: TypeAlias = Sequence[tf.Tensor | None]


class Optimizers(tf.Module):
    """Applies one step's gradients to dense weights and tables.

    Build it under the strategy's scope, call `apply` in a replica context with gradients that
    sum over replicas to the gradient of the global loss, times the loss scale where there is one.

    Args:
        config: Rules, rates and clipping.
        model: The model whose variables are updated.
        total_steps: Steps of the whole run, for the schedule.
        loss_scale: What the loss is multiplied by, or None.

    Raises:
        ConfigError: Keras has no such optimizer, or refuses its arguments.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: RetrievalModel,
        total_steps: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(name="optimizers")
        self._clip_norm, self._clip_value = config.clip_norm, config.clip_value
        self.accumulate_steps = config.accumulate_steps or 1
        self.loss_scale = loss_scale
        self._tables = model.table_variables
        rows = [model.tables[name].rows for name in sorted(model.tables)]
        self._dense = model.dense_variables
        rate = build_learning_rate(config, total_steps, config.sparse.learning_rate)
        self.sparse = LazyOptimizer(rows, build_rule(config), rate, clip_value=config.clip_value)
        self.dense: keras.optimizers.Optimizer | None = None
        if self._dense:
            self.dense = build_dense_optimizer(config, self._dense, total_steps)

    @property
    def variables_in_step_order(self) -> list[tf.Variable]:
        """Variables whose gradients `apply` expects: tables, then dense weights."""
        return [*self._tables, *self._dense]

    @property
    def step(self) -> tf.Variable:
        """Number of updates so far, int64 scalar."""
        return self.sparse.iterations

    def set_step(self, step: int) -> None:
        """Sets the number of updates so far, outside of replicas."""
        self.step.assign(step)
        if self.dense is not None:
            self.dense.iterations.assign(step)

    def apply(self, gradients: Sequence[Gradient], known: KnownRows | None = None) -> None:
        """Updates all variables once, or none where scaled gradients have overflown.

        Args:
            gradients: In the order of `variables_in_step_order`.
            known: Per table the rows that its gradient names, each once, or None where they are
                not known; for one replica only.
        """
        known = [None] * len(self._tables) if known is None else known
        if self.loss_scale is None:
            self._update(gradients, known)
            return
        context = tf.distribute.get_replica_context()
        unscaled = self.loss_scale.unscale(gradients)
        finite = are_finite(unscaled)
        context.merge_call(self._update_if_finite, args=(unscaled, known, finite))

    def _update_if_finite(
        self,
        strategy: tf.distribute.Strategy,
        gradients: list[Gradient],
        known: KnownRows,
        finite: tf.Tensor,
    ) -> None:
        overflown = strategy.reduce(
            tf.distribute.ReduceOp.SUM,
            strategy.extended.call_for_each_replica(
                lambda flag: tf.cast(~flag, tf.float32), args=(finite,)
            ),
            axis=None,
        )
        all_finite = tf.equal(overflown, 0.0)

        def update() -> tf.Operation:
            strategy.extended.call_for_each_replica(self._update, args=(gradients, known))
            return tf.no_op()

        tf.cond(all_finite, update, tf.no_op)
        if self.loss_scale is not None:
            self.loss_scale.adapt(strategy, all_finite)

    def _update(self, gradients: Sequence[Gradient], known: KnownRows) -> None:
        is_alone = tf.distribute.get_replica_context().num_replicas_in_sync == 1
        tables = [as_slices(gradient) for gradient in gradients[: len(self._tables)]]
        if is_alone:
            tables = [
                sum_repeated_rows(slices) if slices is not None and rows is None else slices
                for slices, rows in zip(tables, known, strict=True)
            ]
        dense = [
            tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients[len(self._tables) :], self._dense, strict=True)
        ]
        if self._clip_norm is not None:
            tables, dense = clip_global_norm(tables, dense, self._clip_norm, are_unique=is_alone)
        elif self._clip_value is not None:
            dense = clip_dense_values(dense, self._clip_value)
        self.sparse.apply(tables, self._tables, are_unique=is_alone, known=known)
        if self.dense is not None:
            self.dense.apply(dense, self._dense)
