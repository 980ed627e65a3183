"""Networks over a user's sequence alone: SASRec, BST's transformer, recurrent units, ComiRec.

A sequence is read as a history holds it, the latest item first: position k is the item k before the
latest, so trained positions stand for how long ago an item was, however long the sequence is. The
position behind the oldest item stands for the beginning: it is read like an item whose vector is
zero. So the first item of a sequence is a target too, and a user without a history has a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import keras

from conf.errors import ConfigError
from training.networks.attention import AddPositions, build_transformer_block, check_positions
from training.networks.network import NetworkInputs

_EPSILON = 1e-6
_MASKED_SCORE = -1e4
"""Vanishes in a softmax; float16 holds it."""


@dataclass(frozen=True)
class UserSequence:
    """A sequence, the latest item first.

    Attributes:
        vectors: `[batch, length, dim]`, zeros at padded positions.
        is_read: Positions that are read: the items, and the one that stands for the beginning;
            bool `[batch, length]`. Each row has one at least.
        max_len: Longest length of a sequence; a batch may be narrower.
        is_item: Where an item stands, bool `[batch, length]`.
    """

    vectors: keras.KerasTensor
    is_read: keras.KerasTensor
    max_len: int
    is_item: keras.KerasTensor


def read_sequence(inputs: NetworkInputs, names: Sequence[str]) -> UserSequence:
    """Returns a sequence whose vectors are those of several lists, added up at each position.

    They are multiplied by the root of their length, as trained positions are added to them
    (Vaswani et al. 2017, section 3.4).

    Args:
        inputs: Vectors of lists whose positions are kept.
        names: The lists, that of the items first.

    Raises:
        ConfigError: Something is no such list, or their lengths or those of their vectors differ.
    """
    for name in names:
        check_positions(inputs, name)
    shapes = {name: (inputs.find_length(name), inputs[name].shape[2]) for name in names}
    if len(set(shapes.values())) > 1:
        raise ConfigError(
            "the lists of a sequence need one length, and vectors of one length",
            received=", ".join(f"{name}: {shape}" for name, shape in shapes.items()),
            fix="build them with one max_len, and give their tables one dim",
        )
    lists = [inputs[name] for name in names]
    total = keras.layers.Add()(lists) if len(lists) > 1 else lists[0]
    is_item = inputs[inputs.masks[names[0]]]
    beginning = keras.ops.ones_like(is_item[:, :1])
    is_read = keras.ops.concatenate([beginning, is_item[:, :-1]], axis=1)
    # A layer: Keras takes the product of a tensor and a number for a sparse one.
    scaled = keras.layers.Rescaling(total.shape[-1] ** 0.5)(total)
    return UserSequence(scaled, is_read, int(inputs.find_length(names[0]) or 0), is_item)


def build_sasrec(
    sequence: UserSequence,
    *,
    blocks: int = 2,
    heads: int = 1,
    feed_forward_units: int | None = None,
    dropout: float | None = None,
    is_gated: bool = False,
) -> keras.KerasTensor:
    """Builds self-attention in which each position reads itself and what came before.

    Kang & McAuley 2018, "Self-attentive sequential recommendation", section III: trained positions,
    blocks that normalize their input (pre-norm), and a normalization at the end.

    Gated blocks are those of LiGR (Borisyuk et al. 2025, "From features to transformers: redefining
    ranking for scalable impact", section 3.2) as eSASRec has them (Tikhonovich et al. 2025): what
    attention or a feed-forward layer adds to its input x is multiplied by `sigmoid(x W + b)`, and
    the feed-forward layer is `(silu(x W1) * x W2) W3`, without biases (Shazeer 2020, "GLU variants
    improve transformer", equation 6).

    Args:
        sequence: The sequence.
        blocks: Blocks of attention and feed-forward layer.
        heads: Heads of attention; they divide the length of a vector.
        feed_forward_units: Length of the hidden layer in a block; None: that of a vector, of gated
            blocks four times that.
        dropout: Share of numbers dropped in training: inputs, attention, hidden units and outputs
            of layers; or None.
        is_gated: Whether the blocks are those of LiGR.

    Returns:
        `[batch, length, dim]`: at position k what follows from the items from k on; what stands at
        positions that are not read is not defined.
    """
    positions = AddPositions(draw_normal(), length=sequence.max_len)
    hidden = drop(positions(sequence.vectors), dropout)
    mask = LooksBack()(sequence.is_read)
    for _ in range(blocks):
        attended = normalize(hidden)
        attention = keras.layers.MultiHeadAttention(
            heads,
            hidden.shape[-1] // heads,
            dropout=dropout or 0.0,
            kernel_initializer=draw_normal(),
        )
        attended = attention(attended, attended, attention_mask=mask)
        hidden = _add(hidden, drop(attended, dropout), is_gated)
        units = feed_forward_units or (4 if is_gated else 1) * hidden.shape[-1]
        feed_forward = _swiglu if is_gated else _feed_forward
        hidden = _add(hidden, feed_forward(hidden, units, dropout), is_gated)
    return normalize(hidden)


def build_gru(
    sequence: UserSequence, *, layers: int = 1, dropout: float | None = None
) -> keras.KerasTensor:
    """Builds gated recurrent units that read a sequence from its beginning.

    Hidasi et al. 2016, "Session-based recommendations with recurrent neural networks".

    Args:
        sequence: The sequence.
        layers: Layers, one over the other.
        dropout: Share of the inputs of each layer dropped in training, or None.

    Returns:
        `[batch, length, dim]`, as `build_sasrec` does.
    """
    hidden = sequence.vectors
    for _ in range(layers):
        units = keras.layers.GRU(hidden.shape[-1], return_sequences=True, go_backwards=True)
        outputs = units(drop(hidden, dropout), mask=sequence.is_read)
        hidden = keras.ops.flip(outputs, axis=1)
    return hidden


def build_bst_encoder(
    sequence: UserSequence,
    *,
    blocks: int = 1,
    heads: int = 8,
    feed_forward_units: int | None = None,
    dropout: float | None = None,
) -> keras.KerasTensor:
    """Builds the transformer of BST (Chen et al. 2019, section 2.2) over a sequence alone.

    Every position reads all others: the one that stands for the user is that of the latest item.

    Args:
        sequence: The sequence.
        blocks: Transformer blocks.
        heads: Heads of attention; they divide the length of a vector.
        feed_forward_units: Length of the hidden layer in a block; None: four times that of a
            vector.
        dropout: Share of the outputs of layers dropped in training, or None.

    Returns:
        `[batch, dim]`.
    """
    hidden = AddPositions(draw_normal(), length=sequence.max_len)(sequence.vectors)
    for _ in range(blocks):
        units = feed_forward_units or 4 * hidden.shape[-1]
        hidden = build_transformer_block(hidden, sequence.is_read, heads, units, dropout)
    return hidden[:, 0]


@keras.saving.register_keras_serializable("sluice")
class LooksBack(keras.layers.Layer):
    """Which positions each one reads: itself, and those of items before, which stand behind it."""

    def call(self, is_read: keras.KerasTensor) -> keras.KerasTensor:
        """Returns bool `[batch, width, width]`.

        Args:
            is_read: As of `UserSequence`.
        """
        places = keras.ops.arange(keras.ops.shape(is_read)[1])
        return keras.ops.logical_and(is_read[:, None, :], places[None, :] >= places[:, None])

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape."""
        return (shape[0], shape[1], shape[1])


def build_comirec(
    sequence: UserSequence,
    *,
    interests: int = 4,
    attention_units: int | None = None,
    dropout: float | None = None,
) -> keras.KerasTensor:
    """Builds several vectors of a user, each a weighted mean of the items' vectors.

    Cen et al. 2020, "Controllable multi-interest framework for recommendation", section 3.2.2: with
    the items' vectors as columns of H, `A = softmax(W2' tanh(W1 (H + P)))'` over the items, and the
    interests are the columns of `H A`. P are trained vectors of positions; in the attention H is
    scaled as in all networks of sequences. The beginning is no item, and is not read.

    Args:
        sequence: The sequence.
        interests: Number of vectors.
        attention_units: Rows of W1; None: four times the length of a vector.
        dropout: Share of the numbers of H dropped in training, or None.

    Returns:
        `[batch, interests, dim]`; zeros of a user without an item.
    """
    dim = sequence.vectors.shape[-1]
    items = drop(sequence.vectors, dropout)
    placed = AddPositions(draw_normal(), length=sequence.max_len)(items)
    # Values as Keras draws them: those of `draw_normal` would make all interests nearly one.
    units = keras.layers.Dense(attention_units or 4 * dim, activation="tanh", use_bias=False)
    scores = keras.layers.Dense(interests, use_bias=False)(units(placed))
    is_item = keras.ops.expand_dims(sequence.is_item, 2)
    weights = keras.ops.softmax(keras.ops.where(is_item, scores, _MASKED_SCORE), axis=1)
    vectors = keras.ops.einsum("blk,bld->bkd", weights, items)
    return keras.layers.Rescaling(dim**-0.5)(vectors)


def _add(hidden: keras.KerasTensor, added: keras.KerasTensor, is_gated: bool) -> keras.KerasTensor:
    """Returns the input of a layer plus what it gives, which a gate on the input may weaken."""
    if is_gated:
        gate = keras.layers.Dense(
            hidden.shape[-1], activation="sigmoid", kernel_initializer=draw_normal()
        )(hidden)
        added = keras.layers.Multiply()([gate, added])
    return keras.layers.Add()([hidden, added])


def _swiglu(hidden: keras.KerasTensor, units: int, dropout: float | None) -> keras.KerasTensor:
    def project(length: int, activation: str | None = None) -> keras.layers.Layer:
        return keras.layers.Dense(
            length, activation=activation, use_bias=False, kernel_initializer=draw_normal()
        )

    normed = normalize(hidden)
    product = keras.layers.Multiply()([project(units, "silu")(normed), project(units)(normed)])
    return drop(project(hidden.shape[-1])(drop(product, dropout)), dropout)


def _feed_forward(
    hidden: keras.KerasTensor, units: int, dropout: float | None
) -> keras.KerasTensor:
    dim = hidden.shape[-1]
    first = keras.layers.Dense(units, activation="relu", kernel_initializer=draw_normal())
    last = keras.layers.Dense(dim, kernel_initializer=draw_normal())
    return drop(last(drop(first(normalize(hidden)), dropout)), dropout)


def normalize(hidden: keras.KerasTensor) -> keras.KerasTensor:
    """Returns each position with mean 0 and deviation 1, then scaled and moved as is trained."""
    return keras.layers.LayerNormalization(epsilon=_EPSILON)(hidden)


def drop(hidden: keras.KerasTensor, dropout: float | None) -> keras.KerasTensor:
    """Returns numbers of which training sets a share to zero; None: all stay."""
    return hidden if dropout is None else keras.layers.Dropout(dropout)(hidden)


def draw_normal() -> keras.initializers.Initializer:
    """Returns an initializer of its own for each layer: one that is shared repeats its values."""
    return keras.initializers.RandomNormal(stddev=0.02)
