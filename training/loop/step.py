"""Training step: loss, gradients, update; many steps per compiled call, on all replicas.

On one GPU the batches come to the device ahead of the steps. `fit.check_gradients` ends training
at the step whose gradients are not finite, one step before its loss would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from conf.errors import ConfigError
from conf.training.train import ComputeConfig, TrainConfig
from training.distribution.strategy import count_workers
from training.embedding.distinct_rows import BatchRows, Lookups, plan_lookups, sharing_rows
from training.embedding.key_mapping import KeyedFeatures, admit_arrivals
from training.embedding.key_space import reading_rows
from training.input.batches import ARRIVALS, Batch
from training.loop.gradients import Gradient, LossScale, add_parts, are_finite
from training.loop.optimizers import Optimizers
from training.models.model import Model
from training.networks.layers import computing_in, keeping_shapes
from training.networks.network import TrainingPass
from training.objectives.objective import Objective, list_state


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed.

    Attributes:
        seed: The run's seed; with the step it fixes dropout and drawn negatives.
        dtype: Type that products of matrices are computed in.
        xla: Whether XLA compiles loss and gradients.
        check_gradients: Whether a replica whose gradients are not finite returns a loss of NaN.
    """

    seed: int
    dtype: tf.DType = tf.float32
    xla: bool = False
    check_gradients: bool = False


_PartResult: TypeAlias = tuple[tf.Tensor, list[Gradient], list[tf.Tensor], list[tf.Tensor | None]]


class TrainStep:
    """One step on one replica: loss, gradients, update.

    Args:
        model: The model.
        objective: Loss per row.
        optimizers: Update rules; they say in how many parts a batch is computed.
        options: How it is computed.
        lookups: The lookups that `add_distinct_ids` has added to the batches; None: none.
        keyed: Features whose keys `map_keys` has replaced by rows.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        optimizers: Optimizers,
        options: StepOptions,
        lookups: Sequence[Lookups] | None = None,
        keyed: Sequence[KeyedFeatures] = (),
    ) -> None:
        self._model = model
        self._objective = objective
        self._optimizers = optimizers
        self._options = options
        self._lookups = lookups
        self._keyed = tuple(keyed)
        self._state_variables = [*model.state_variables, *list_state(objective)]
        self._differentiate = self._compute_part
        if options.xla:
            self._differentiate = tf.function(self._compute_fixed, jit_compile=True)

    def __call__(self, batch: Batch) -> tf.Tensor:
        """Updates the model; returns this replica's share of the batch's mean loss, scalar."""
        context = tf.distribute.get_replica_context()
        parts = self._optimizers.accumulate_steps
        if self._keyed:
            admit_arrivals(batch[ARRIVALS], self._keyed)
            batch = {name: value for name, value in batch.items() if name != ARRIVALS}
        step = tf.cast(self._optimizers.step.read_value(), tf.int32)
        seed = tf.stack([self._options.seed % 2**31, step * 8])
        # Shares of the global mean: summed over replicas and parts they are the batch's.
        share = 1.0 / (parts * context.num_replicas_in_sync)
        scale = self._optimizers.loss_scale
        factor = tf.ones([]) if scale is None else scale.scale.read_value()
        shared = None if self._lookups is None else BatchRows(batch, self._lookups)
        losses: list[tf.Tensor] = []
        gradients: list[list[Gradient]] = []
        state = [variable.read_value() for variable in self._state_variables]
        for part, rows in enumerate(split_batch(batch, parts)):
            # One after the other: all at once they would need the memory of the whole batch.
            with tf.control_dependencies(losses), sharing_rows(shared), reading_rows():
                part_seed = tf.random.experimental.stateless_fold_in(seed, part) if part else seed
                loss, found, state, assigned = self._differentiate(
                    rows, part_seed, share, factor, state
                )
                set_assigned(self._model.dense_variables, assigned)
            losses.append(loss)
            gradients.append(found)
        tables = self._model.table_variables
        known = [None if shared is None else shared.rows_of(table) for table in tables]
        total = gradients[0] if parts == 1 else add_parts(gradients)
        total, known = self._optimizers.widen(total, known, factor)
        self._optimizers.apply(total, known)
        assign_state(self._state_variables, state)
        loss = tf.add_n(losses)
        return require_finite(loss, total) if self._options.check_gradients else loss

    def _compute_fixed(self, *args: Any) -> _PartResult:
        with keeping_shapes():
            return self._compute_part(*args)

    def _compute_part(
        self,
        batch: Batch,
        seed: tf.Tensor,
        share: float,
        factor: tf.Tensor,
        state: list[tf.Tensor],
    ) -> _PartResult:
        """Returns the mean loss of rows times their share, its gradients times a factor, and state.

        The last are values that layers have assigned to dense weights, None for the others.

        The loss has no penalties; the gradients are those of both.
        """
        variables = self._optimizers.variables_in_step_order
        with (
            computing_in(self._options.dtype),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(variables)
            training = TrainingPass(seed, self._state_variables, state)
            losses = self._objective(self._model, batch, training)
            rows = tf.cast(tf.size(losses), tf.float32)
            loss = tf.reduce_sum(losses) * (share / rows)
            target = loss + share * training.penalty
            penalty = self._model.penalize_rows(batch)
            if penalty is not None:
                target += penalty * (share / rows)
            target *= factor
        assigned = training.find_assigned(self._model.dense_variables)
        return loss, tape.gradient(target, variables), training.values, assigned


def assign_state(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Sets moving statistics to the mean over replicas of what their passes have left.

    Args:
        variables: The variables, equal on all replicas.
        values: This replica's new values.
    """
    if not variables:
        return
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
        values = _average(values)

    def assign(strategy: tf.distribute.Strategy, found: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(variables, found, strict=True):
            strategy.extended.update(
                variable, lambda v, new: v.assign(tf.cast(new, v.dtype)), args=(value,)
            )

    context.merge_call(assign, args=(list(values),))


def _average(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the means over replicas, one exchange for each type; those of integers as float64."""
    context = tf.distribute.get_replica_context()
    means = [v if v.dtype.is_floating else tf.cast(v, tf.float64) for v in values]
    for dtype in dict.fromkeys(mean.dtype for mean in means):
        places = [place for place, mean in enumerate(means) if mean.dtype == dtype]
        found = context.all_reduce(tf.distribute.ReduceOp.MEAN, [means[p] for p in places])
        for place, mean in zip(places, found, strict=True):
            means[place] = mean
    return means


def set_assigned(weights: Sequence[tf.Variable], values: Sequence[tf.Tensor | None]) -> None:
    """Sets weights to what layers have assigned to them in a pass; None: nothing.

    The update of the step starts from there, as that of Keras' `fit` does.
    """
    pairs = [(w, v) for w, v in zip(weights, values, strict=True) if v is not None]
    assign_state([weight for weight, _ in pairs], [value for _, value in pairs])


def require_finite(loss: tf.Tensor, gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the loss, or NaN where this replica's gradients are not finite."""
    return tf.where(are_finite(gradients), loss, tf.constant(float("nan"), loss.dtype))


def build_step_options(config: TrainConfig, strategy: tf.distribute.Strategy) -> StepOptions:
    """Returns how a config's steps are computed on a strategy's devices.

    Raises:
        ConfigError: XLA or batches of several lengths on several replicas, XLA with features of
            bytes, a batch that does not fall into equal parts, gradients to check that are
            scaled, or workers with several devices and a share of a table's rows.
    """
    dtype = _compute_dtype(config.compute)
    replicas = strategy.num_replicas_in_sync
    _check_sharded_tables(config, strategy)
    if config.compute.xla and replicas > 1:
        raise ConfigError(
            "compute.xla works on one device: XLA compiles no collectives between replicas here",
            received=f"{replicas} replicas",
            fix="set compute.xla=false, or train on one device",
        )
    vectors = getattr(config.model, "vectors", None)
    if config.compute.xla and vectors:
        raise ConfigError(
            "compute.xla cannot be used with model.vectors: XLA reads no bytes",
            received=", ".join(vectors),
            fix="set compute.xla=false, or build the vectors as lists of numbers",
        )
    if config.input.bucket_boundaries and replicas > 1:
        raise ConfigError(
            "input.bucket_boundaries works on one device: collectives between replicas need lists "
            "of one length in all batches",
            received=f"{replicas} replicas",
            fix="leave input.bucket_boundaries out, or train on one device",
        )
    parts = config.optimizer.accumulate_steps or 1
    if config.input.batch_size % (parts * replicas):
        raise ConfigError(
            "input.batch_size must be a multiple of optimizer.accumulate_steps times replicas",
            received=f"{config.input.batch_size} rows in {parts} parts on {replicas} replicas",
            allowed=f"a multiple of {parts * replicas}",
        )
    if config.fit.check_gradients and dtype == tf.float16:
        raise ConfigError(
            "fit.check_gradients cannot be used with float16: scaled gradients may overflow, "
            "and the step is then left out",
            received="compute.mixed_precision in float16",
            fix="leave out fit.check_gradients, or set compute.half_dtype=bfloat16",
        )
    return StepOptions(
        config.seed,
        dtype,
        config.compute.xla,
        config.fit.check_gradients,
    )


def _check_sharded_tables(config: TrainConfig, strategy: tf.distribute.Strategy) -> None:
    tables = config.model.embeddings.items()
    sharded = [name for name, table in tables if table.kind == "dynamic" and table.shard]
    workers = count_workers(strategy)
    if sharded and workers > 1 and strategy.num_replicas_in_sync > workers:
        raise ConfigError(
            f"model.embeddings.{sharded[0]}.shard=workers takes one device for each worker",
            received=f"{strategy.num_replicas_in_sync} devices of {workers} workers",
            fix="start a worker for each GPU, with CUDA_VISIBLE_DEVICES set to its own",
        )


def plan_shared_rows(
    model: Model, config: TrainConfig, strategy: tf.distribute.Strategy
) -> tuple[Lookups, ...] | None:
    """Returns which rows a step gathers once for all; None where each lookup gathers its own.

    One CPU device gains by it. The number of distinct rows changes from step to step, which
    collectives between replicas, parts of a batch and XLA do not take.
    """
    is_alone = strategy is tf.distribute.get_strategy() and strategy.num_replicas_in_sync == 1
    in_parts = (config.optimizer.accumulate_steps or 1) > 1
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if not is_alone or in_parts or has_gpu or config.compute.xla:
        return None
    return plan_lookups(model.lookups)


def build_loss_scale(config: ComputeConfig) -> LossScale | None:
    """Returns the loss scale where steps compute in float16; call it under the strategy's scope."""
    if _compute_dtype(config) != tf.float16:
        return None
    return LossScale(config.initial_loss_scale, config.loss_scale_growth_steps)


def _compute_dtype(config: ComputeConfig) -> tf.DType:
    if not config.mixed_precision:
        return tf.float32
    by_device = "float16" if tf.config.list_physical_devices("GPU") else "bfloat16"
    return tf.as_dtype(config.half_dtype or by_device)


def split_batch(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cuts a batch into parts of as many rows: every `parts`-th row, from another one on.

    A replica has consecutive rows of the global batch, as many as a multiple of `parts`: so the
    rows of a part, over all replicas, are the same for any number of them.

    Args:
        batch: Features of `[parts * n, …]` each.
        parts: How many.
    """
    for part in range(parts):
        yield batch if parts == 1 else {n: _pick_rows(v, part, parts) for n, v in batch.items()}


def _pick_rows(
    value: tf.Tensor | tf.RaggedTensor | tf.SparseTensor, part: int, parts: int
) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    if not isinstance(value, tf.SparseTensor):
        return value[part::parts]
    rows = value.indices[:, 0]
    kept = tf.sparse.retain(value, tf.equal(rows % parts, part))
    indices = tf.concat([kept.indices[:, :1] // parts, kept.indices[:, 1:]], axis=1)
    shape = tf.concat([value.dense_shape[:1] // parts, value.dense_shape[1:]], axis=0)
    return tf.SparseTensor(indices, kept.values, shape)
