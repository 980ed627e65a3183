"""Lazy optimizers of embedding tables: SGD, Adagrad, Adam, FTRL on the rows of a batch alone.

One step costs O(rows of the batch), never O(vocabulary): all other rows keep their values and
their state. Gradients of repeated ids are summed first: applying them one by one would be
another, wrong, optimizer. What each rule does to a row equals what Keras' optimizer of the
same name does to a dense weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig, SparseOptimizerConfig
from training.distribution.strategy import on_host
from training.embedding.distinct_rows import sum_rows
from training.embedding.dynamic_table import (
    ShardedRows,
    TableRows,
    fill_like,
    find_step_variable,
)
from training.embedding.static_table import read_rows

Slots = Mapping[str, tf.Tensor]


class RowStep(NamedTuple):
    """What a rule reads: rows, gradient and state `[n, dim]`; rate and zero-based step."""

    rows: tf.Tensor
    gradient: tf.Tensor
    slots: Slots
    rate: tf.Tensor
    step: tf.Tensor


@dataclass(frozen=True)
class LazyRule:
    """How rows change."""

    @property
    def slots(self) -> Mapping[str, float]:
        """Names and first values of the numbers that are kept per number of a table."""
        return {}

    def update(self, at: RowStep) -> tuple[tf.Tensor, Slots]:
        """Returns the new rows and their new state."""
        raise NotImplementedError


@dataclass(frozen=True)
class LazySGD(LazyRule):
    """Plain gradient descent: `w -= rate * g`."""

    def update(self, at: RowStep) -> tuple[tf.Tensor, Slots]:
        return at.rows - at.rate * at.gradient, {}


@dataclass(frozen=True)
class LazyAdagrad(LazyRule):
    """Adagrad (Duchi, Hazan & Singer 2011, "Adaptive subgradient methods", figure 1, diagonal).

    `epsilon` is added to the sum of squares under the root, as in Keras.
    """

    initial_accumulator: float = 0.1
    epsilon: float = 1e-7

    @property
    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator}

    def update(self, at: RowStep) -> tuple[tf.Tensor, Slots]:
        accumulator = at.slots["accumulator"] + tf.square(at.gradient)
        rows = at.rows - at.rate * at.gradient * tf.math.rsqrt(accumulator + self.epsilon)
        return rows, {"accumulator": accumulator}


@dataclass(frozen=True)
class LazyAdam(LazyRule):
    """Adam (Kingma & Ba 2015, algorithm 1, with the step size of section 2's last paragraph).

    Lazy: the moments of rows that a batch does not touch do not decay, while the bias
    corrections count all steps. `epsilon` is added to the root of the second moment, as in Keras.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    @property
    def slots(self) -> Mapping[str, float]:
        return {"first_moment": 0.0, "second_moment": 0.0}

    def update(self, at: RowStep) -> tuple[tf.Tensor, Slots]:
        nth = at.step + 1.0
        size = at.rate * tf.sqrt(1.0 - tf.pow(self.beta_2, nth)) / (1.0 - tf.pow(self.beta_1, nth))
        first, second = at.slots["first_moment"], at.slots["second_moment"]
        first = self.beta_1 * first + (1.0 - self.beta_1) * at.gradient
        second = self.beta_2 * second + (1.0 - self.beta_2) * tf.square(at.gradient)
        rows = at.rows - size * first / (tf.sqrt(second) + self.epsilon)
        return rows, {"first_moment": first, "second_moment": second}


@dataclass(frozen=True)
class LazyFTRL(LazyRule):
    """FTRL-Proximal (McMahan et al. 2013, "Ad click prediction", algorithm 1).

    As in Keras, `l2` is doubled and `beta` divided by the rate counts as more of it; the rate falls
    with the sum of squares to `learning_rate_power`. Where `rate_changes` a row moves by its
    gradients alone all the same: Keras' would grow and shrink with the learning rate.
    """

    learning_rate_power: float = -0.5
    initial_accumulator: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    rate_changes: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        # Squared gradients, and gradients less what was moved.
        return {"accumulator": self.initial_accumulator, "linear": 0.0}

    def update(self, at: RowStep) -> tuple[tf.Tensor, Slots]:
        sums = at.slots["accumulator"]
        accumulator = sums + tf.square(at.gradient)
        before, after = self._power(sums), self._power(accumulator)
        linear = at.slots["linear"]
        if self.rate_changes:
            linear = self.follow(at.rows, sums, linear, at.rate)
        linear = linear + at.gradient - (after - before) / at.rate * at.rows
        quadratic = (after + self.beta) / at.rate + 2.0 * self.l2
        rows = (tf.clip_by_value(linear, -self.l1, self.l1) - linear) / quadratic
        return rows, {"accumulator": accumulator, "linear": linear}

    def follow(
        self, rows: tf.Tensor, accumulator: tf.Tensor, linear: tf.Tensor, rate: tf.Tensor
    ) -> tf.Tensor:
        """Returns the `linear` that rows, which may be of another rate, are of at this one."""
        # Where a row is 0 all of `linear` counts, and where `linear` is, nothing moved the row yet.
        is_of_sums = (rows != 0.0) & (linear != 0.0)
        return tf.where(is_of_sums, self.hold(rows, accumulator, rate), linear)

    def hold(self, rows: tf.Tensor, accumulator: tf.Tensor, rate: float | tf.Tensor) -> tf.Tensor:
        """Returns the `linear`, `[n, dim]`, that rows from elsewhere stay what they are with.

        A row is computed of `linear` alone: with 0 its first update would forget it.
        """
        quadratic = (self._power(accumulator) + self.beta) / rate + 2.0 * self.l2
        return -rows * quadratic - tf.sign(rows) * self.l1

    def _power(self, sums: tf.Tensor) -> tf.Tensor:
        power = self.learning_rate_power
        return tf.sqrt(sums) if power == -0.5 else tf.pow(sums, -power)


_RULES = {"sgd": LazySGD, "adagrad": LazyAdagrad, "adam": LazyAdam, "ftrl": LazyFTRL}


def build_lazy_rule(config: OptimizerConfig, sparse: SparseOptimizerConfig) -> LazyRule:
    """Returns the rule of all tables, or of one; Adam takes over what it does not say."""
    rule: Any = _RULES[sparse.kind]
    names = {field.name for field in fields(rule)}
    usual = config.model_dump(include=names) if sparse.kind == "adam" else {}
    return rule(**usual | sparse.model_dump(include=names, exclude_none=True))


LearningRate = float | Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class TableRule:
    """The update of a table's rows; the rate may be a function of the zero-based step."""

    rule: LazyRule
    learning_rate: LearningRate

    def find_rate(self, step: tf.Tensor) -> tf.Tensor:
        rate = self.learning_rate
        return tf.cast(rate(step) if callable(rate) else rate, tf.float32)


def sum_repeated_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the slices of equal indices: each occurs once, in order of first occurrence."""
    unique, position = tf.unique(slices.indices)
    summed = sum_rows(slices.values, position, tf.size(unique))
    return tf.IndexedSlices(summed, unique, slices.dense_shape)


def sum_own_rows(
    slices: tf.IndexedSlices | None, matrix: ShardedRows, number: int
) -> tf.IndexedSlices | None:
    """Returns the gradient of the rows that this worker owns, summed over all workers.

    `slices` are this worker's share, by place in the matrix of the batch. Rows that any worker's
    share names are returned, each once.
    """
    exchange = matrix.keys.exchange
    if slices is None or exchange is None:
        return None
    # The last column counts: a row that is named moves, even where its gradient is zero.
    named = tf.concat([slices.values, tf.ones([tf.size(slices.indices), 1])], axis=1)
    shares = sum_rows(named, slices.indices, exchange.places)
    total = exchange.sum_at_owner(tf.ensure_shape(shares, [None, matrix.dim + 1]), number)
    kept = tf.where(total[:, -1] > 0.0)[:, 0]
    return tf.IndexedSlices(tf.gather(total[:, :-1], kept), tf.gather(exchange.own, kept))


class LazyOptimizer(tf.Module):
    """Rules on the rows that gradients name; all other rows keep every bit.

    Build it under the strategy's scope. Call `apply` in a replica context: the gradients of all
    replicas are summed before the update, so R replicas do what one would. `slots` are the state by
    name, for each table `[vocabulary_size, dim]`; None for one whose rule keeps no such state.
    """

    def __init__(self, tables: Sequence[TableRows], rules: TableRule | Sequence[TableRule]) -> None:
        super().__init__(name="lazy_optimizer")
        each = [rules] * len(tables) if isinstance(rules, TableRule) else list(rules)
        self._rules = each
        # No dict: what looks for variables would look into it.
        self._sharded = MappingProxyType(
            {number: rows for number, rows in enumerate(tables) if isinstance(rows, ShardedRows)}
        )
        names = dict.fromkeys(name for own in each for name in own.rule.slots)
        # Lists are tracked in order: a checkpoint finds each table's state by position.
        self.slots = {
            name: [
                fill_like(table, own.rule.slots[name], name) if name in own.rule.slots else None
                for table, own in zip(tables, each, strict=True)
            ]
            for name in names
        }
        with on_host():  # Where seeds are made of it: a step would wait for the number.
            self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")

    def apply(
        self,
        gradients: Sequence[tf.IndexedSlices | None],
        tables: Sequence[tf.Variable],
        *,
        are_unique: bool = False,
        known: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """Updates the tables, in a replica context; all lists are in the constructor's order.

        Args:
            gradients: One per table; ids may repeat. None where the loss does not depend on it.
            tables: The variables that steps look the tables up in.
            are_unique: Whether one replica runs and its gradients name no id twice.
            known: Rows that unique gradients name, or None where they are to be read.
        """
        # Repeated ids are summed after the reduction, not before: collectives inside a compiled
        # loop must keep their shape from step to step, and the number of unique ids does not.
        context = tf.distribute.get_replica_context()
        rows = [None] * len(tables) if known is None else list(known)
        found, targets = list(gradients), list(tables)
        for number, matrix in self._sharded.items():
            found[number] = sum_own_rows(found[number], matrix, number)
            targets[number] = matrix.variable
        context.merge_call(self._apply_merged, args=(found, targets, are_unique, rows))

    def _apply_merged(
        self,
        strategy: tf.distribute.Strategy,
        gradients: list[tf.IndexedSlices | None],
        tables: list[tf.Variable],
        are_unique: bool,
        known: list[tf.Tensor | None],
    ) -> None:
        reduced = {number: s for number, s in enumerate(gradients) if s is not None}
        shares = [number for number in reduced if number not in self._sharded]
        if shares and strategy.num_replicas_in_sync > 1:
            pairs = [(reduced[number], tables[number]) for number in shares]
            sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
            reduced |= dict(zip(shares, sums, strict=True))
        step = tf.convert_to_tensor(self.iterations)
        rates = {id(own): own.find_rate(step) for own in self._rules}
        for number, slices in reduced.items():
            own = self._rules[number]
            state = {name: find_step_variable(self.slots[name][number]) for name in own.rule.slots}
            is_summed = are_unique or number in self._sharded
            moment = (rates[id(own)], tf.cast(step, tf.float32), is_summed)
            arguments = (slices, own.rule, state, *moment, known[number])
            strategy.extended.update(tables[number], self._update_rows, args=arguments)
        strategy.extended.update(self.iterations, lambda variable: variable.assign_add(1))

    def hold_rows(self, number: int, table: TableRows, rows: np.ndarray, rate: float) -> None:
        """Sets the state of rows that came from elsewhere so that FTRL does not forget them."""
        rule = self._rules[number].rule
        if not isinstance(rule, LazyFTRL):
            return
        linear: Any = self.slots["linear"][number]
        sums: Any = self.slots["accumulator"][number]
        if isinstance(table, ShardedRows):
            rows = table.owners.to_local(rows[table.owners.are_own(rows)])
        values = linear.numpy().copy()
        values[rows] = rule.hold(table.numpy()[rows], sums.numpy()[rows], rate)
        if isinstance(linear, ShardedRows):
            linear.assign_own(values)
        else:
            linear.assign(values)

    def _update_rows(
        self,
        table: tf.Variable,
        slices: tf.IndexedSlices,
        rule: LazyRule,
        state: dict[str, tf.Variable],
        rate: tf.Tensor,
        step: tf.Tensor,
        are_unique: bool,
        before: tf.Tensor | None,
    ) -> tf.Operation:
        """Updates one replica's copy of a table. Returns an operation: the table is not copied."""
        if not are_unique:
            slices = sum_repeated_rows(slices)
        ids, gradient = slices.indices, slices.values
        slots = {name: read_rows(variable, ids) for name, variable in state.items()}
        before = read_rows(table, ids) if before is None else before
        rows, new = rule.update(RowStep(before, gradient, slots, rate, step))
        # Rows are set, not subtracted from: TensorFlow's scatter_sub takes ten times as long.
        for variable, values in ((table, rows), *((state[name], new[name]) for name in state)):
            variable.scatter_update(tf.IndexedSlices(values, ids))
        return tf.no_op()
