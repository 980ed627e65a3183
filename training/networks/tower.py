"""MLPs, their activations, and the tower of a two-tower model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from conf.errors import ConfigError, did_you_mean
from conf.training.models import OwnTowerConfig
from training.networks.dice import Dice
from training.networks.network import NetworkInputs, find_read_inputs
from training.networks.user_code import call_function, import_function, pick_parameters


def build_tower(
    inputs: Mapping[str, keras.KerasTensor],
    *,
    hidden_units: Sequence[int],
    output_dim: int,
    l2: float | None = None,
    **layers: Any,
) -> keras.KerasTensor:
    """Builds an MLP over the inputs, one beside the other.

    Args:
        inputs: Inputs `[batch, width]` by name.
        hidden_units: Lengths of the hidden layers.
        output_dim: Length of the vector.
        l2: Weight of the squared norms of all kernels in the loss, or None.
        layers: What `build_mlp` takes: activation, batch normalization, dropout.

    Returns:
        The vector, `[batch, output_dim]`.
    """
    hidden = build_mlp(concatenate(list(inputs.values())), hidden_units, l2=l2, **layers)
    return keras.layers.Dense(output_dim, kernel_regularizer=build_regularizer(l2))(hidden)


def build_own_tower(
    config: OwnTowerConfig, side: str, inputs: NetworkInputs, output_dim: int
) -> keras.KerasTensor:
    """Builds a tower of one's own and checks what comes out.

    Args:
        config: The function and its parameters.
        side: user or item.
        inputs: Its inputs.
        output_dim: Length of the vector; what a parameter of that name is given.

    Returns:
        The vector, `[batch, output_dim]`.

    Raises:
        ConfigError: There is no such function; it takes other parameters, fails, returns something
            else than a vector, or does not read all features of its side.
    """
    path = config.function
    build = import_function(f"{side} tower", path)
    given = pick_parameters(build, {"output_dim": output_dim})
    fault = f"{side} tower {path} cannot be built"
    output = call_function(fault, build, inputs, **config.params, **given)
    shape = getattr(output, "shape", None)
    if not isinstance(output, keras.KerasTensor) or shape != (None, output_dim):
        raise ConfigError(
            f"{side} tower {path} returns something else than a vector for each row",
            received=f"{type(output).__name__} of shape {shape}",
            allowed=f"a Keras tensor of shape (None, {output_dim}), after model.embedding_dim",
            fix="end the tower with keras.layers.Dense(output_dim)",
        )
    read = set(find_read_inputs(inputs, output))
    features = [name for name in inputs if name not in inputs.masks.values()]
    unread = [name for name in features if name not in read]
    if unread:
        kept = ", ".join(name for name in features if name in read)
        raise ConfigError(
            f"{side} tower {path} does not read every feature of its side",
            received=f"it ignores {', '.join(unread)}",
            fix=f"set model.{side}_features=[{kept}], or connect them to the output",
        )
    return output


def build_mlp(
    hidden: keras.KerasTensor,
    units: Sequence[int],
    *,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    l2: float | None = None,
    mask: keras.KerasTensor | None = None,
) -> keras.KerasTensor:
    """Builds hidden layers: dense, batch normalization if asked for, activation, dropout.

    Args:
        hidden: `[batch, width]`, or `[batch, length, width]`, of which each position is mapped.
        units: Lengths of the layers.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of units dropped in training, in (0, 1), or None.
        batch_normalization: Normalizes before the activation, by the batch of all replicas.
        l2: Weight of the kernels' squared norms in the loss, or None.
        mask: Positions whose statistics count, bool `[batch, length]`; with it each replica
            normalizes by its own rows.

    Returns:
        `[batch, units[-1]]`, or `[batch, length, units[-1]]`; `hidden` where there are no layers.
    """
    for size in units:
        hidden = keras.layers.Dense(size, kernel_regularizer=build_regularizer(l2))(hidden)
        hidden = finish_layer(hidden, activation, dropout, batch_normalization, mask)
    return hidden


def finish_layer(
    hidden: keras.KerasTensor,
    activation: str,
    dropout: float | None,
    batch_normalization: bool,
    mask: keras.KerasTensor | None = None,
) -> keras.KerasTensor:
    """Builds what follows the map of a hidden layer; arguments are those of `build_mlp`."""
    if batch_normalization:
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden, mask=mask)
    hidden = activate(hidden, activation, mask)
    return hidden if dropout is None else keras.layers.Dropout(dropout)(hidden)


def build_output(hidden: keras.KerasTensor, start: float) -> keras.KerasTensor:
    """Builds a linear map to one number, `[batch, 1]`, whose bias starts at `start`."""
    first = keras.initializers.Constant(start)
    return keras.layers.Dense(1, bias_initializer=first)(hidden)


def first_score(base_scores: Mapping[str, float] | None) -> float:
    """Returns the score that the output of a network of one task starts at."""
    return next(iter((base_scores or {}).values()), 0.0)


def check_activation(name: str) -> None:
    """Refuses an activation that there is not.

    Raises:
        ConfigError: Keras has none of that name.
    """
    own = ("dice", "prelu")
    known = [key for key, value in vars(keras.activations).items() if inspect.isfunction(value)]
    names = sorted({*own, *known} - {"get", "serialize", "deserialize"})
    if name not in names:
        raise ConfigError(
            "model.activation is none that there is",
            received=name,
            allowed=", ".join(names),
            fix=did_you_mean(name, names),
        )


def build_regularizer(l2: float | None) -> keras.regularizers.Regularizer | None:
    """Returns what adds a kernel's squared norm to the loss, or None."""
    return None if l2 is None else keras.regularizers.L2(l2)


def activate(
    hidden: keras.KerasTensor, activation: str, mask: keras.KerasTensor | None = None
) -> keras.KerasTensor:
    """Applies an activation by its name; arguments as in `build_mlp`."""
    if activation == "dice":
        return Dice()(hidden, tokens=mask)
    if activation == "prelu":  # A slope for each unit, not for each position too.
        return keras.layers.PReLU(shared_axes=list(range(1, len(hidden.shape) - 1)))(hidden)
    return keras.layers.Activation(activation)(hidden)


def concatenate(tensors: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
    """Joins tensors along their last axis; one alone stays as it is."""
    return tensors[0] if len(tensors) == 1 else keras.layers.Concatenate()(list(tensors))
