"""HSTU: attention without a softmax over a user's sequence, biased by positions and times.

Zhai et al. 2024, "Actions speak louder than words: trillion-parameter sequential transducers for
generative recommendations", section 3; the biases and their buckets as in the code of its authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from training.networks.attention import AddPositions
from training.networks.sequences import UserSequence, draw_normal, drop, normalize

TIME_BUCKETS = 128
"""Buckets of the time between two items; one more stands for a time that is not known."""
LOG_BUCKET_WIDTH = 0.301


@dataclass(frozen=True)
class SequenceTimes:
    """When the items of a sequence were met.

    Attributes:
        ages: Seconds from each item to the row's event, or to the latest item; float32
            `[batch, length]`, below 0 where it is not known.
        of_targets: Whether ages count back from the row's event. A position then knows when its
            target was met, the item after it; else when its own item was.
    """

    ages: keras.KerasTensor
    of_targets: bool


def build_hstu(
    sequence: UserSequence,
    times: SequenceTimes | None = None,
    *,
    blocks: int = 2,
    heads: int = 1,
    dropout: float | None = None,
) -> keras.KerasTensor:
    """Builds hierarchical sequential transduction units in which each position looks back.

    With `x` the normalized input of a block: `u, v, q, k = silu(x W)`;
    `a = silu(q k' + b) / n`, masked, where n is the longest length of a sequence and b the bias of
    positions plus that of times; the output is `input + drop(norm(a v) * u) W'` (equations 1 to 3).
    Trained positions are added to the first input, as the authors' code does.

    Args:
        sequence: The sequence.
        times: When its items were met; None: positions alone.
        blocks: Blocks, one behind the other.
        heads: Heads of attention; they divide the length of a vector.
        dropout: Share of the inputs, and of the gated outputs of blocks, dropped in training; or
            None.

    Returns:
        `[batch, length, dim]`, as `build_sasrec` does, without a normalization at the end.
    """
    positions = AddPositions(draw_normal(), length=sequence.max_len)
    hidden = drop(positions(sequence.vectors), dropout)
    buckets = [] if times is None else [TimeBuckets(times.of_targets)(times.ages)]
    for _ in range(blocks):
        dim = hidden.shape[-1]
        parts = keras.layers.Dense(
            4 * dim, activation="silu", use_bias=False, kernel_initializer=draw_normal()
        )(normalize(hidden))
        gates, values, queries, keys = keras.ops.split(parts, 4, axis=-1)
        attention = PointwiseAttention(heads, sequence.max_len)
        attended = attention([queries, keys, values, sequence.is_read, *buckets])
        gated = keras.layers.Multiply()([normalize(attended), gates])
        hidden = keras.layers.Add()([hidden, keras.layers.Dense(dim)(drop(gated, dropout))])
    return hidden


@keras.saving.register_keras_serializable("sluice")
class TimeBuckets(keras.layers.Layer):
    """Buckets of the time that lies between each two positions of a sequence.

    The bucket of s seconds is `floor(ln(max(s, 1)) / 0.301)`. Times that run backwards count as
    equal ones: bucket 0.

    Args:
        of_targets: As of `SequenceTimes`.
        options: Those of a Keras layer.
    """

    def __init__(self, of_targets: bool, **options: Any) -> None:
        # Ages do not fit into half precision.
        super().__init__(**{**options, "dtype": "float32", "autocast": False})
        self.of_targets = of_targets

    def call(self, ages: keras.KerasTensor) -> keras.KerasTensor:
        """Returns int32 `[batch, length, length]`; `TIME_BUCKETS` where a time is not known.

        Args:
            ages: Seconds, float32 `[batch, length]`, below 0 where they are not known.
        """
        known, asked = ages >= 0, ages
        if self.of_targets:  # The target of position 0 is the row's event itself: 0 seconds ago.
            asked = keras.ops.concatenate([keras.ops.zeros_like(ages[:, :1]), ages[:, :-1]], axis=1)
        between = ages[:, None, :] - asked[:, :, None]
        logs = keras.ops.log(keras.ops.maximum(between, 1.0)) / LOG_BUCKET_WIDTH
        found = keras.ops.minimum(keras.ops.cast(logs, "int32"), TIME_BUCKETS - 1)
        both = keras.ops.logical_and(known[:, None, :], (asked >= 0)[:, :, None])
        return keras.ops.where(both, found, TIME_BUCKETS)

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made of."""
        return {**super().get_config(), "of_targets": self.of_targets}


@keras.saving.register_keras_serializable("sluice")
class PointwiseAttention(keras.layers.Layer):
    """Attention whose weights are `silu(q k' + bias) / max_len`; they do not sum to one.

    So the strength of an interest is kept: how much a history holds of it. What is computed of a
    sequence does not depend on the padding behind it.

    Args:
        heads: Heads; they divide the length of a vector.
        max_len: Longest length of a sequence.
        options: Those of a Keras layer.
    """

    def __init__(self, heads: int, max_len: int, **options: Any) -> None:
        super().__init__(**options)
        self.heads, self.max_len = heads, max_len

    def build(self, shapes: Sequence[tuple[int | None, ...]]) -> None:
        """Makes the biases: of positions, and of times where there are buckets of them."""
        self.positions = self.add_weight(
            shape=(self.max_len,), initializer=draw_normal(), name="positions"
        )
        self.times = None
        if len(shapes) > 4:
            self.times = self.add_weight(
                shape=(TIME_BUCKETS,), initializer=draw_normal(), name="times"
            )

    def call(self, inputs: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
        """Returns `[batch, length, dim]`.

        Args:
            inputs: Queries, keys and values `[batch, length, dim]`, which positions are read, bool
                `[batch, length]`, and, if there are times, buckets int32 `[batch, length, length]`.
        """
        queries, keys, values, is_read, *buckets = inputs
        ops, width = keras.ops, keras.ops.shape(queries)[1]
        each = (-1, width, self.heads, queries.shape[-1] // self.heads)
        queries, keys, values = (ops.reshape(part, each) for part in (queries, keys, values))
        logits = ops.einsum("bnhd,bmhd->bhnm", queries, keys)
        places = ops.arange(width)
        distances = places[None, :] - places[:, None]  # How many items before.
        bias = ops.take(self.positions, ops.maximum(distances, 0))[None]
        if self.times is not None:
            none = ops.zeros([1], self.times.dtype)
            bias = bias + ops.take(ops.concatenate([self.times, none]), buckets[0])
        weights = ops.silu(logits + ops.cast(bias, logits.dtype)[:, None]) / self.max_len
        kept = ops.logical_and(is_read[:, None, :], (distances >= 0)[None])[:, None]
        weights = ops.where(kept, weights, ops.zeros_like(weights))
        found = ops.einsum("bhnm,bmhd->bnhd", weights, values)
        return ops.reshape(found, (-1, width, self.heads * each[-1]))

    def compute_output_shape(self, shapes: Sequence[tuple[int | None, ...]]) -> Any:
        """Returns the shape of the values."""
        return shapes[2]

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made of."""
        return {**super().get_config(), "heads": self.heads, "max_len": self.max_len}
