"""Networks that read no order: linear models, factorization machines, cross layers, MLPs.

lr             w0 + Σ w x                                 weights of ids, numbers
fm             lr + ½ ((Σ v x)² - (Σ (v x)²))             Rendle 2010, equations 1 and 5
wide_deep      lr + an MLP                                Cheng et al. 2016, section 3
deepfm         fm + an MLP                                Guo et al. 2017, equations 1 to 4
dcn            cross layers beside an MLP                 Wang et al. 2021, equations 1 and 2
final_net      two stacks of layers that multiply halves  Zhu et al. 2023, section 2
mf             w0 + b_user + b_item + user · item         Koren et al. 2009, equation 4
shared_bottom  an MLP for all tasks, one for each         Caruana 1997
mmoe           a mixture of experts for each task         Ma et al. 2018, equations 6 and 7

Each returns logits `[batch, 1]`, those of several tasks by name. `base_scores` is the score of a
constant for each task, where training starts; `layers` are the settings of `HiddenLayers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import keras_rs

from conf.errors import ConfigError
from training.networks.network import NetworkInputs
from training.networks.tower import HiddenLayers, add, build_output, concatenate, first_score

HIDDEN_UNITS = (256, 128)
TASK_UNITS = (64,)
BaseScores = Mapping[str, float] | None


def build_lr(inputs: NetworkInputs, *, base_scores: BaseScores = None) -> keras.KerasTensor:
    terms = [inputs[name] for name in inputs.biases]
    if inputs.numbers:
        numbers = concatenate([inputs[name] for name in inputs.numbers])
        terms.append(keras.layers.Dense(1, use_bias=False)(numbers))
    return Bias(first_score(base_scores))(add(terms))


def build_fm(
    inputs: NetworkInputs, *, dropout: float | None = None, base_scores: BaseScores = None
) -> keras.KerasTensor:
    """Builds a factorization machine of second order; dropout is of the products of pairs."""
    pairs = build_interactions(inputs)
    if dropout is not None:
        pairs = keras.layers.Dropout(dropout)(pairs)
    linear = build_lr(inputs, base_scores=base_scores)
    return keras.layers.Add()([linear, keras.ops.sum(pairs, axis=1, keepdims=True)])


def build_wide_deep(
    inputs: NetworkInputs,
    *,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    base_scores: BaseScores = None,
    **layers: Any,
) -> keras.KerasTensor:
    hidden = HiddenLayers(**layers).stack(flatten_inputs(inputs), hidden_units)
    linear = build_lr(inputs, base_scores=base_scores)
    return keras.layers.Add()([linear, keras.layers.Dense(1, use_bias=False)(hidden)])


def build_deepfm(
    inputs: NetworkInputs, *, base_scores: BaseScores = None, **params: Any
) -> keras.KerasTensor:
    """Builds the two; parameters are those of `wide_deep`."""
    pairs = keras.ops.sum(build_interactions(inputs), axis=1, keepdims=True)
    deep = build_wide_deep(inputs, base_scores=base_scores, **params)
    return keras.layers.Add()([deep, pairs])


def build_mf(
    inputs: NetworkInputs, *, user: str, item: str, base_scores: BaseScores = None
) -> keras.KerasTensor:
    """Builds matrix factorization; without biases the score is the product alone (eq. 1)."""
    product = keras.layers.Dot(axes=1)([inputs[user], inputs[item]])
    if not inputs.biases:
        return product
    terms = [product, *(inputs[f"{name}_bias"] for name in (user, item))]
    return Bias(first_score(base_scores))(keras.layers.Add()(terms))


def build_dcn(
    inputs: NetworkInputs,
    *,
    cross_layers: int = 3,
    projection_dim: int | None = None,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    base_scores: BaseScores = None,
    **layers: Any,
) -> keras.KerasTensor:
    """Builds cross layers beside an MLP, if any, joined by a linear layer.

    A cross layer is `x0 * (W x + b) + x`, `projection_dim` the rank of W = U V (None: it is whole).
    """
    first = flatten_inputs(inputs)
    crossed = first
    for _ in range(cross_layers):
        crossed = keras_rs.layers.FeatureCross(projection_dim=projection_dim)(first, crossed)
    if not hidden_units:
        return build_output(crossed, base_scores)
    hidden = HiddenLayers(**layers).stack(first, hidden_units)
    return build_output(keras.layers.Concatenate()([crossed, hidden]), base_scores)


def build_final_net(
    inputs: NetworkInputs,
    *,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    second_units: Sequence[int] = (128,),
    base_scores: BaseScores = None,
    **layers: Any,
) -> keras.KerasTensor:
    """Builds FINAL of two blocks, whose logits are averaged.

    Zhu et al. 2023, "FINAL: Factorized Interaction Layer for CTR Prediction", sections 2.1, 2.2;
    without the distillation of section 2.2, by which each block also learns their mean. A layer is
    a linear map to `u` beside `v`, as `u` beside `u * v`: lengths of layers are even numbers.
    """
    own = HiddenLayers(**layers)
    row, logits = flatten_inputs(inputs), []
    for units in (hidden_units, second_units):
        hidden = row
        for size in units:
            plain, factor = keras.ops.split(keras.layers.Dense(size)(hidden), 2, axis=-1)
            hidden = own.finish(concatenate([plain, plain * factor]))
        logits.append(build_output(hidden, base_scores))
    return keras.layers.Average()(logits)


def build_shared_bottom(
    inputs: NetworkInputs,
    *,
    tasks: Sequence[str],
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    task_units: Sequence[int] = TASK_UNITS,
    base_scores: BaseScores = None,
    **layers: Any,
) -> dict[str, keras.KerasTensor]:
    """Builds an MLP that all tasks share, and a smaller one for each."""
    own = HiddenLayers(**layers)
    shared = own.stack(flatten_inputs(inputs), hidden_units)
    return {task: build_output(own.stack(shared, task_units), base_scores, task) for task in tasks}


def build_mmoe(
    inputs: NetworkInputs,
    *,
    tasks: Sequence[str],
    experts: int = 4,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    task_units: Sequence[int] = TASK_UNITS,
    base_scores: BaseScores = None,
    **layers: Any,
) -> dict[str, keras.KerasTensor]:
    """Builds experts that each task mixes by a softmax over a linear map of the inputs."""
    own = HiddenLayers(**layers)
    row = flatten_inputs(inputs)
    outputs = keras.ops.stack([own.stack(row, hidden_units) for _ in range(experts)], axis=1)
    logits = {}
    for task in tasks:
        gate = keras.layers.Dense(experts, activation="softmax", use_bias=False)(row)
        mixed = keras.ops.einsum("be,bew->bw", gate, outputs)
        logits[task] = build_output(own.stack(mixed, task_units), base_scores, task)
    return logits


class Bias(keras.layers.Layer):
    """Adds one trained number, which begins at `start`."""

    def __init__(self, start: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.start = start

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        first = keras.initializers.Constant(self.start)
        self.bias = self.add_weight(shape=(1,), initializer=first, name="bias")

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return inputs + self.bias


def build_interactions(inputs: NetworkInputs) -> keras.KerasTensor:
    """Builds the products of all pairs of fields, summed, `[batch, dim]`.

    That is (Σ v)² - Σ v², halved (Rendle 2010, lemma 3.1). A vector is a field, and so is each
    position or element of a list.
    """
    dims = {name: inputs[name].shape[-1] for name in inputs.vectors}
    if len(set(dims.values())) != 1:
        raise ConfigError(
            "a factorization machine multiplies vectors of one length",
            received=", ".join(f"{name}: {dim}" for name, dim in dims.items()) or "no vectors",
            fix="give the tables one `dim`, or leave features out of model.features",
        )
    fields = []
    for name in inputs.vectors:
        tensor = inputs[name]
        if name not in inputs.elements:
            fields.append(tensor if len(tensor.shape) == 3 else keras.ops.expand_dims(tensor, 1))
    totals, squares = ([inputs[pair[i]] for pair in inputs.elements.values()] for i in (0, 1))
    if fields:
        stacked = concatenate(fields, axis=1)
        totals.append(keras.ops.sum(stacked, axis=1))
        squares.append(keras.ops.sum(keras.ops.square(stacked), axis=1))
    return 0.5 * (keras.ops.square(add(totals)) - add(squares))


def flatten_inputs(inputs: NetworkInputs) -> keras.KerasTensor:
    return concatenate(flatten_each(inputs))


def flatten_each(inputs: NetworkInputs, without: Sequence[str] = ()) -> list[keras.KerasTensor]:
    """Returns vectors and numbers as `[batch, width]` each, but for some of them."""
    names = [name for name in (*inputs.vectors, *inputs.numbers) if name not in without]
    return [_flatten(name, inputs[name]) for name in names]


def _flatten(name: str, tensor: keras.KerasTensor) -> keras.KerasTensor:
    if len(tensor.shape) == 2:
        return tensor
    if tensor.shape[1] is None:
        raise ConfigError(
            "an MLP needs lists of a known length where it reads each position",
            received=f"model.pooling.{name}.combiner = none, without a length",
            fix="choose the combiner mean, sum or max, or build the feature with a max_len",
        )
    return keras.layers.Flatten()(tensor)
