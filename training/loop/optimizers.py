"""Optimizers of a run: Keras' by name for dense weights, a lazy one for embedding tables."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.training.optimizer import OptimizerConfig, SparseOptimizerConfig
from training.embedding.lazy_optimizer import (
    LazyFTRL,
    LazyOptimizer,
    TableRule,
    build_lazy_rule,
    sum_repeated_rows,
)
from training.embedding.static_table import EmbeddingTable
from training.loop.gradients import (
    Gradient,
    LossScale,
    are_finite,
    as_slices,
    clip_dense_values,
    clip_global_norm,
    widen_slices,
)
from training.loop.schedules import build_learning_rate
from training.models.model import Model

# Arguments that the config sets for tables and dense weights together, and those without use.
_SET_ELSEWHERE = {
    "clipnorm": "optimizer.clip_norm",
    "global_clipnorm": "optimizer.clip_norm",
    "clipvalue": "optimizer.clip_value",
    "gradient_accumulation_steps": "optimizer.accumulate_steps",
    "loss_scale_factor": "compute.mixed_precision",
    "use_ema": None,
    "ema_momentum": None,
    "ema_overwrite_frequency": None,
    "name": None,
}
# Bases and wrappers.
_NO_OPTIMIZERS = ("optimizer", "lossscaleoptimizer", "multioptimizer")


class ScheduleFreeAdamW(keras.optimizers.ScheduleFreeAdamW):
    """Schedule-Free AdamW (Defazio et al. 2024, "The road less scheduled", equations 2 to 4).

    Keras' own on TensorFlow takes the auxiliary weight after its update for the one before it,
    which leaves out a part of the average; here it is kept apart. Its weight decay moves the weight
    before the update, so the average is recovered from another weight; here the decay is a part of
    the gradient's step, as in the paper. Weights may also be set after the optimizer has been
    built, as warm starts do.
    """

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes the state.

        Raises:
            ValueError: `beta_1` is 0: the average equals the weights then.
        """
        if not 0.0 < self.beta_1 < 1.0:
            raise ValueError(f"beta_1 must be between 0 and 1, both left out; it is {self.beta_1}")
        super().build(var_list)

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Updates a weight; what it is averaged with starts where the weight does."""
        auxiliary = self._momentums[self._get_variable_index(variable)]
        is_first = tf.equal(tf.convert_to_tensor(self.iterations), 0)
        weight = tf.convert_to_tensor(variable)
        before = tf.where(is_first, weight, tf.convert_to_tensor(auxiliary))
        self.assign(auxiliary, before)
        super().update_step(gradient, variable, learning_rate)
        after = tf.convert_to_tensor(auxiliary) - self._find_decay(variable, weight, learning_rate)
        self.assign(auxiliary, after)
        share = 1.0 / tf.cast(self.iterations + 1, after.dtype)
        average = (weight - (1.0 - self.beta_1) * before) / self.beta_1
        average += share * (after - average)
        self.assign(variable, (1.0 - self.beta_1) * after + self.beta_1 * average)

    def _find_decay(
        self, variable: tf.Variable, weight: tf.Tensor, learning_rate: tf.Tensor
    ) -> tf.Tensor | float:
        """Returns what weight decay takes of the auxiliary weight: a share of the weight."""
        if self.weight_decay is None or not self._use_weight_decay(variable):
            return 0.0
        rate = tf.cast(learning_rate, weight.dtype)
        if self.warmup_steps > 0:
            done = tf.cast(self.iterations + 1, weight.dtype)
            rate *= tf.minimum(done / self.warmup_steps, 1.0)
        return rate * self.weight_decay * weight

    def _apply_weight_decay(self, variables: Sequence[tf.Variable]) -> None:
        """Does nothing: `update_step` decays."""


class Muon(keras.optimizers.Muon):
    """Keras' Muon for variables that are not Keras' own: their names stand for paths."""

    def _should_use_adamw(self, variable: tf.Variable) -> bool:
        path = getattr(variable, "path", variable.name)
        return bool(super()._should_use_adamw(SimpleNamespace(shape=variable.shape, path=path)))


def dense_optimizer_classes() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Returns Keras' optimizers by name, in small letters."""
    classes = {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer)
    }
    classes |= {"muon": Muon, "schedulefreeadamw": ScheduleFreeAdamW}
    return {name: value for name, value in classes.items() if name not in _NO_OPTIMIZERS}


def build_dense_optimizer(
    config: OptimizerConfig, variables: Sequence[tf.Variable], total_steps: int
) -> keras.optimizers.Optimizer:
    """Builds the optimizer of dense weights; call it under the strategy's scope.

    Args:
        config: Its name, arguments and learning rate.
        variables: The weights.
        total_steps: Steps of the whole run, for the schedule.

    Raises:
        ConfigError: Keras has no such optimizer, or refuses its arguments.
    """
    dense = config.dense
    classes = dense_optimizer_classes()
    kind = dense.kind.lower()
    if kind not in classes:
        raise ConfigError(
            "optimizer.dense.kind is none of Keras' optimizers",
            received=dense.kind,
            allowed=", ".join(sorted(classes)),
            fix=did_you_mean(kind, classes),
        )
    arguments = dense.arguments
    _check_arguments(kind, classes[kind], arguments)
    if kind == "adam":
        of_adam = {"beta_1": config.beta_1, "beta_2": config.beta_2, "epsilon": config.epsilon}
        arguments = {**of_adam, **arguments}
    try:
        optimizer = classes[kind](
            build_learning_rate(config, total_steps, dense.learning_rate), **arguments
        )
        optimizer.build(variables)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras refuses the arguments of optimizer.dense (kind {kind})",
            received=f"{arguments}: {error}",
            fix=f"correct the keys of optimizer.dense; {kind} takes "
            f"{', '.join(_argument_names(classes[kind]))}",
        ) from error
    return optimizer


def _argument_names(cls: type[keras.optimizers.Optimizer]) -> list[str]:
    parameters = inspect.signature(cls.__init__).parameters.values()
    taken = {"self", "learning_rate", *_SET_ELSEWHERE}
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in taken]


def _check_arguments(
    kind: str, cls: type[keras.optimizers.Optimizer], arguments: dict[str, object]
) -> None:
    known = _argument_names(cls)
    for name in arguments:
        if name in known:
            continue
        instead = _SET_ELSEWHERE.get(name)
        raise ConfigError(
            f"optimizer.dense (kind {kind}) takes no such argument",
            received=name,
            allowed=", ".join(known),
            fix=f"set {instead} instead" if instead else did_you_mean(name, known),
        )


def _plan_rules(
    config: OptimizerConfig, tables: Sequence[EmbeddingTable], total_steps: int
) -> list[TableRule]:
    """The rule of each table; tables that ask for none of their own share one."""
    of_all = _plan_rule(config, config.sparse, total_steps)
    own = [table.updates.optimizer for table in tables]
    return [of_all if each is None else _plan_rule(config, each, total_steps) for each in own]


def _plan_rule(
    config: OptimizerConfig, sparse: SparseOptimizerConfig, total_steps: int
) -> TableRule:
    rate = build_learning_rate(config, total_steps, sparse.learning_rate)
    return TableRule(build_lazy_rule(config, sparse), rate)


KnownRows: TypeAlias = Sequence[tf.Tensor | None]


class Optimizers(tf.Module):
    """Applies one step's gradients to dense weights and tables.

    Build it under the strategy's scope, call `apply` in a replica context with gradients that
    sum over replicas to the gradient of the global loss, times the loss scale where there is one.

    Args:
        config: Rules, rates and clipping.
        model: The model whose variables are updated.
        total_steps: Steps of the whole run, for the schedule.
        loss_scale: Factor of the loss, or None.

    Attributes:
        objective_state: What steps set of the objective; saved and restored with the optimizers.

    Raises:
        ConfigError: Keras has no such optimizer, or refuses its arguments.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: Model,
        total_steps: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(name="optimizers")
        self._clip_norm, self._clip_value = config.clip_norm, config.clip_value
        self.accumulate_steps = config.accumulate_steps or 1
        self.loss_scale = loss_scale
        self.objective_state: list[tf.Variable] = []
        self._tables = model.table_variables
        trained = list(model.trained_tables.values())
        rows, rules = [table.rows for table in trained], _plan_rules(config, trained, total_steps)
        self._updates = [table.updates for table in trained]
        self._config, self._names = config, list(model.trained_tables)
        self._dense = model.dense_variables
        # No dict: what looks for variables would look into it.
        self._constrained = MappingProxyType({id(w.value): w for w in model.constrained_weights})
        self.sparse = LazyOptimizer(rows, rules)
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

    def hold_rows(self, name: str, table: EmbeddingTable, rows: np.ndarray) -> None:
        """Lets the optimizer keep rows that came from elsewhere without state of their own.

        Args:
            name: Of the table.
            table: The table.
            rows: int64 `[n]`, the rows that came.
        """
        if name in self._names:
            sparse = table.updates.optimizer or self._config.sparse
            rate = sparse.learning_rate or self._config.learning_rate
            self.sparse.hold_rows(self._names.index(name), table.rows, rows, rate)

    def hold_weights(self, numbers: Collection[int]) -> None:
        """Lets the optimizer keep dense weights that came from elsewhere without state.

        Args:
            numbers: Their places among the dense weights.
        """
        ftrl = self.dense
        if not isinstance(ftrl, keras.optimizers.Ftrl):
            return
        rule = LazyFTRL(
            ftrl.learning_rate_power,
            ftrl.initial_accumulator_value,
            ftrl.l1_regularization_strength,
            ftrl.l2_regularization_strength,
            ftrl.beta,
        )
        rate = self._config.dense.learning_rate or self._config.learning_rate
        for number in numbers:
            sums = ftrl._accumulators[number].numpy()
            held = rule.hold(self._dense[number].numpy(), sums, rate)
            ftrl._linears[number].assign(held)

    def widen(
        self, gradients: Sequence[Gradient], known: KnownRows, factor: tf.Tensor
    ) -> tuple[list[Gradient], list[tf.Tensor | None]]:
        """Lets the gradients of tables that are updated as a whole name all rows, each once.

        What their `l2` adds to the loss is in them then.

        Args:
            gradients: This replica's shares, in the order of `variables_in_step_order`.
            known: As for `apply`.
            factor: What the gradients are multiplied by.

        Returns:
            The gradients, and what is known of their rows.
        """
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        wide, rows = list(gradients), list(known)
        for number, updates in enumerate(self._updates):
            if updates.are_dense:
                l2 = factor * ((updates.l2 or 0.0) / replicas)
                slices = as_slices(gradients[number])
                wide[number] = widen_slices(slices, self._tables[number], l2)
                rows[number] = None
        return wide, rows

    def apply(self, gradients: Sequence[Gradient], known: KnownRows | None = None) -> None:
        """Updates all variables once, or none where scaled gradients have overflown.

        Args:
            gradients: In the order of `variables_in_step_order`, from `widen`.
            known: Per table the rows that its gradient names, each once, or None where they are
                not known; for one replica only.
        """
        known = [None] * len(self._tables) if known is None else known
        count = len(self._tables)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients[count:]]
        gradients = [*gradients[:count], *dense]
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
                sum_repeated_rows(slices)
                if slices is not None and rows is None and not own.are_dense
                else slices
                for slices, rows, own in zip(tables, known, self._updates, strict=True)
            ]
        # As of Keras' optimizers: a weight that the loss does not depend on stays what it is.
        found = zip(self._dense, gradients[len(self._tables) :], strict=True)
        pairs = [(weight, gradient) for weight, gradient in found if gradient is not None]
        moved, dense = [weight for weight, _ in pairs], [gradient for _, gradient in pairs]
        if self._clip_norm is not None:
            tables, dense = clip_global_norm(tables, dense, self._clip_norm, are_unique=is_alone)
        elif self._clip_value is not None:
            dense = clip_dense_values(dense, self._clip_value)
        self.sparse.apply(tables, self._tables, are_unique=is_alone, known=known)
        if self.dense is not None:
            self.dense.apply(dense, moved)
            self._constrain(moved)

    def _constrain(self, moved: Sequence[tf.Variable]) -> None:
        """Applies the constraints of layers to weights that were updated, on each replica."""
        weights = [self._constrained[id(v)] for v in moved if id(v) in self._constrained]

        def assign(strategy: tf.distribute.Strategy) -> None:
            for weight in weights:
                strategy.extended.update(
                    weight.value, lambda v, w=weight: v.assign(tf.cast(w.constraint(w), v.dtype))
                )

        if weights:
            tf.distribute.get_replica_context().merge_call(assign)
