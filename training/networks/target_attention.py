"""Networks that read the positions of a history beside a target: DIN and BST.

For DIN's scores the tokens of all rows are laid one behind the other, so that padding costs no
product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from conf.errors import ConfigError
from training.networks.factorization import flatten_each
from training.networks.network import NetworkInputs
from training.networks.sequences import (
    AddPositions,
    build_transformer_block,
    read_lists,
)
from training.networks.tower import HiddenLayers, activate, add, build_output, concatenate

Names = str | Sequence[str]


def build_din(
    inputs: NetworkInputs,
    *,
    history: Names,
    target: Names,
    attention_units: Sequence[int] = (80, 40),
    attention_activation: str = "dice",
    softmax: bool = False,
    hidden_units: Sequence[int] = (200, 80),
    base_scores: Mapping[str, float] | None = None,
    **layers: Any,
) -> keras.KerasTensor:
    """Builds a deep interest network (Zhou et al. 2018, sections 4.3 and 5.3).

    The history enters as the sum of its positions, weighted by `score_tokens`. With `softmax` the
    scores of a row sum to one; the paper leaves them as they are, so that the sum says how strong
    the interest is. `history` is a list, or several of one length whose vectors are joined.
    """
    vectors, mask, goal, _ = read_history(inputs, history, target)
    scores = score_tokens(vectors, mask, goal, attention_units, attention_activation)
    if softmax:
        scores = keras.layers.Softmax()(scores * vectors.shape[-1] ** -0.5, mask=mask)
    weights = keras.ops.where(mask, scores, 0.0)
    interest = keras.ops.einsum("bt,btd->bd", weights, vectors)
    row = concatenate([*flatten_each(inputs, without=list_names(history)), interest])
    hidden = HiddenLayers(**{"activation": "dice", **layers}).stack(row, hidden_units)
    return build_output(hidden, base_scores)


def build_bst(
    inputs: NetworkInputs,
    *,
    history: Names,
    target: Names,
    gaps: str | None = None,
    blocks: int = 1,
    heads: int = 8,
    feed_forward_units: int | None = None,
    pooling: str = "concat",
    hidden_units: Sequence[int] = (1024, 512, 256),
    dropout: float | None = None,
    base_scores: Mapping[str, float] | None = None,
    **layers: Any,
) -> keras.KerasTensor:
    """Builds a behaviour sequence transformer (Chen et al. 2019, sections 2.1 to 2.3).

    The target is appended to the history; each position is the item's vector plus a learned one
    of the position; transformer blocks follow, and an MLP over their outputs and the other
    features. `gaps` is a list of ids as long as the history whose vectors are added; the MLP takes
    the outputs of all positions (`pooling: concat`), that of the target or the `mean`.
    """
    vectors, mask, goal, max_len = read_history(inputs, history, target, gaps)
    sequence = concatenate([vectors, keras.ops.expand_dims(goal, 1)], axis=1)
    sequence = AddPositions(max_len + 1, has_target=True)(sequence)
    mask = keras.ops.concatenate([mask, keras.ops.ones_like(mask[:, :1])], axis=1)
    units = feed_forward_units or 4 * sequence.shape[-1]
    for _ in range(blocks):
        sequence = build_transformer_block(sequence, mask, heads, units, dropout)
    without = [*list_names(history), *list_names(target), *([gaps] if gaps else [])]
    others = flatten_each(inputs, without=without)
    row = concatenate([*others, _pool_outputs(sequence, mask, pooling, max_len)])
    settings = {"activation": "leaky_relu", **layers, "dropout": dropout}
    hidden = HiddenLayers(**settings).stack(row, hidden_units)
    return build_output(hidden, base_scores)


def _pool_outputs(
    sequence: keras.KerasTensor, mask: keras.KerasTensor, pooling: str, max_len: int
) -> keras.KerasTensor:
    if pooling == "target":
        return sequence[:, -1]
    kept = keras.ops.where(keras.ops.expand_dims(mask, 2), sequence, 0.0)
    if pooling == "concat":
        history = PadPositions(max_len)(kept[:, :-1])
        last = keras.ops.expand_dims(kept[:, -1], 1)
        return keras.layers.Flatten()(concatenate([history, last], axis=1))
    if pooling == "mean":
        counts = keras.ops.sum(keras.ops.cast(mask, kept.dtype), axis=1, keepdims=True)
        return keras.ops.sum(kept, axis=1) / counts
    raise ConfigError(
        "model.params.pooling is not known", received=pooling, allowed="concat, target, mean"
    )


def read_history(
    inputs: NetworkInputs, history: Names, target: Names, gaps: str | None = None
) -> tuple[keras.KerasTensor, keras.KerasTensor, keras.KerasTensor, int]:
    """Returns a history, its mask, the target that it is compared with and the longest length.

    Float `[batch, length, dim]`, zeros at padded positions; bool `[batch, length]`; `[batch, dim]`.
    """
    lists, targets = list_names(history), list_names(target)
    tensors, mask, length = read_lists(inputs, [*lists, *([gaps] if gaps else [])])
    vectors = concatenate(tensors[: len(lists)])
    goal = concatenate([inputs[name] for name in targets])
    if len(goal.shape) != 2 or vectors.shape[-1] != goal.shape[-1]:
        raise ConfigError(
            "a history is compared with its target by vectors of one length",
            received=f"history {', '.join(lists)}: {vectors.shape[-1]} numbers; "
            f"target {', '.join(targets)}: {goal.shape[-1]} numbers",
            fix="name as many targets as lists in model.params, of one embedding dim",
        )
    return add([vectors, *tensors[len(lists) :]]), mask, goal, length


def list_names(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def score_tokens(
    history: keras.KerasTensor,
    mask: keras.KerasTensor,
    target: keras.KerasTensor,
    units: Sequence[int],
    activation: str,
) -> keras.KerasTensor:
    """Builds an MLP over `[h, t, h - t, h * t]` of each token h of a history and the target t.

    Scores are `[batch, length]`, 0 where no token stands.
    """
    tokens, places = PackTokens()([history, mask])
    rows = places[:, 0]
    every = keras.ops.ones_like(tokens[..., 0], dtype="bool")
    first = keras.layers.Dense(units[0] if units else 1)
    first.build((None, 4 * target.shape[-1]))  # Here, so that it has a name of its own.
    scores = CompareWithTarget(first)([tokens, target, rows])
    if units:
        hidden = activate(scores, activation, every)
        hidden = HiddenLayers(activation).stack(hidden, units[1:], every)
        scores = keras.layers.Dense(1)(hidden)
    return UnpackTokens()([scores, places, mask])


class PadPositions(keras.layers.Layer):
    """Fills sequences of any width with zeros up to one length."""

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__(**options)
        self.length = length

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns `[batch, length, dim]` of `[batch, width, dim]`."""
        missing = self.length - keras.ops.shape(inputs)[1]
        padded = keras.ops.pad(inputs, ((0, 0), (0, missing), (0, 0)))
        return keras.ops.reshape(padded, (-1, self.length, inputs.shape[2]))

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return (shape[0], self.length, shape[2])


class PackTokens(keras.layers.Layer):
    """Lays the tokens of all rows one behind the other, without padding."""

    def call(self, inputs: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the tokens, `[tokens, dim]`, and where each stands, by rows, `[tokens, 2]`."""
        vectors, mask = inputs
        places = tf.where(mask)
        return tf.gather_nd(vectors, places), places


class UnpackTokens(keras.layers.Layer):
    """Puts numbers of tokens back to where each token stands."""

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Lays numbers of tokens, `[tokens, 1]`, back to `[batch, length]`, zeros elsewhere."""
        numbers, places, mask = inputs
        shape = tf.shape(mask, out_type=places.dtype)
        return tf.scatter_nd(places, tf.reshape(numbers, [-1]), shape)

    def compute_output_shape(
        self, shapes: Sequence[tuple[int | None, ...]]
    ) -> tuple[int | None, ...]:
        return shapes[2]


class CompareWithTarget(keras.layers.Layer):
    """A dense layer over `[h, t, h - t, h * t]` of each token h and the target t of its row.

    With its kernel in four parts of equal height, `W [h, t, h - t, h * t]` is
    `(W1 + W3) h + W4 (h * t) + (W2 - W3) t`: half of the product, and the last part once a row.
    """

    def __init__(self, dense: keras.layers.Dense, **options: Any) -> None:
        super().__init__(**options)
        self.dense = dense

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns `[tokens, units]` of tokens, targets `[batch, dim]` and the rows of tokens."""
        ops, (tokens, target, rows) = keras.ops, inputs
        of_position, of_target, of_difference, of_product = ops.split(self.dense.kernel, 4)
        of_row = ops.matmul(target, of_target - of_difference) + self.dense.bias
        both = ops.concatenate([tokens, tokens * take_rows(target, rows)], axis=1)
        kernel = ops.concatenate([of_position + of_difference, of_product])
        return ops.matmul(both, kernel) + take_rows(of_row, rows)

    def compute_output_shape(
        self, shapes: Sequence[tuple[int | None, ...]]
    ) -> tuple[int | None, ...]:
        return (shapes[0][0], self.dense.units)


def take_rows(values: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the row that each token belongs to, `[tokens, dim]` of values `[batch, dim]`.

    `rows`, `[tokens]`, ascend: the gradient takes a third of the time of a sum in any order.
    """

    @tf.custom_gradient
    def take(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def sum_by_row(gradient: tf.Tensor) -> tf.Tensor:
            found = tf.math.segment_sum(gradient, rows)
            return tf.pad(found, [[0, tf.shape(values)[0] - tf.shape(found)[0]], [0, 0]])

        return tf.gather(values, rows), sum_by_row

    return take(values)
