"""Keras networks inside the training step: calls without side effects, seeds by step.

In training layers read their moving statistics and seeds from a `StepContext` and leave new
statistics there: so a step can be computed in parts, and one that is repeated after a resume draws
the same numbers. Rows of like length may be computed together, so that short lists are not padded
to long ones.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.distribution.strategy import on_host
from training.embedding.distinct_rows import BatchRows
from training.networks.layers import may_cut
from training.reader.feature_columns import list_length

_REPLICA_STRIDE = 1 << 20
_POLICIES = {tf.float16: "mixed_float16", tf.bfloat16: "mixed_bfloat16"}
_NUMBERED = re.compile(r"(.*?)_\d+")


class NetworkInputs(dict[str, keras.KerasTensor]):
    """The inputs of a network by name; it knows what stands for what.

    Args:
        tensors: All inputs.
        vectors: Names of embedded ids: `[batch, dim]`, or `[batch, length, dim]` with a mask.
        numbers: Names of numbers, `[batch, n]`.
        biases: Names of weights of ids, `[batch, 1]`.
        masks: Name of the mask, `[batch, length]`, of each list whose positions are read.
        elements: Names of the sum of a list's elements and of the sum of their squares,
            `[batch, dim]` each, for lists whose elements are fields by themselves.
        lengths: Longest length of each list whose tensor has none, as a batch may be narrower.
    """

    def __init__(
        self,
        tensors: Mapping[str, keras.KerasTensor],
        vectors: Sequence[str] = (),
        numbers: Sequence[str] = (),
        biases: Sequence[str] = (),
        masks: Mapping[str, str] | None = None,
        elements: Mapping[str, Sequence[str]] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(tensors)
        self.vectors, self.numbers, self.biases = tuple(vectors), tuple(numbers), tuple(biases)
        self.masks, self.elements = dict(masks or {}), dict(elements or {})
        self._lengths = dict(lengths or {})

    def find_length(self, name: str) -> int | None:
        """Returns the longest length of a list whose positions are read; None: it has no bound."""
        length: int | None = self._lengths.get(name, self[name].shape[1])
        return length

    def __missing__(self, name: str) -> keras.KerasTensor:
        feature, _, suffix = name.rpartition("_")
        fixes = {
            "mask": f"set model.pooling.{feature}.combiner=none: it has a mask",
            "bias": "set model.biases=true: each feature of ids has one",
        }
        advice = fixes.get(suffix) if feature in self.vectors else None
        raise ConfigError(
            "the network reads an input that the model does not have",
            received=name,
            allowed=", ".join(self),
            fix=advice or did_you_mean(name, self),
        )


class StepContext:
    """What the pass of a training step reads beside its batch, and what it leaves.

    `seed`, int32 `[2]`, is another one for each step and part of a batch, the same on all replicas;
    `values` are those of `variables`, moving statistics, before the pass; `rows` are looked up by
    all, None: by each lookup its own; objectives compute products of matrices in `dtype`; `penalty`
    sums up what layers add to the loss, such as L2 of kernels.
    """

    def __init__(
        self,
        seed: tf.Tensor,
        variables: Sequence[tf.Variable] = (),
        values: Sequence[tf.Tensor] = (),
        rows: BatchRows | None = None,
        dtype: tf.DType = tf.float32,
    ) -> None:
        self.seed, self.dtype = seed, dtype
        self.rows = BatchRows({}) if rows is None else rows
        self.penalty: tf.Tensor = tf.zeros([])
        self._penalized: set[int] = set()
        self._variables = tuple(variables)
        self._values = {id(v): x for v, x in zip(variables, values, strict=True)}
        self._stream = tf.zeros([], tf.int32)

    @property
    def values(self) -> list[tf.Tensor]:
        return [self._values[id(variable)] for variable in self._variables]

    @contextmanager
    def drawing_from(self, stream: int) -> Iterator[None]:
        """Lets networks that are called in the block draw other numbers, equal on all replicas."""
        before = self._stream
        self._stream = tf.constant(-stream, tf.int32)
        try:
            yield
        finally:
            self._stream = before

    def draw_seed(self, number: int, dtype: str = "int32") -> tf.Tensor:
        """Returns the seed of a random layer on this replica, as each holds other rows."""
        context = tf.distribute.get_replica_context()
        stream = self._stream
        with on_host():
            if context is not None and context.num_replicas_in_sync > 1:
                replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
                stream = tf.where(stream < 0, stream, replica * _REPLICA_STRIDE)
            seed = tf.random.experimental.stateless_fold_in(self.seed, stream)
            return tf.cast(tf.random.experimental.stateless_fold_in(seed, number), dtype)

    def penalize(self, network: object, losses: Sequence[tf.Tensor]) -> None:
        """Adds what a network's layers add to the loss; once, if it is called several times."""
        if losses and id(network) not in self._penalized:
            self._penalized.add(id(network))
            self.penalty += tf.add_n([tf.cast(loss, tf.float32) for loss in losses])

    def read(self, variable: tf.Variable) -> tf.Tensor | tf.Variable:
        """Returns the value of a variable so far."""
        return self._values.get(id(variable), variable)

    def find_assigned(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor | None]:
        """Returns what layers have assigned to weights; None: nothing."""
        return [self._values.get(id(variable)) for variable in variables]

    def write(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Sets the value that a variable has after the pass."""
        self._values[id(variable)] = value


class _PassScope(keras.StatelessScope):
    """Keeps what layers assign; the gradient by a trained weight is that by its newest value."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        before = self.get_current_value(variable)
        value = tf.stop_gradient(value)
        if variable.trainable and before is not None:
            value += before - tf.stop_gradient(before)  # Zero, with the gradient of one.
        super().add_update((variable, value))


class HostSeeds(keras.random.SeedGenerator):
    """Makes seeds where kernels read them, the same ones: Keras casts each of them on the GPU."""

    def next(self, ordered: bool = True) -> tf.Tensor:
        with on_host():
            return tf.cast(tf.math.floormod(super().next(ordered), tf.int32.max - 1), tf.int32)


class Network(tf.Module):
    """A functional Keras model whose weights are named alike in every process.

    It maps inputs by name to one output, or outputs by name. `first_seed` is the number of its
    first random layer among those of the whole model.
    """

    def __init__(self, model: keras.Model, first_seed: int = 0) -> None:
        super().__init__(name="network")
        # In a closure: TensorFlow would track Keras' own names, which count layers of the process.
        self._get_model = lambda: model
        for generator in (g for layer in model._flatten_layers() for g in layer._seed_generators):
            if type(generator) is keras.random.SeedGenerator:  # Keras' layers take no other one.
                generator.__class__ = HostSeeds
        self.label, self._first_seed = str(model.name), first_seed
        names = name_weights(model)
        self.weights = {name: weight.value for name, weight in names.items()}

    @property
    def keras_model(self) -> keras.Model:
        return self._get_model()

    @property
    def trained_variables(self) -> list[tf.Variable]:
        """Weights that gradients update, in the order of the layers."""
        return [weight.value for weight in self.keras_model.trainable_weights]

    @property
    def state_variables(self) -> list[tf.Variable]:
        """Weights that passes set, such as moving statistics."""
        return [weight.value for weight in self.keras_model.non_trainable_weights]

    @property
    def constrained_weights(self) -> list[keras.Variable]:
        return [w for w in self.keras_model.trainable_weights if w.constraint is not None]

    @property
    def random_layers(self) -> int:
        model = self.keras_model
        return len(model.non_trainable_variables) - len(model.non_trainable_weights)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(self.keras_model.input)

    def __call__(self, inputs: Mapping[str, tf.Tensor], training: StepContext | None = None) -> Any:
        """Returns the outputs, as float32; of inputs at least `input_names`, `[batch, …]` each."""
        model = self.keras_model
        known = {name: _fit(inputs[name], tensor.shape) for name, tensor in model.input.items()}
        if training is None:
            with keras.StatelessScope():
                outputs = model(known, training=False)
        else:
            outputs = self._train(model, known, training)
        return tf.nest.map_structure(lambda output: tf.cast(output, tf.float32), outputs)

    def _train(self, model: keras.Model, inputs: Mapping[str, Any], training: StepContext) -> Any:
        kept = {id(weight) for weight in model.non_trainable_weights}
        states = [v for v in model.non_trainable_variables if id(v) not in kept]
        before = [(w, tf.convert_to_tensor(training.read(w.value))) for w in model.weights]
        seeds = [training.draw_seed(n, v.dtype) for n, v in enumerate(states, self._first_seed + 1)]
        drawn = zip(states, seeds, strict=True)
        with _PassScope([*before, *drawn], collect_losses=True) as scope:
            outputs = model.call(dict(inputs), training=True)
            losses = model.losses
        for weight, value in before:
            after = tf.convert_to_tensor(scope.get_current_value(weight))
            if after is not value:
                training.write(weight.value, after)
        training.penalize(self, losses)
        return outputs


def _fit(value: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Returns a tensor that is known to have a shape: what a served graph looks up has lost it."""
    value = tf.convert_to_tensor(value)
    # A mask that is looked at would go through the host's memory.
    is_known = value.shape.rank is not None and value.shape == value.shape.merge_with(shape)
    return value if is_known else tf.ensure_shape(value, shape)


@contextmanager
def building_layers(name: str, seed: int, dtype: tf.DType = tf.float32) -> Iterator[None]:
    """Lets layers built in the block begin alike in every process; they compute in `dtype`."""
    state, policy = random.getstate(), keras.config.dtype_policy()
    numbers = np.random.get_state()
    random.seed(f"{name} {seed}")  # Keras draws the seeds of its initializers from here.
    np.random.seed(zlib.crc32(f"{name} {seed}".encode()))  # User networks may draw here.
    keras.config.set_dtype_policy(_POLICIES.get(dtype, "float32"))
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
        keras.config.set_dtype_policy(policy)


def build_keras_model(
    name: str, inputs: Mapping[str, keras.KerasTensor], outputs: Any
) -> keras.Model:
    read = find_read_inputs(inputs, outputs)
    return keras.Model({key: inputs[key] for key in read}, outputs, name=name)


def find_read_inputs(inputs: Mapping[str, keras.KerasTensor], outputs: Any) -> tuple[str, ...]:
    """Returns the names of the inputs that outputs depend on; another `keras.Input` is refused."""
    names = {id(tensor): name for name, tensor in inputs.items()}
    found: set[str] = set()
    seen: set[int] = set()
    queue = list(keras.tree.flatten(outputs))
    while queue:
        tensor = queue.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in names:
            found.add(names[id(tensor)])
            continue
        history = tensor._keras_history  # Public for as long as Keras has functional models.
        if isinstance(history.operation, keras.layers.InputLayer):
            raise ConfigError(
                "the network has a keras.Input of its own, which nothing feeds",
                received=history.operation.name,
                allowed=", ".join(inputs),
                fix="use the tensors of `inputs`",
            )
        queue.extend(history.operation._inbound_nodes[history.node_index].input_tensors)
    return tuple(name for name in inputs if name in found)


def name_weights(model: keras.Model) -> dict[str, Any]:
    """Returns the weights of a model by name: layers of a class are numbered within the model."""
    numbers: dict[str, dict[str, str]] = {}
    named: dict[str, Any] = {}
    for weight in model.weights:
        path = ""
        for part in weight.path.split("/"):
            known = numbers.setdefault(path, {})
            if part not in known:
                known[part] = _number(part, known.values())
            path = f"{path}/{known[part]}" if path else known[part]
        named[_number(path, named) if path in named else path] = weight
    return named


def _number(part: str, taken: Collection[str]) -> str:
    """Returns a name without Keras' number, and with one where others have the same."""
    match = _NUMBERED.fullmatch(part)
    base = match[1] if match else part
    count, name = 0, base
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    return name


GROUPS, MIN_GROUP_ROWS = 4, 16
"""More of them have less padding, and more calls of small operations."""
FULL_SHARE = 0.6
"""Lists that are fuller in the mean are not worth the groups."""
FIRST_GROUP_STREAM = 16
"""Groups of rows drop numbers by streams of their own, from this one on."""

Encode = Callable[[Mapping[str, tf.Tensor], int], Any]


def plan_groups(manifest: Manifest, spec: FeatureSpec) -> int:
    """Returns how many groups a batch is computed in, by the lengths of a list in train."""
    found = manifest.statistics.get("train", {}).get(spec.name, {}).get("length", {})
    mean, longest = found.get("mean"), list_length(spec) if spec.is_list else None
    if mean is None or not longest or mean > FULL_SHARE * longest:
        return 1
    return GROUPS


def call_in_groups(
    network: Network,
    inputs: Mapping[str, tf.Tensor],
    training: StepContext | None,
    mask: str,
    count: int,
) -> Any:
    """Returns what a network makes of a batch; in training, its rows are computed in groups."""
    if training is None or count == 1 or not may_cut():
        return network(inputs, training)
    tensors = network.keras_model.input
    lists = [name for name, tensor in tensors.items() if tensor.shape[1] is None]

    def encode(group: Mapping[str, tf.Tensor], number: int) -> Any:
        with training.drawing_from(FIRST_GROUP_STREAM + number):
            return network(group, training)

    read = {name: inputs[name] for name in (*tensors, mask)}
    return encode_in_groups(encode, read, lists, mask, count)


def encode_in_groups(
    encode: Encode, inputs: Mapping[str, tf.Tensor], lists: Collection[str], mask: str, count: int
) -> Any:
    """Encodes the rows of a batch in groups of like length; their order stays as it is.

    `encode` returns `[rows, dim]` or `[rows, width, dim]` of the inputs of a group and its number,
    or several by name; behind the width of a group there are zeros. `lists` are the inputs
    `[batch, width, …]`, and `mask` is the one that tells the lengths.
    """
    known = inputs[mask].shape[0]
    if known is not None:
        count = max(1, min(count, known // MIN_GROUP_ROWS))
    if count == 1:
        return encode(inputs, 0)
    rows, width = tf.shape(inputs[mask])[0], tf.shape(inputs[mask])[1]
    lengths = tf.reduce_max(tf.where(inputs[mask], tf.range(1, width + 1), 0), axis=1)
    order = tf.argsort(lengths, stable=True)
    back = tf.math.invert_permutation(order)
    ordered = {name: _permute_rows(value, order, back) for name, value in inputs.items()}
    lengths, outputs = tf.gather(lengths, order), []
    for number in range(count):
        first, last = rows * number // count, rows * (number + 1) // count
        longest = tf.reduce_max(tf.concat([[0], lengths[first:last]], axis=0))
        own = tf.minimum(longest + 1, width)
        output = encode(
            {n: v[first:last, :own] if n in lists else v[first:last] for n, v in ordered.items()},
            number,
        )
        outputs.append(tf.nest.map_structure(partial(_pad_width, missing=width - own), output))
    return tf.nest.map_structure(
        lambda *parts: _permute_rows(tf.concat(parts, axis=0), back, order), *outputs
    )


def _pad_width(output: tf.Tensor, missing: tf.Tensor) -> tf.Tensor:
    return tf.pad(output, [[0, 0], [0, missing], [0, 0]]) if output.shape.rank == 3 else output


def _permute_rows(values: tf.Tensor, order: tf.Tensor, back: tf.Tensor) -> tf.Tensor:
    """Returns the rows in another order; its gradient takes them back, without a sum over rows."""

    @tf.custom_gradient
    def permute(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.gather(rows, order), lambda upstream: tf.gather(upstream, back)

    permuted: tf.Tensor = permute(values)
    return permuted
