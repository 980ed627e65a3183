"""Deep & cross network, version 2 (Wang et al. 2021, "DCN V2", equations 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import keras_rs

from training.networks.factorization import HIDDEN_UNITS, flatten_inputs
from training.networks.network import NetworkInputs
from training.networks.tower import build_mlp


def build_dcn(
    inputs: NetworkInputs,
    *,
    cross_layers: int = 3,
    projection_dim: int | None = None,
    hidden_units: Sequence[int] = HIDDEN_UNITS,
    activation: str = "relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
) -> keras.KerasTensor:
    """Builds cross layers and a perceptron side by side, joined by a linear layer.

    Args:
        inputs: Vectors and numbers.
        cross_layers: Layers `x0 * (W x + b) + x`, 1 or more.
        projection_dim: Rank of W = U V, or None for the whole matrix.
        hidden_units: Lengths of the perceptron's layers; empty: cross layers alone.
        activation: `dice`, `prelu` or the name of a Keras activation.
        dropout: Share of hidden units dropped in training, or None.
        batch_normalization: Whether layers normalize before the activation.

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
    return keras.layers.Dense(1)(joined)
