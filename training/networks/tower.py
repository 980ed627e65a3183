"""Tower of a two-tower model: the inputs of one side in, one vector out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras


def build_tower(
    inputs: Mapping[str, keras.KerasTensor],
    *,
    hidden_units: Sequence[int],
    output_dim: int,
    dropout: float | None = None,
) -> keras.KerasTensor:
    """Builds a multi-layer perceptron over the inputs, one beside the other.

    Args:
        inputs: Inputs `[batch, width]` by name.
        hidden_units: Lengths of the hidden layers, with relu behind each.
        output_dim: Length of the vector.
        dropout: Share of hidden units dropped in training, or None.

    Returns:
        The vector, `[batch, output_dim]`.
    """
    hidden = build_mlp(concatenate(list(inputs.values())), hidden_units, dropout=dropout)
    return keras.layers.Dense(output_dim)(hidden)


def build_mlp(
    hidden: keras.KerasTensor,
    units: Sequence[int],
    *,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    l2: float | None = None,
) -> keras.KerasTensor:
    """Builds hidden layers: dense, batch normalization if asked for, activation, dropout.

    Args:
        hidden: `[batch, width]`.
        units: Lengths of the layers.
        activation: Name of a Keras activation.
        dropout: Share of units dropped in training, in (0, 1), or None.
        batch_normalization: Normalizes before the activation, by the batch of all replicas.
        l2: Weight of the kernels' squared norms in the loss, or None.

    Returns:
        `[batch, units[-1]]`, or `hidden` where there are no layers.
    """
    regularizer = None if l2 is None else keras.regularizers.L2(l2)
    for size in units:
        hidden = keras.layers.Dense(size, kernel_regularizer=regularizer)(hidden)
        if batch_normalization:
            hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        hidden = keras.layers.Activation(activation)(hidden)
        if dropout is not None:
            hidden = keras.layers.Dropout(dropout)(hidden)
    return hidden


def concatenate(tensors: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
    """Joins tensors along their last axis; one alone stays as it is."""
    return tensors[0] if len(tensors) == 1 else keras.layers.Concatenate()(list(tensors))
