"""A multi-layer perceptron: hidden layers with ReLU and dropout, then a linear projection."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import tensorflow as tf

from training.layers.precision import compute_dtype


class Dense(tf.Module):
    """Affine map `x W + b`, W uniform after Glorot & Bengio 2010 (eq. 16), b zero.

    Args:
        name: Name; with the seed it fixes the first weights.
        input_dim: Length of the input.
        output_dim: Length of the output.
        seed: Seed of the first weights.
    """

    def __init__(self, name: str, input_dim: int, output_dim: int, *, seed: int) -> None:
        super().__init__(name="dense")
        limit = (6.0 / (input_dim + output_dim)) ** 0.5
        draws = tf.random.stateless_uniform(
            [input_dim, output_dim], [seed, zlib.crc32(name.encode())], -limit, limit
        )
        self.kernel = tf.Variable(draws, name=f"{name}/kernel")
        self.bias = tf.Variable(tf.zeros([output_dim]), name=f"{name}/bias")

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        """Maps `[batch, input_dim]` to `[batch, output_dim]`, in the type of the input."""
        kernel, bias = tf.cast(self.kernel, inputs.dtype), tf.cast(self.bias, inputs.dtype)
        return tf.matmul(inputs, kernel) + bias


class MLP(tf.Module):
    """Hidden layers and a linear output layer.

    Args:
        name: Name of the tower; also seeds its weights apart from other towers'.
        input_dim: Length of the input.
        units: Lengths of the hidden layers; empty: a linear map.
        output_dim: Length of the output.
        seed: Seed of the first weights.
        dropout: Share of hidden units dropped in training, in (0, 1), or None.
    """

    def __init__(
        self,
        name: str,
        input_dim: int,
        units: Sequence[int],
        output_dim: int,
        *,
        seed: int,
        dropout: float | None = None,
    ) -> None:
        super().__init__(name="mlp")
        sizes = [input_dim, *units, output_dim]
        self.layers = [
            Dense(f"{name}/dense_{i}", sizes[i], sizes[i + 1], seed=seed)
            for i in range(len(sizes) - 1)
        ]
        self._dropout = dropout
        self._stream = zlib.crc32(name.encode()) % 2**20  # Towers drop out independently.

    def __call__(self, inputs: tf.Tensor, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Maps `[batch, input_dim]` to `[batch, output_dim]`.

        Args:
            inputs: float32 `[batch, input_dim]`.
            dropout_seed: int32 `[2]` that fixes which units drop out; None outside training.

        Returns:
            float32, whatever the layers between compute in.
        """
        hidden = tf.cast(inputs, compute_dtype())
        for index, layer in enumerate(self.layers[:-1]):
            hidden = tf.nn.relu(layer(hidden))
            if self._dropout is not None and dropout_seed is not None:
                # Stateless: a resumed run drops the same units as one that never stopped.
                seed = dropout_seed + tf.constant([self._stream, index + 1], dropout_seed.dtype)
                hidden = tf.nn.experimental.stateless_dropout(hidden, self._dropout, seed=seed)
        return tf.cast(self.layers[-1](hidden), tf.float32)
