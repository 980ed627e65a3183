"""DIN's scores of a history by its target, computed for tokens alone (Zhou et al. 2018, 4.3).

Lists of a batch have different lengths: with 9 tokens of 50 a row, four fifths of the positions are
padding. The tokens of all rows are laid one behind the other, so that padding costs no product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from training.networks.layers import has_fixed_shapes
from training.networks.tower import activate, build_mlp, concatenate


def score_tokens(
    history: keras.KerasTensor,
    mask: keras.KerasTensor,
    target: keras.KerasTensor,
    units: Sequence[int],
    activation: str,
) -> keras.KerasTensor:
    """Builds an MLP over `[h, t, h - t, h * t]` of each token h of a history and the target t.

    Args:
        history: `[batch, length, dim]`.
        mask: Where a token stands, bool `[batch, length]`.
        target: `[batch, dim]`.
        units: Lengths of the hidden layers.
        activation: `dice`, `prelu` or the name of a Keras activation, of these layers.

    Returns:
        Scores `[batch, length]`, 0 where no token stands.
    """
    tokens, places = PackTokens()([history, mask])
    rows = places[:, 0]
    every = keras.ops.ones_like(tokens[..., 0], dtype="bool")
    if units:
        first = keras.layers.Dense(units[0])
        first.build((None, 4 * target.shape[-1]))  # Here, so that it has a name of its own.
        hidden = activate(CompareWithTarget(first)([tokens, target, rows]), activation, every)
        hidden = build_mlp(hidden, units[1:], activation=activation, mask=every)
    else:
        each = keras.ops.expand_dims(keras.ops.take(target, rows, axis=0), 0)
        hidden = concatenate([tokens, each, tokens - each, tokens * each])
    scores = keras.layers.Dense(1)(hidden)
    return UnpackTokens()([scores, places, mask])


@keras.saving.register_keras_serializable("sluice")
class PackTokens(keras.layers.Layer):
    """Lays the tokens of all rows one behind the other, as one row without padding."""

    def call(self, inputs: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the tokens, `[1, tokens, dim]`, and where each stands, by rows, `[tokens, 2]`.

        Args:
            inputs: Vectors, `[batch, length, dim]`, and where a token stands, `[batch, length]`.
        """
        vectors, mask = inputs
        places = tf.where(mask)
        return tf.expand_dims(tf.gather_nd(vectors, places), 0), places


@keras.saving.register_keras_serializable("sluice")
class UnpackTokens(keras.layers.Layer):
    """Puts numbers of tokens back to where each token stands."""

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `[batch, length]`, 0 where no token stands.

        Args:
            inputs: A number for each token, `[1, tokens, 1]`; where each stands, `[tokens, 2]`;
                and the mask, `[batch, length]`.
        """
        numbers, places, mask = inputs
        shape = tf.shape(mask, out_type=places.dtype)
        return tf.scatter_nd(places, tf.reshape(numbers, [-1]), shape)

    def compute_output_shape(
        self, shapes: Sequence[tuple[int | None, ...]]
    ) -> tuple[int | None, ...]:
        """Returns the shape."""
        return shapes[2]


@keras.saving.register_keras_serializable("sluice")
class CompareWithTarget(keras.layers.Layer):
    """A dense layer over `[h, t, h - t, h * t]` of each token h and the target t of its row.

    With the kernel in four parts of equal height, `W [h, t, h - t, h * t]` is
    `(W1 + W3) h + W4 (h * t) + (W2 - W3) t`: half of the product, and the last part once a row.

    Args:
        dense: The layer; it is built, for inputs four times as long as a vector.
        options: Those of a Keras layer.
    """

    def __init__(self, dense: keras.layers.Dense, **options: Any) -> None:
        super().__init__(**options)
        self.dense = dense

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `[1, tokens, units]`.

        Args:
            inputs: The tokens, `[1, tokens, dim]`, the targets, `[batch, dim]`, and the row of
                each token, ascending, `[tokens]`.
        """
        ops, (tokens, target, rows) = keras.ops, inputs
        of_position, of_target, of_difference, of_product = ops.split(self.dense.kernel, 4)
        of_row = ops.matmul(target, of_target - of_difference) + self.dense.bias
        both = ops.concatenate([tokens, tokens * take_rows(target, rows)], axis=2)
        kernel = ops.concatenate([of_position + of_difference, of_product])
        return ops.matmul(both, kernel) + take_rows(of_row, rows)

    def compute_output_shape(
        self, shapes: Sequence[tuple[int | None, ...]]
    ) -> tuple[int | None, ...]:
        """Returns the shape."""
        return (*shapes[0][:2], self.dense.units)

    def build(self, shapes: Sequence[tuple[int | None, ...]]) -> None:
        """Makes the weights of a layer that was read from a file."""
        if not self.dense.built:
            self.dense.build((None, 4 * int(shapes[1][-1] or 0)))

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made of."""
        return {**super().get_config(), "dense": keras.saving.serialize_keras_object(self.dense)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompareWithTarget:
        """Returns the layer of what it is made of."""
        dense = keras.saving.deserialize_keras_object(config["dense"])
        return cls(**{**config, "dense": dense})


def take_rows(values: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the row that each token belongs to, `[tokens, dim]`.

    The gradient sums up the tokens of each row. As rows ascend, this takes a third of the time of a
    sum in any order. XLA compiles the latter alone.

    Args:
        values: `[batch, dim]`.
        rows: The row of each token, ascending, `[tokens]`.
    """

    @tf.custom_gradient
    def take(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def sum_by_row(gradient: tf.Tensor) -> tf.Tensor:
            count = tf.shape(values, out_type=rows.dtype)[0]
            if has_fixed_shapes():
                return tf.math.unsorted_segment_sum(gradient, rows, count)
            found = tf.math.segment_sum(gradient, rows)
            return tf.pad(found, [[0, count - tf.shape(found, out_type=rows.dtype)[0]], [0, 0]])

        return tf.gather(values, rows), sum_by_row

    return take(values)
