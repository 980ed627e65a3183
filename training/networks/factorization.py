"""Linear models, factorization machines, cross layers, and MLPs beside them.

lr         w0 + Σ w x                                   weights of ids, numbers
fm         lr + ½ ((Σ v x)² - (Σ (v x)²))               Rendle 2010, equations 1 and 5
wide_deep  lr + an MLP                              Cheng et al. 2016, section 3
deepfm     fm + an MLP                              Guo et al. 2017, equations 1 to 4
dcn        cross layers beside an MLP               Wang et al. 2021, equations 1 and 2
final_net  two stacks of layers that multiply halves    Zhu et al. 2023, section 2
mf         w0 + b_user + b_item + user · item           Koren et al. 2009, equation 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import keras_rs

from conf.errors import ConfigError
from training.networks.network import NetworkInputs
from training.networks.tower import build_mlp, build_output, concatenate, finish_layer, first_score

HIDDEN_UNITS = (256, 128)
SECOND_UNITS = (128,)


def build_lr(
    inputs: NetworkInputs, *, base_scores: Mapping[str, float] | None = None
) -> keras.KerasTensor:
    """Builds logistic regression.

    Args:
        inputs: Biases and numbers.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    terms = [inputs[name] for name in inputs.biases]
    if inputs.numbers:
        numbers = concatenate([inputs[name] for name in inputs.numbers])
        terms.append(keras.layers.Dense(1, use_bias=False)(numbers))
    return Bias(first_score(base_scores))(_add(terms))


def build_fm(
    inputs: NetworkInputs,
    *,
    dropout: float | None = None,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds a factorization machine of second order.

    Args:
        inputs: Biases, numbers and vectors; each element of a list is a field.
        dropout: Share of the interactions' numbers dropped in training, or None.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    pairs = build_interactions(inputs)
    if dropout is not None:
        pairs = keras.layers.Dropout(dropout)(pairs)
    linear = build_lr(inputs, base_scores=base_scores)
    return keras.layers.Add()([linear, keras.ops.sum(pairs, axis=1, keepdims=True)])


def build_wide_deep(
    inputs: NetworkInputs,
    *,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds Wide & Deep: a linear model beside an MLP.

    Args:
        inputs: Biases, numbers and vectors.
        hidden_units: Lengths of the hidden layers.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    hidden = build_mlp(
        flatten_inputs(inputs),
        hidden_units,
        activation=activation,
        dropout=dropout,
        batch_normalization=batch_normalization,
    )
    linear = build_lr(inputs, base_scores=base_scores)
    return keras.layers.Add()([linear, keras.layers.Dense(1, use_bias=False)(hidden)])


def build_deepfm(
    inputs: NetworkInputs,
    *,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds DeepFM: a factorization machine and an MLP over the same vectors.

    Args:
        inputs: As for `build_fm`.
        hidden_units: As for `build_wide_deep`, like the arguments behind it.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    pairs = keras.ops.sum(build_interactions(inputs), axis=1, keepdims=True)
    deep = build_wide_deep(
        inputs,
        hidden_units=hidden_units,
        activation=activation,
        dropout=dropout,
        batch_normalization=batch_normalization,
        base_scores=base_scores,
    )
    return keras.layers.Add()([deep, pairs])


def build_mf(
    inputs: NetworkInputs,
    *,
    user: str,
    item: str,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds matrix factorization; Koren, Bell & Volinsky 2009, eq. 4.

    Args:
        inputs: Vectors, and biases where the model has them; without any, the score is the product
            alone (eq. 1).
        user: The feature of the user.
        item: The feature of the item.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Scores `[batch, 1]`: the rating, or its log-odds where the task is binary.
    """
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
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds a deep & cross network: both side by side, joined by a linear layer.

    Args:
        inputs: Vectors and numbers.
        cross_layers: Layers `x0 * (W x + b) + x`, 1 or more.
        projection_dim: Rank of W = U V, or None for the whole matrix.
        hidden_units: Lengths of the MLP's layers; empty: cross layers alone.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    first = flatten_inputs(inputs)
    crossed = first
    for _ in range(cross_layers):
        crossed = keras_rs.layers.FeatureCross(projection_dim=projection_dim)(first, crossed)
    joined = crossed
    if hidden_units:
        hidden = build_mlp(
            first,
            hidden_units,
            activation=activation,
            dropout=dropout,
            batch_normalization=batch_normalization,
        )
        joined = keras.layers.Concatenate()([crossed, hidden])
    return build_output(joined, first_score(base_scores))


def build_final_net(
    inputs: NetworkInputs,
    *,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    second_units: Sequence[int] = SECOND_UNITS,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds FINAL of two blocks, whose logits are averaged.

    Zhu et al. 2023, "FINAL: Factorized Interaction Layer for CTR Prediction", sections 2.1, 2.2;
    without the distillation of section 2.2, by which each block also learns their mean.

    Args:
        inputs: Vectors and numbers.
        hidden_units: Lengths of the first block's layers, even numbers, one or more.
        second_units: Lengths of the second block's layers, likewise; other lengths than the first's
            let the two learn different things.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.

    Raises:
        ConfigError: A block has no layer, or a length that has no halves.
    """
    row, logits = flatten_inputs(inputs), []
    for name, units in (("hidden_units", hidden_units), ("second_units", second_units)):
        if not units or any(size < 2 or size % 2 for size in units):
            raise ConfigError(
                f"model.params.{name} of final_net: each layer multiplies its own halves",
                received=", ".join(map(str, units)) or "no layer",
                allowed="even numbers, one for each layer",
            )
        hidden = row
        for size in units:
            hidden = FactorizedInteraction(size)(hidden)
            hidden = finish_layer(hidden, activation, dropout, batch_normalization)
        logits.append(build_output(hidden, first_score(base_scores)))
    return keras.layers.Average()(logits)


@keras.saving.register_keras_serializable("sluice")
class Bias(keras.layers.Layer):
    """Adds one trained number.

    Args:
        start: Its first value.
    """

    def __init__(self, start: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.start = start

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the number."""
        first = keras.initializers.Constant(self.start)
        self.bias = self.add_weight(shape=(1,), initializer=first, name="bias")

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer was made from."""
        return {**super().get_config(), "start": self.start}

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns `inputs + b`, of the same shape."""
        return inputs + self.bias


@keras.saving.register_keras_serializable("sluice")
class FactorizedInteraction(keras.layers.Layer):
    """A linear map to `u` beside `v`, as `u` beside `u * v`; Zhu et al. 2023, section 2.1.

    Args:
        units: Length of the output, an even number.
    """

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.linear = keras.layers.Dense(units)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the linear map."""
        self.linear.build(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer was made from."""
        return {**super().get_config(), "units": self.units}

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Maps `[batch, width]` to `[batch, units]`."""
        plain, factor = keras.ops.split(self.linear(inputs), 2, axis=-1)
        return keras.ops.concatenate([plain, plain * factor], axis=-1)


@keras.saving.register_keras_serializable("sluice")
class Interactions(keras.layers.Layer):
    """Products of all pairs of fields, summed: (Σ v)² - Σ v², halved, Rendle 2010, lemma 3.1.

    keras-rs has dot products of pairs (`DotInteraction`), at quadratic cost in the fields.
    """

    def call(self, fields: keras.KerasTensor) -> keras.KerasTensor:
        """Maps fields `[batch, fields, dim]` to `[batch, dim]`."""
        total = keras.ops.sum(fields, axis=1)
        squares = keras.ops.sum(keras.ops.square(fields), axis=1)
        return 0.5 * (keras.ops.square(total) - squares)


def build_interactions(inputs: NetworkInputs) -> keras.KerasTensor:
    """Builds the products of all pairs of fields, summed, `[batch, dim]`.

    A vector is a field, and so is each position of a list that keeps them. Of other lists each
    element is one: their sums and sums of squares add up with those of the vectors.

    Raises:
        ConfigError: There are no vectors, or they differ in length.
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
    stacked = None
    if fields:
        stacked = fields[0] if len(fields) == 1 else keras.layers.Concatenate(axis=1)(fields)
    if not inputs.elements:
        return Interactions()(stacked)
    totals, squares = ([inputs[pair[i]] for pair in inputs.elements.values()] for i in (0, 1))
    if stacked is not None:
        totals.append(keras.ops.sum(stacked, axis=1))
        squares.append(keras.ops.sum(keras.ops.square(stacked), axis=1))
    return 0.5 * (keras.ops.square(_add(totals)) - _add(squares))


def _add(tensors: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
    return tensors[0] if len(tensors) == 1 else keras.layers.Add()(list(tensors))


def flatten_inputs(inputs: NetworkInputs) -> keras.KerasTensor:
    """Returns vectors and numbers one beside the other, `[batch, width]`.

    Raises:
        ConfigError: The positions of a list of unknown length are kept.
    """
    return concatenate(flatten_each(inputs))


def flatten_each(inputs: NetworkInputs, without: Sequence[str] = ()) -> list[keras.KerasTensor]:
    """Returns vectors and numbers as `[batch, width]` each, but for some of them.

    Raises:
        ConfigError: The positions of a list of unknown length are kept.
    """
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
