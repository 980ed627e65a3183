"""Gradients, learning rates and optimizers: Keras' for dense weights, lazy ones for tables."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule

from conf.errors import ConfigError, did_you_mean
from conf.training.optimizer import (
    CosineSchedule,
    OptimizerConfig,
    SparseOptimizerConfig,
)
from training.distribution.strategy import has_gpu
from training.embedding.lazy_optimizer import (
    LazyFTRL,
    LazyOptimizer,
    TableRule,
    build_lazy_rule,
    sum_repeated_rows,
)
from training.embedding.static_table import EmbeddingTable
from training.models.model import Model

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
KnownRows: TypeAlias = Sequence[tf.Tensor | None]
# Keras' arguments that work on one replica's dense weights alone.
_SET_ELSEWHERE = {"clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps", "name"}
_SET_ELSEWHERE |= {"loss_scale_factor", "use_ema", "ema_momentum", "ema_overwrite_frequency"}
# Bases and wrappers; and two that Keras computes otherwise than published on TensorFlow's weights.
_NO_OPTIMIZERS = {"optimizer", "lossscaleoptimizer", "multioptimizer", "muon", "schedulefreeadamw"}


class WarmupSchedule(LearningRateSchedule):
    """Rises in a line over the warm-up, then follows another schedule.

    Step k (zero-based) of W has the share (k + 1) / W of the rate that the schedule starts with
    (Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2); Keras' would start at 0.
    """

    def __init__(self, after: float | LearningRateSchedule, warmup_steps: int) -> None:
        self._after, self._warmup_steps = after, warmup_steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate of a zero-based step, float32 scalar."""
        done = tf.cast(step, tf.float32)
        rate = self._after
        if callable(rate):
            rate = rate(tf.maximum(done - self._warmup_steps, 0.0))
        return rate * tf.minimum((done + 1.0) / self._warmup_steps, 1.0)


class FollowingFtrl(keras.optimizers.Ftrl):
    """Keras' FTRL, in which weights move by their gradients alone where the rate changes."""

    @property
    def rule(self) -> LazyFTRL:
        return LazyFTRL(
            self.learning_rate_power,
            self.initial_accumulator_value,
            self.l1_regularization_strength,
            self.l2_regularization_strength,
            self.beta,
        )

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        if isinstance(self._learning_rate, LearningRateSchedule):
            number = self._get_variable_index(variable)
            state = (variable, self._accumulators[number], self._linears[number])
            weights, sums, linear = (keras.ops.convert_to_tensor(value) for value in state)
            rate = tf.cast(learning_rate, tf.float32)
            self.assign(state[2], self.rule.follow(weights, sums, linear, rate))
        super().update_step(gradient, variable, learning_rate)


def build_learning_rate(
    config: OptimizerConfig, total_steps: int, learning_rate: float | None = None
) -> float | LearningRateSchedule:
    """Returns the learning rate: a number, or a function of the zero-based step.

    `total_steps` are those of the run, warm-up included; `learning_rate` replaces the config's.
    """
    after = rate = config.learning_rate if learning_rate is None else learning_rate
    warmup_steps, schedule = config.warmup_steps or 0, config.schedule
    if isinstance(schedule, CosineSchedule):
        steps = max(1, (schedule.steps or total_steps) - warmup_steps)
        after = CosineDecay(rate, steps, schedule.final_share)
    return WarmupSchedule(after, warmup_steps) if warmup_steps else after


def as_slices(gradient: Gradient) -> tf.IndexedSlices | None:
    """Returns a table's gradient as rows; one of the whole table names all of them."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.range(tf.shape(gradient, tf.int64)[0], dtype=tf.int64)
    return tf.IndexedSlices(gradient, rows, tf.shape(gradient))


def widen_slices(
    slices: tf.IndexedSlices | None, table: tf.Variable, l2: float
) -> tf.IndexedSlices:
    """Returns the gradient of all rows of a table, with that of `l2` times their squared norms."""
    count = int(table.shape[0])
    gradient = tf.convert_to_tensor(table.read_value()) * (2.0 * tf.constant(l2))
    if slices is not None:
        gradient += tf.math.unsorted_segment_sum(slices.values, slices.indices, count)
    return tf.IndexedSlices(gradient, tf.range(count, dtype=tf.int64), tf.shape(gradient))


def add_parts(parts: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Sums the gradients of a batch's parts; rows of tables are joined, repeats included."""
    return [_add([g for g in column if g is not None]) for column in zip(*parts, strict=True)]


def _add(gradients: list[tf.Tensor | tf.IndexedSlices]) -> Gradient:
    if not gradients:
        return None
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.add_n(gradients)
    slices = [s for gradient in gradients if (s := as_slices(gradient)) is not None]
    return tf.IndexedSlices(
        tf.concat([s.values for s in slices], axis=0),
        tf.concat([tf.cast(s.indices, tf.int64) for s in slices], axis=0),
        slices[0].dense_shape,
    )


def clip_global_norm(
    tables: Sequence[tf.IndexedSlices | None],
    dense: Sequence[tf.Tensor],
    clip_norm: float,
    *,
    are_unique: bool = False,
) -> tuple[list[tf.IndexedSlices | None], list[tf.Tensor]]:
    """Scales gradients so that their sum over replicas has at most a given norm.

    The norm is that of the reduced gradient, with repeated rows summed: what one replica would
    see. `are_unique`: one replica runs, and its tables' gradients name no id twice.
    """
    context = tf.distribute.get_replica_context()
    is_alone = context.num_replicas_in_sync == 1
    sums = dense if is_alone or not dense else context.all_reduce("SUM", list(dense))
    squares = [tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32))) for gradient in sums]
    for slices in (s for s in tables if s is not None):
        merged = slices
        if not is_alone:
            values, indices = context.all_gather([slices.values, slices.indices], axis=0)
            merged = tf.IndexedSlices(values, indices, slices.dense_shape)
        if not are_unique:
            merged = sum_repeated_rows(merged)
        squares.append(tf.reduce_sum(tf.square(merged.values)))
    factor = clip_norm / tf.maximum(tf.sqrt(tf.add_n(squares)), clip_norm)
    scaled = [
        None if s is None else tf.IndexedSlices(s.values * factor, s.indices, s.dense_shape)
        for s in tables
    ]
    return scaled, [keras.ops.multiply(gradient, factor) for gradient in dense]


def dense_optimizer_classes() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Returns Keras' optimizers by name, in small letters."""
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and name.lower() not in _NO_OPTIMIZERS
    } | {"ftrl": FollowingFtrl}


def build_dense_optimizer(
    config: OptimizerConfig, variables: Sequence[tf.Variable], total_steps: int
) -> keras.optimizers.Optimizer:
    """Builds the optimizer of dense weights; call it under the strategy's scope."""
    dense, classes = config.dense, dense_optimizer_classes()
    kind = dense.kind.lower()
    if kind not in classes:
        raise ConfigError(
            "optimizer.dense.kind is none of Keras' optimizers",
            received=dense.kind,
            allowed=", ".join(sorted(classes)),
            fix=did_you_mean(kind, classes),
        )
    for name in dense.arguments.keys() & _SET_ELSEWHERE:
        raise ConfigError(
            "this argument of Keras' optimizers would leave tables and other replicas out",
            received=f"optimizer.dense.{name}",
            fix="leave it out; optimizer.clip_norm and optimizer.accumulate_steps reach them all",
        )
    rate = build_learning_rate(config, total_steps, dense.learning_rate)
    arguments = (
        {"epsilon": config.epsilon, **dense.arguments} if kind == "adam" else dense.arguments
    )
    try:
        optimizer = classes[kind](rate, **arguments)
        optimizer.build(variables)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras refuses the arguments of optimizer.dense (kind {kind})",
            received=f"{arguments}: {error}",
        ) from error
    return optimizer


class Optimizers(tf.Module):
    """Applies one step's gradients to dense weights and tables.

    Build it under the strategy's scope, call `apply` in a replica context with gradients that
    sum over replicas to the gradient of the global loss. `objective_state` is what steps set of
    the objective; it is saved and restored with the optimizers.
    """

    def __init__(self, config: OptimizerConfig, model: Model, total_steps: int) -> None:
        super().__init__(name="optimizers")
        self.accumulate_steps = config.accumulate_steps or 1
        self.objective_state: list[tf.Variable] = []
        self._tables = model.table_variables
        trained = list(model.trained_tables.values())
        self._updates = [table.updates for table in trained]
        self._config, self._names = config, list(model.trained_tables)
        self._dense = model.dense_variables
        # No dict: what looks for variables would look into it.
        self._constrained = MappingProxyType({id(w.value): w for w in model.constrained_weights})
        rules = self._plan_rules(total_steps)
        self.sparse = LazyOptimizer([table.rows for table in trained], rules)
        self.dense: keras.optimizers.Optimizer | None = None
        if self._dense:
            self.dense = build_dense_optimizer(config, self._dense, total_steps)

    def _plan_rules(self, total_steps: int) -> list[TableRule]:
        """Returns the rule of each table; tables that ask for none of their own share one."""

        def plan(sparse: SparseOptimizerConfig) -> TableRule:
            rate = build_learning_rate(self._config, total_steps, sparse.learning_rate)
            rule = build_lazy_rule(self._config, sparse)
            if isinstance(rule, LazyFTRL):
                rule = replace(rule, rate_changes=callable(rate))
            return TableRule(rule, rate)

        of_all, own = plan(self._config.sparse), [updates.optimizer for updates in self._updates]
        return [of_all if each is None else plan(each) for each in own]

    @property
    def variables_in_step_order(self) -> list[tf.Variable]:
        """Variables whose gradients `apply` expects: tables, then dense weights."""
        return [*self._tables, *self._dense]

    @property
    def step(self) -> tf.Variable:
        return self.sparse.iterations

    def hold_rows(self, name: str, table: EmbeddingTable, rows: np.ndarray) -> None:
        """Lets the optimizer keep rows, int64 `[n]`, that came from elsewhere without state."""
        if name in self._names:
            sparse = table.updates.optimizer or self._config.sparse
            rate = sparse.learning_rate or self._config.learning_rate
            self.sparse.hold_rows(self._names.index(name), table.rows, rows, rate)

    def hold_weights(self, numbers: Collection[int]) -> None:
        """Does so for dense weights, by number; FTRL alone computes weights of its state."""
        ftrl = self.dense
        if not isinstance(ftrl, FollowingFtrl):
            return
        rate = self._config.dense.learning_rate or self._config.learning_rate
        for number in numbers:
            sums = ftrl._accumulators[number].numpy()
            held = ftrl.rule.hold(self._dense[number].numpy(), sums, rate)
            ftrl._linears[number].assign(held)

    def _widen(
        self, gradients: Sequence[Gradient], known: KnownRows
    ) -> tuple[list[Gradient], list[tf.Tensor | None]]:
        """Lets gradients of tables that are updated as a whole name all rows, with their `l2`."""
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        wide, rows = list(gradients), list(known)
        for number, updates in enumerate(self._updates):
            if updates.are_dense:
                l2 = (updates.l2 or 0.0) / replicas
                wide[number] = widen_slices(as_slices(wide[number]), self._tables[number], l2)
                rows[number] = None
        return wide, rows

    def apply(self, gradients: Sequence[Gradient], known: KnownRows | None = None) -> None:
        """Updates all variables once.

        `gradients` are in the order of `variables_in_step_order`; `known` are per table the rows
        that its gradient names, each once, None where they are not known; for one replica only.
        """
        is_alone = tf.distribute.get_replica_context().num_replicas_in_sync == 1
        count = len(self._tables)
        gradients, known = self._widen(gradients, [None] * count if known is None else known)
        tables = [as_slices(gradient) for gradient in gradients[:count]]
        if is_alone:
            tables = self._merge(tables, known)
        # As of Keras' optimizers: a weight that the loss does not depend on stays what it is.
        found = zip(self._dense, gradients[count:], strict=True)
        pairs = [(w, tf.convert_to_tensor(g)) for w, g in found if g is not None]
        moved, dense = [weight for weight, _ in pairs], [gradient for _, gradient in pairs]
        if self._config.clip_norm is not None:
            limit = self._config.clip_norm
            tables, dense = clip_global_norm(tables, dense, limit, are_unique=is_alone)
        self.sparse.apply(tables, self._tables, are_unique=is_alone, known=known)
        if self.dense is not None:
            update = partial(self.dense.apply, trainable_variables=moved)
            if is_alone and has_gpu():  # One kernel for hundreds.
                update = tf.function(update, jit_compile=True, autograph=False)
            update(dense)
            self._constrain(moved)

    def _merge(
        self, slices: Sequence[tf.IndexedSlices | None], known: KnownRows
    ) -> list[tf.IndexedSlices | None]:
        """Sums the rows that one replica's gradients of tables name more than once."""
        return [
            sum_repeated_rows(s) if s is not None and rows is None and not own.are_dense else s
            for s, rows, own in zip(slices, known, self._updates, strict=True)
        ]

    def _constrain(self, moved: Sequence[tf.Variable]) -> None:
        weights = [self._constrained[id(v)] for v in moved if id(v) in self._constrained]

        def assign(strategy: tf.distribute.Strategy) -> None:
            for weight in weights:
                strategy.extended.update(
                    weight.value, lambda v, w=weight: v.assign(tf.cast(w.constraint(w), v.dtype))
                )

        if weights:
            tf.distribute.get_replica_context().merge_call(assign)
