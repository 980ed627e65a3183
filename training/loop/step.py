"""Training step: loss, gradients, update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from training.distribution.strategy import on_host
from training.embedding.distinct_rows import BatchRows, Lookups
from training.embedding.key_mapping import KeyedFeatures, admit_arrivals
from training.input.batches import ARRIVALS, Batch
from training.loop.optimizers import Gradient, Optimizers, add_parts
from training.models.model import Model
from training.networks.network import StepContext
from training.objectives.objective import Objective, list_state


@dataclass(frozen=True)
class StepOptions:
    """The run's seed, which fixes dropout and negatives with the step; the type of products."""

    seed: int
    dtype: tf.DType = tf.float32


class TrainStep:
    """One step on one replica: loss, gradients, update.

    `add_distinct_ids` has added `lookups` to the batches, `map_keys` replaced the keys of `keyed`
    by rows.
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
        self._model, self._objective, self._optimizers = model, objective, optimizers
        self._options, self._lookups, self._keyed = options, lookups, tuple(keyed)
        self._state_variables = [*model.state_variables, *list_state(objective)]

    def __call__(self, batch: Batch) -> tf.Tensor:
        """Updates the model; returns this replica's share of the batch's mean loss, scalar."""
        parts = self._optimizers.accumulate_steps
        if self._keyed:
            admit_arrivals(batch[ARRIVALS], self._keyed)
            batch = {name: value for name, value in batch.items() if name != ARRIVALS}
        with tf.device(self._optimizers.step.device):  # The host, where one GPU trains.
            step = self._optimizers.step.read_value()
        with on_host():
            seed = tf.stack([self._options.seed % 2**31, tf.cast(step, tf.int32) * 8])
        shared = BatchRows(batch, self._lookups)
        losses: list[tf.Tensor] = []
        gradients: list[list[Gradient]] = []
        state = [variable.read_value() for variable in self._state_variables]
        for part, rows in enumerate(split_batch(batch, parts)):
            # One after the other: all at once they would need the memory of the whole batch.
            with tf.control_dependencies(losses):
                with on_host():
                    part_seed = (
                        tf.random.experimental.stateless_fold_in(seed, part) if part else seed
                    )
                context = StepContext(
                    part_seed, self._state_variables, state, shared, self._options.dtype
                )
                loss, found = self._differentiate(rows, context)
                assigned = context.find_assigned(self._model.dense_variables)
                state = context.values
                _set_assigned(self._model.dense_variables, assigned)
            losses.append(loss)
            gradients.append(found)
        tables = self._model.table_variables
        known = [shared.rows_of(table) for table in tables]
        total = gradients[0] if parts == 1 else add_parts(gradients)
        self._optimizers.apply(total, known)
        assign_state(self._state_variables, state)
        return tf.add_n(losses)

    def _differentiate(
        self, batch: Batch, context: StepContext
    ) -> tuple[tf.Tensor, list[Gradient]]:
        """Returns the share of some rows in the batch's loss; penalties are in gradients alone."""
        variables = self._optimizers.variables_in_step_order
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # Shares of the global mean: summed over replicas and parts they are the batch's.
        share = 1.0 / (self._optimizers.accumulate_steps * replicas)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            losses = self._objective(self._model, batch, context)
            rows = tf.cast(tf.size(losses), tf.float32)
            loss = tf.reduce_sum(losses) * (share / rows)
            target = loss + share * context.penalty
            penalty = self._model.penalize_rows(batch, context)
            if penalty is not None:
                target += penalty * (share / rows)
        return loss, tape.gradient(target, variables)


def assign_state(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Sets variables, equal on all replicas, to the mean over replicas of the given values."""
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


def _set_assigned(weights: Sequence[tf.Variable], values: Sequence[tf.Tensor | None]) -> None:
    """Sets weights to what layers have assigned to them in a pass; None: nothing."""
    pairs = [(w, v) for w, v in zip(weights, values, strict=True) if v is not None]
    assign_state([weight for weight, _ in pairs], [value for _, value in pairs])


def split_batch(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cuts a batch into parts of every `parts`-th row: the same rows for any number of replicas."""
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
