"""Networks over a user's sequence: SASRec, HSTU, GRU, BST's transformer, ComiRec.

A sequence is read as a history holds it, the latest item first, so trained positions stand for how
long ago an item was. The position behind the oldest item stands for the beginning: it is read like
an item whose vector is zero. So the first item is a target too, and each user has a vector.

A network that looks back gives `[batch, length, dim]`: at position k what follows from the items
from k on. Others give `[batch, dim]`, or `[batch, interests, dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from conf.errors import ConfigError
from conf.training.models import BSTConfig, ComiRecConfig, GRUConfig, HSTUConfig, SASRecConfig
from training.networks.network import NetworkInputs
from training.networks.tower import add

_EPSILON = 1e-6
_MASKED_SCORE = -1e4
"""Vanishes in a softmax; float16 holds it."""
TIME_BUCKETS = 128
"""Buckets of the time between two items; one more stands for a time that is not known."""
LOG_BUCKET_WIDTH = 0.301


@dataclass(frozen=True)
class UserSequence:
    """A sequence, the latest item first; masks are bool `[batch, length]`.

    Ages, float32 `[batch, length]`, are seconds from each item to the row's event (of targets), or
    to the latest item; below 0 where that is not known. If they are of targets, a position knows
    when its target was met, the item after it; else when its own item was.
    """

    vectors: keras.KerasTensor  # `[batch, length, dim]`, zeros at padded positions
    is_read: keras.KerasTensor  # the items and the beginning: one position at least
    max_len: int  # a batch may be narrower
    is_item: keras.KerasTensor
    ages: keras.KerasTensor | None = None
    of_targets: bool = False


def read_lists(
    inputs: NetworkInputs, names: Sequence[str]
) -> tuple[list[keras.KerasTensor], keras.KerasTensor, int]:
    """Returns the vectors of lists of one length, where tokens of the first stand, the length."""
    tensors = [inputs[name] for name in names]
    lengths = [inputs.find_length(name) if name in inputs.masks else None for name in names]
    if lengths[0] is None or len(set(lengths)) > 1:
        raise ConfigError(
            "the network reads the positions of a list of ids whose length is known, or of several "
            "of one length",
            received=", ".join(f"{n}: {length}" for n, length in zip(names, lengths, strict=True)),
            fix="name features in model.params that have a vocabulary and one max_len",
        )
    return tensors, inputs[inputs.masks[names[0]]], lengths[0]


def read_sequence(inputs: NetworkInputs, names: Sequence[str]) -> UserSequence:
    """Returns a sequence whose vectors are those of several lists, added up at each position.

    They are multiplied by the root of their length, as trained positions are added to them
    (Vaswani et al. 2017, section 3.4). The list of the items is the first.
    """
    lists, is_item, max_len = read_lists(inputs, names)
    total = add(lists)
    beginning = keras.ops.ones_like(is_item[:, :1])
    is_read = keras.ops.concatenate([beginning, is_item[:, :-1]], axis=1)
    # A layer: Keras takes the product of a tensor and a number for a sparse one.
    scaled = keras.layers.Rescaling(total.shape[-1] ** 0.5)(total)
    return UserSequence(scaled, is_read, max_len, is_item)


def build_sasrec(sequence: UserSequence, config: SASRecConfig) -> keras.KerasTensor:
    """Builds self-attention in which each position reads itself and what came before.

    Kang & McAuley 2018, "Self-attentive sequential recommendation", section III: trained positions,
    blocks that normalize their input (pre-norm), and a normalization at the end.

    Gated blocks are those of LiGR (Borisyuk et al. 2025, section 3.2) as eSASRec has them
    (Tikhonovich et al. 2025): what attention or a feed-forward layer adds to its input x is
    multiplied by `sigmoid(x W + b)`, and the feed-forward layer is `(silu(x W1) * x W2) W3`,
    without biases (Shazeer 2020, "GLU variants improve transformer", equation 6).
    """
    dropout, is_gated = config.dropout, config.block == "ligr"
    hidden = drop(add_positions(sequence, sequence.vectors), dropout)
    mask = LooksBack()(sequence.is_read)
    for _ in range(config.blocks):
        attended = normalize(hidden)
        attention = keras.layers.MultiHeadAttention(
            config.heads,
            hidden.shape[-1] // config.heads,
            dropout=dropout or 0.0,
            kernel_initializer=draw_normal(),
        )
        attended = attention(attended, attended, attention_mask=mask)
        hidden = _add_gated(hidden, drop(attended, dropout), is_gated)
        hidden = _add_gated(hidden, _feed_forward(hidden, dropout, is_gated), is_gated)
    return normalize(hidden)


def _add_gated(
    hidden: keras.KerasTensor, added: keras.KerasTensor, is_gated: bool
) -> keras.KerasTensor:
    """Returns the input of a layer plus what it gives, which a gate on the input may weaken."""
    if is_gated:
        gate = keras.layers.Dense(
            hidden.shape[-1], activation="sigmoid", kernel_initializer=draw_normal()
        )(hidden)
        added = keras.layers.Multiply()([gate, added])
    return keras.layers.Add()([hidden, added])


def _feed_forward(
    hidden: keras.KerasTensor, dropout: float | None, is_gated: bool
) -> keras.KerasTensor:
    def project(length: int, activation: str | None = None) -> keras.layers.Layer:
        draw = draw_normal()
        return keras.layers.Dense(length, activation, not is_gated, kernel_initializer=draw)

    dim, normed = hidden.shape[-1], normalize(hidden)
    if is_gated:
        gates, values = project(4 * dim, "silu")(normed), project(4 * dim)(normed)
        inner = keras.layers.Multiply()([gates, values])
    else:
        inner = project(dim, "relu")(normed)
    return drop(project(dim)(drop(inner, dropout)), dropout)  # Layers draw seeds in this order.


def build_hstu(sequence: UserSequence, config: HSTUConfig) -> keras.KerasTensor:
    """Builds hierarchical sequential transduction units in which each position looks back.

    Zhai et al. 2024, "Actions speak louder than words: trillion-parameter sequential transducers
    for generative recommendations", section 3. With `x` the normalized input of a block:
    `u, v, q, k = silu(x W)`; `a = silu(q k' + b) / n`, masked, where n is the longest length of a
    sequence and b the bias of positions plus that of times; the output is
    `input + drop(norm(a v) * u) W'` (equations 1 to 3). Trained positions are added to the first
    input, as the authors' code does; the biases and their buckets are as there too.
    """
    hidden = drop(add_positions(sequence, sequence.vectors), config.dropout)
    ages = sequence.ages
    buckets = [] if ages is None else [TimeBuckets(sequence.of_targets)(ages)]
    for _ in range(config.blocks):
        dim = hidden.shape[-1]
        parts = keras.layers.Dense(
            4 * dim, activation="silu", use_bias=False, kernel_initializer=draw_normal()
        )(normalize(hidden))
        gates, values, queries, keys = keras.ops.split(parts, 4, axis=-1)
        attention = PointwiseAttention(config.heads, sequence.max_len)
        attended = attention([queries, keys, values, sequence.is_read, *buckets])
        gated = keras.layers.Multiply()([normalize(attended), gates])
        hidden = keras.layers.Add()([hidden, keras.layers.Dense(dim)(drop(gated, config.dropout))])
    return hidden


def build_gru(sequence: UserSequence, config: GRUConfig) -> keras.KerasTensor:
    """Builds gated recurrent units that read a sequence from its beginning (Hidasi et al. 2016)."""
    hidden = sequence.vectors
    units = keras.layers.GRU(
        hidden.shape[-1], return_sequences=True, go_backwards=True, use_cudnn=False
    )
    outputs = units(drop(hidden, config.dropout), mask=sequence.is_read)
    return keras.ops.flip(outputs, axis=1)


def build_bst_encoder(sequence: UserSequence, config: BSTConfig) -> keras.KerasTensor:
    """Builds the transformer of BST (Chen et al. 2019, section 2.2), read at the latest item."""
    hidden = add_positions(sequence, sequence.vectors)
    for _ in range(config.blocks):
        units = 4 * hidden.shape[-1]
        hidden = build_transformer_block(
            hidden, sequence.is_read, config.heads, units, config.dropout
        )
    return hidden[:, 0]


def build_comirec(sequence: UserSequence, config: ComiRecConfig) -> keras.KerasTensor:
    """Builds several vectors of a user, each a weighted mean of the items' vectors.

    Cen et al. 2020, "Controllable multi-interest framework for recommendation", section 3.2.2: with
    the items' vectors as columns of H, `A = softmax(W2' tanh(W1 (H + P)))'` over the items, and the
    interests are the columns of `H A`. P are trained vectors of positions; in the attention H is
    scaled. The beginning is not read: a user without an item has zeros.
    """
    dim = sequence.vectors.shape[-1]
    items = drop(sequence.vectors, config.dropout)
    placed = add_positions(sequence, items)
    # Values as Keras draws them: those of `draw_normal` would make all interests nearly one.
    units = keras.layers.Dense(4 * dim, activation="tanh", use_bias=False)
    scores = keras.layers.Dense(config.interests, use_bias=False)(units(placed))
    is_item = keras.ops.expand_dims(sequence.is_item, 2)
    weights = keras.ops.softmax(keras.ops.where(is_item, scores, _MASKED_SCORE), axis=1)
    vectors = keras.ops.einsum("blk,bld->bkd", weights, items)
    return keras.layers.Rescaling(dim**-0.5)(vectors)


@dataclass(frozen=True)
class SequenceNetwork:
    """A network over a user's sequence.

    A position of one that looks back reads itself and what came before alone, so that each has a
    vector of the user. Rows of like length are computed together if that is worth it (grouped).
    """

    build: Callable[..., keras.KerasTensor]
    looks_back: bool = True
    is_grouped: bool = True


SEQUENCE_NETWORKS: dict[str, SequenceNetwork] = {
    "sasrec": SequenceNetwork(build_sasrec),
    "hstu": SequenceNetwork(build_hstu),
    # A GRU goes over positions one after the other, in each group anew; ComiRec is quick.
    "gru": SequenceNetwork(build_gru, is_grouped=False),
    "bst": SequenceNetwork(build_bst_encoder, looks_back=False),
    "comirec": SequenceNetwork(build_comirec, looks_back=False, is_grouped=False),
}


def build_transformer_block(
    sequence: keras.KerasTensor,
    mask: keras.KerasTensor,
    heads: int,
    units: int,
    dropout: float | None,
) -> keras.KerasTensor:
    """Builds attention and a feed-forward layer, each added to its input and normalized."""
    dim = sequence.shape[-1]
    attention = keras.layers.MultiHeadAttention(heads, max(1, dim // heads))
    attended = attention(sequence, sequence, attention_mask=keras.ops.expand_dims(mask, 1))
    sequence = _add_and_normalize(sequence, attended, dropout)
    hidden = keras.layers.Dense(units, activation="leaky_relu")(sequence)
    return _add_and_normalize(sequence, keras.layers.Dense(dim)(hidden), dropout)


def _add_and_normalize(
    inputs: keras.KerasTensor, outputs: keras.KerasTensor, dropout: float | None
) -> keras.KerasTensor:
    return normalize(keras.layers.Add()([inputs, drop(outputs, dropout)]))


def normalize(hidden: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.LayerNormalization(epsilon=_EPSILON)(hidden)


def drop(hidden: keras.KerasTensor, dropout: float | None) -> keras.KerasTensor:
    return hidden if dropout is None else keras.layers.Dropout(dropout)(hidden)


def draw_normal() -> keras.initializers.Initializer:
    """Returns an initializer of its own for each layer: one that is shared repeats its values."""
    return keras.initializers.RandomNormal(stddev=0.02)


def add_positions(sequence: UserSequence, vectors: keras.KerasTensor) -> keras.KerasTensor:
    return AddPositions(sequence.max_len, draw_normal())(vectors)


class AddPositions(keras.layers.Layer):
    """Adds a trained vector to each position of a sequence; a shorter one has the first vectors.

    With a target the last position has the last vector, however long the sequence is.
    """

    def __init__(
        self, length: int, initializer: Any = "uniform", has_target: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.initializer = keras.initializers.get(initializer)
        self.length, self.has_target = length, has_target

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.positions = self.add_weight(
            shape=(self.length, input_shape[-1]), initializer=self.initializer, name="positions"
        )

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns inputs `[batch, width, dim]` plus the vectors."""
        width, positions = keras.ops.shape(inputs)[1], self.positions
        if not self.has_target:
            return inputs + positions[:width]
        return inputs + keras.ops.concatenate([positions[: width - 1], positions[-1:]])


class LooksBack(keras.layers.Layer):
    """Which positions each one reads: itself, and those of items before, which stand behind it."""

    def call(self, is_read: keras.KerasTensor) -> keras.KerasTensor:
        """Returns bool `[batch, width, width]`."""
        places = keras.ops.arange(keras.ops.shape(is_read)[1])
        return keras.ops.logical_and(is_read[:, None, :], places[None, :] >= places[:, None])

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return (shape[0], shape[1], shape[1])


class TimeBuckets(keras.layers.Layer):
    """Buckets of the time that lies between each two positions of a sequence.

    The bucket of s seconds is `floor(ln(max(s, 1)) / 0.301)`. Times that run backwards count as
    equal ones: bucket 0. `of_targets` is that of `UserSequence`.
    """

    def __init__(self, of_targets: bool, **options: Any) -> None:
        # Ages do not fit into half precision.
        super().__init__(**{**options, "dtype": "float32", "autocast": False})
        self.of_targets = of_targets

    def call(self, ages: keras.KerasTensor) -> keras.KerasTensor:
        """Returns int64 `[batch, length, length]`; `TIME_BUCKETS` where a time is not known."""
        known, asked = ages >= 0, ages
        if self.of_targets:  # The target of position 0 is the row's event itself: 0 seconds ago.
            asked = keras.ops.concatenate([keras.ops.zeros_like(ages[:, :1]), ages[:, :-1]], axis=1)
        between = ages[:, None, :] - asked[:, :, None]
        logs = keras.ops.log(keras.ops.maximum(between, 1.0)) / LOG_BUCKET_WIDTH
        found = keras.ops.minimum(keras.ops.cast(logs, "int64"), TIME_BUCKETS - 1)
        both = keras.ops.logical_and(known[:, None, :], (asked >= 0)[:, :, None])
        return keras.ops.where(both, found, TIME_BUCKETS)


class PointwiseAttention(keras.layers.Layer):
    """Attention whose weights are `silu(q k' + bias) / max_len`; they do not sum to one.

    So the strength of an interest is kept. What is computed of a sequence does not depend on the
    padding behind it.
    """

    def __init__(self, heads: int, max_len: int, **options: Any) -> None:
        super().__init__(**options)
        self.heads, self.max_len = heads, max_len

    def build(self, shapes: Sequence[tuple[int | None, ...]]) -> None:
        self.positions = self.add_weight(
            shape=(self.max_len,), initializer=draw_normal(), name="positions"
        )
        self.times = None
        if len(shapes) > 4:
            self.times = self.add_weight(
                shape=(TIME_BUCKETS,), initializer=draw_normal(), name="times"
            )

    def call(self, inputs: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
        """Returns `[batch, length, dim]`, as queries, keys and values are.

        Behind them stand which positions are read, bool `[batch, length]`, and, if there are times,
        buckets, int64 `[batch, length, length]`.
        """
        queries, keys, values, is_read, *buckets = inputs
        ops, width = keras.ops, keras.ops.shape(queries)[1]
        each = (-1, width, self.heads, queries.shape[-1] // self.heads)
        queries, keys, values = (ops.reshape(part, each) for part in (queries, keys, values))
        logits = ops.einsum("bnhd,bmhd->bhnm", queries, keys)
        places = ops.arange(width, dtype="int64")
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
        return shapes[2]
