"""Networks that read the positions of a history beside a target: DIN and BST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from conf.errors import ConfigError
from training.networks.factorization import flatten_each
from training.networks.network import NetworkInputs
from training.networks.target_attention import score_tokens
from training.networks.tower import build_mlp, build_output, concatenate, first_score

Names = str | Sequence[str]


@dataclass(frozen=True)
class History:
    """A history and the target that it is compared with.

    Attributes:
        vectors: `[batch, length, dim]`, zeros at padded positions.
        mask: Where a token stands, bool `[batch, length]`.
        target: `[batch, dim]`.
        max_len: Longest length of a history; a batch may be narrower.
    """

    vectors: keras.KerasTensor
    mask: keras.KerasTensor
    target: keras.KerasTensor
    max_len: int


def build_din(
    inputs: NetworkInputs,
    *,
    history: Names,
    target: Names,
    attention_units: Sequence[int] = (80, 40),
    attention_activation: str = "dice",
    softmax: bool = False,
    hidden_units: Sequence[int] = (200, 80),
    activation: str = "dice",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds a deep interest network (Zhou et al. 2018, sections 4.3 and 5.3).

    An MLP over `[h, t, h - t, h * t]` scores each position h of the history by the target t;
    the history enters as the sum of its positions, weighted by their scores.

    Args:
        inputs: Vectors and numbers.
        history: A list of ids, or several of one length whose vectors are joined.
        target: The feature that the history is compared with, or as many as `history` names.
        attention_units: Lengths of the hidden layers of the MLP that scores positions.
        attention_activation: `dice`, `prelu` or the name of a Keras activation.
        softmax: Whether the scores of a row sum to one; the paper leaves them as they are, so
            that the sum says how strong the interest is.
        hidden_units: Lengths of the hidden layers over the whole row.
        activation: As `attention_activation`, of these layers.
        dropout: Share of their units dropped in training, or None.
        batch_normalization: Whether these layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    read = read_history(inputs, history, target)
    layers = (attention_units, attention_activation)
    scores = score_tokens(read.vectors, read.mask, read.target, *layers)
    if softmax:
        scale = read.vectors.shape[-1] ** -0.5
        scores = keras.layers.Softmax()(scores * scale, mask=read.mask)
    weights = keras.ops.where(read.mask, scores, 0.0)
    interest = keras.ops.einsum("bt,btd->bd", weights, read.vectors)
    hidden = build_mlp(
        concatenate([*flatten_each(inputs, without=list_names(history)), interest]),
        hidden_units,
        activation=activation,
        dropout=dropout,
        batch_normalization=batch_normalization,
    )
    return build_output(hidden, first_score(base_scores))


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
    activation: str = "leaky_relu",
    dropout: float | None = None,
    batch_normalization: bool = False,
    base_scores: Mapping[str, float] | None = None,
) -> keras.KerasTensor:
    """Builds a behaviour sequence transformer (Chen et al. 2019, sections 2.1 to 2.3).

    The target is appended to the history; each position is the item's vector plus a learned one
    of the position; transformer blocks follow, and an MLP over their outputs and the other
    features.

    Args:
        inputs: Vectors and numbers.
        history: A list of ids of a known length, or several whose vectors are joined.
        target: The feature that is appended, or as many as `history` names.
        gaps: A list of ids as long as the history, such as buckets of the time to the event;
            their vectors are added to those of the history.
        blocks: Transformer blocks.
        heads: Heads of attention.
        feed_forward_units: Length of the hidden layer in a block; None: four times that of a
            position.
        pooling: `concat`: the outputs of all positions; `target`: that of the target; `mean`.
        hidden_units: Lengths of the hidden layers over the whole row.
        activation: `dice`, `prelu` or the name of a Keras activation, of these layers.
        dropout: Share of units dropped in training, in blocks and hidden layers, or None.
        batch_normalization: Whether the hidden layers normalize before the activation.
        base_scores: Score of a constant for each task, where training starts; Sluice sets it.

    Returns:
        Logits `[batch, 1]`.
    """
    read = read_history(inputs, history, target, gaps)
    last = keras.ops.expand_dims(read.target, 1)
    sequence = keras.layers.Concatenate(axis=1)([read.vectors, last])
    sequence = AddPositions(length=read.max_len + 1, has_target=True)(sequence)
    always = keras.ops.ones_like(read.mask[:, :1])
    mask = keras.ops.concatenate([read.mask, always], axis=1)
    units = feed_forward_units or 4 * sequence.shape[-1]
    for _ in range(blocks):
        sequence = build_transformer_block(sequence, mask, heads, units, dropout)
    without = [*list_names(history), *list_names(target), *([gaps] if gaps else [])]
    others = flatten_each(inputs, without=without)
    hidden = build_mlp(
        concatenate([*others, pool_outputs(sequence, mask, pooling, read.max_len)]),
        hidden_units,
        activation=activation,
        dropout=dropout,
        batch_normalization=batch_normalization,
    )
    return build_output(hidden, first_score(base_scores))


def build_transformer_block(
    sequence: keras.KerasTensor,
    mask: keras.KerasTensor,
    heads: int,
    units: int,
    dropout: float | None = None,
) -> keras.KerasTensor:
    """Builds attention and a feed-forward layer, each added to its input and normalized.

    Args:
        sequence: `[batch, length, dim]`.
        mask: Positions that are attended to, bool `[batch, length]`.
        heads: Heads of attention, of `dim / heads` numbers each.
        units: Length of the feed-forward layer's hidden layer.
        dropout: Share of both outputs dropped in training, or None.

    Returns:
        `[batch, length, dim]`; what stands at positions that the mask leaves out is not defined.
    """
    dim = sequence.shape[-1]
    attention = keras.layers.MultiHeadAttention(heads, max(1, dim // heads))
    attended = attention(sequence, sequence, attention_mask=keras.ops.expand_dims(mask, 1))
    sequence = _add_and_normalize(sequence, attended, dropout)
    hidden = keras.layers.Dense(units, activation="leaky_relu")(sequence)
    return _add_and_normalize(sequence, keras.layers.Dense(dim)(hidden), dropout)


def _add_and_normalize(
    inputs: keras.KerasTensor, outputs: keras.KerasTensor, dropout: float | None
) -> keras.KerasTensor:
    if dropout is not None:
        outputs = keras.layers.Dropout(dropout)(outputs)
    total = keras.layers.Add()([inputs, outputs])
    return keras.layers.LayerNormalization(epsilon=1e-6)(total)


def pool_outputs(
    sequence: keras.KerasTensor, mask: keras.KerasTensor, pooling: str, max_len: int
) -> keras.KerasTensor:
    """Returns the outputs of a transformer's positions as one vector, `[batch, width]`.

    Args:
        sequence: Outputs of the history, and that of the target behind them.
        mask: Positions that are read.
        pooling: `target`, `concat` or `mean`.
        max_len: Longest length of a history.

    Raises:
        ConfigError: There is no such pooling.
    """
    if pooling == "target":
        return sequence[:, -1]
    kept = keras.ops.where(keras.ops.expand_dims(mask, 2), sequence, 0.0)
    if pooling == "concat":
        history = PadPositions(max_len)(kept[:, :-1])
        last = keras.ops.expand_dims(kept[:, -1], 1)
        return keras.layers.Flatten()(keras.layers.Concatenate(axis=1)([history, last]))
    if pooling == "mean":
        counts = keras.ops.sum(keras.ops.cast(mask, kept.dtype), axis=1, keepdims=True)
        return keras.ops.sum(kept, axis=1) / counts
    raise ConfigError(
        "model.params.pooling is not known",
        received=pooling,
        allowed="concat, target, mean",
    )


def read_history(
    inputs: NetworkInputs, history: Names, target: Names, gaps: str | None = None
) -> History:
    """Returns the vectors of a history and its target.

    Raises:
        ConfigError: They are not lists and as many scalars, or their vectors or lengths differ.
    """
    lists, targets = list_names(history), list_names(target)
    added = [gaps] if gaps else []
    for name in (*lists, *added):
        check_positions(inputs, name)
    widths = {name: inputs.find_length(name) for name in lists}
    if len(set(widths.values())) > 1:
        raise ConfigError(
            "the lists of a history need one length",
            received=", ".join(f"{name}: {width}" for name, width in widths.items()),
            fix="build them with one max_len",
        )
    vectors = concatenate([inputs[name] for name in lists])
    goal = concatenate([inputs[name] for name in targets])
    if len(goal.shape) != 2 or vectors.shape[-1] != goal.shape[-1]:
        raise ConfigError(
            "a history is compared with its target by vectors of one length",
            received=f"history {', '.join(lists)}: {vectors.shape[-1]} numbers; "
            f"target {', '.join(targets)}: {goal.shape[-1]} numbers",
            fix="name as many targets as lists in model.params, of one embedding dim",
        )
    lengths = {
        name: (inputs.find_length(name), inputs[name].shape[2]) for name in (lists[0], *added)
    }
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            "the gaps of a history need a vector as long as the history's for each position",
            received=", ".join(f"{name}: {shape}" for name, shape in lengths.items()),
            fix="build both lists with one max_len, and give their tables one dim",
        )
    if gaps:
        vectors = keras.layers.Add()([vectors, inputs[gaps]])
    mask, length = inputs[inputs.masks[lists[0]]], inputs.find_length(lists[0])
    return History(vectors, mask, goal, int(length or 0))


def check_positions(inputs: NetworkInputs, name: str) -> None:
    """Refuses what is no list of a known length whose positions are read.

    Raises:
        ConfigError: The feature is something else.
    """
    tensor = inputs[name]
    if name not in inputs.masks or inputs.find_length(name) is None:
        raise ConfigError(
            "the network reads the positions of a list of ids whose length is known",
            received=f"{name}: inputs of shape {tensor.shape[1:]}",
            allowed="a list feature with a vocabulary and a max_len",
            fix="name such a feature in model.params, or build it with a max_len",
        )


def list_names(names: Names) -> list[str]:
    """Returns one name or several as a list."""
    return [names] if isinstance(names, str) else list(names)


@keras.saving.register_keras_serializable("sluice")
class AddPositions(keras.layers.Layer):
    """Adds a trained vector to each position of a sequence; a shorter one has the first vectors.

    Args:
        initializer: Of the vectors, as Keras names it.
        length: Longest length of a sequence.
        has_target: Whether the last position is that of a target, however long the sequence is:
            it has the last vector.
        options: Those of a Keras layer.
    """

    def __init__(
        self,
        initializer: Any = "uniform",
        *,
        length: int,
        has_target: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.initializer = keras.initializers.get(initializer)
        self.length, self.has_target = length, has_target

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the vectors."""
        self.positions = self.add_weight(
            shape=(self.length, input_shape[-1]), initializer=self.initializer, name="positions"
        )

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns inputs `[batch, width, dim]` plus the vectors."""
        width, positions = keras.ops.shape(inputs)[1], self.positions
        if not self.has_target:
            return inputs + positions[:width]
        return inputs + keras.ops.concatenate([positions[: width - 1], positions[-1:]])

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made of."""
        own = {"length": self.length, "has_target": self.has_target}
        initializer = keras.initializers.serialize(self.initializer)
        return {**super().get_config(), "initializer": initializer, **own}


@keras.saving.register_keras_serializable("sluice")
class PadPositions(keras.layers.Layer):
    """Fills sequences of any width with zeros up to one length.

    Args:
        length: The length.
        options: Those of a Keras layer.
    """

    def __init__(self, length: int, **options: Any) -> None:
        super().__init__(**options)
        self.length = length

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns `[batch, length, dim]` of `[batch, width, dim]`."""
        missing = self.length - keras.ops.shape(inputs)[1]
        padded = keras.ops.pad(inputs, ((0, 0), (0, missing), (0, 0)))
        return keras.ops.reshape(padded, (-1, self.length, inputs.shape[2]))

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape."""
        return (shape[0], self.length, shape[2])

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made of."""
        return {**super().get_config(), "length": self.length}
