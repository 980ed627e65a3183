"""Layers: multi-layer perceptron, pooling of lists, row normalization, compute precision."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

from conf.schema import PAD_ID
from training.embedding.static_table import EmbeddingTable

_compute_dtype: ContextVar[tf.DType] = ContextVar("compute_dtype", default=tf.float32)


def compute_dtype() -> tf.DType:
    """Returns the type that layers compute in; float32 outside a training step."""
    return _compute_dtype.get()


@contextmanager
def computing_in(dtype: tf.DType) -> Iterator[None]:
    """Lets the layers that are traced in the block compute in a type.

    Args:
        dtype: float32, float16 or bfloat16.
    """
    token = _compute_dtype.set(dtype)
    try:
        yield
    finally:
        _compute_dtype.reset(token)


def matmul_rows(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Dot product of each row of one matrix with each of the other, as float32.

    Args:
        left: float32 `[rows, dim]`.
        right: float32 `[columns, dim]`.

    Returns:
        float32 `[rows, columns]`.
    """
    dtype = compute_dtype()
    product = tf.matmul(tf.cast(left, dtype), tf.cast(right, dtype), transpose_b=True)
    return tf.cast(product, tf.float32)


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


GRADIENT_FLOOR = 1e-2


@tf.custom_gradient
def normalize_rows(
    vectors: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Divides each row by its L2 norm; a row of zeros stays zeros.

    The gradient of `v / |v|` is the part of the upstream gradient at right angles to `v`, divided
    by `|v|`. Near zero, where a user has no history or an id has no trained row, that division
    would blow one row up a millionfold and drown the rest of the batch, so the norm is not taken
    below `GRADIENT_FLOOR` there. It is not cut to zero: such rows could then never be trained.

    Args:
        vectors: float32 `[batch, dim]`.

    Returns:
        float32 `[batch, dim]`.
    """
    unit = tf.math.l2_normalize(vectors, axis=1)
    norms = tf.norm(vectors, axis=1, keepdims=True)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        along = tf.reduce_sum(unit * upstream, axis=1, keepdims=True)
        return (upstream - unit * along) / tf.maximum(norms, GRADIENT_FLOOR)

    return unit, gradient


def pool_mean(
    embeddings: tf.Tensor, ids: tf.Tensor, position_weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Weighted mean over the positions that hold a token.

    Args:
        embeddings: float32 `[batch, length, dim]`; what stands at padded positions is ignored.
        ids: int `[batch, length]`, 0 for padding.
        position_weights: float32 `[length]`, above 0; None weights all positions alike.

    Returns:
        float32 `[batch, dim]`, zeros for rows without a token.
    """
    weights = tf.cast(tf.not_equal(ids, PAD_ID), embeddings.dtype)
    if position_weights is not None:
        weights *= position_weights
    total = tf.reduce_sum(weights, axis=1, keepdims=True)
    weights = tf.math.divide_no_nan(weights, total)
    return _sum_weighted(weights, embeddings)


def pool_rows(
    table: EmbeddingTable, ids: tf.Tensor, position_weights: tf.Tensor | None = None
) -> tf.Tensor:
    """As `pool_mean` of a table's rows, without a copy of a row for each position if possible.

    Args:
        table: Embeds the ids.
        ids: int `[batch, length]`, 0 for padding.
        position_weights: As for `pool_mean`.
    """
    found = None if position_weights is not None else table.find_rows(ids)
    if found is None:
        return pool_mean(table.gather(ids), ids, position_weights)
    mean = tf.sparse.segment_mean(
        found.rows, found.positions, found.segments, num_segments=tf.shape(ids)[0]
    )
    return tf.ensure_shape(mean, [ids.shape[0], table.dim])


@tf.custom_gradient
def _sum_weighted(
    weights: tf.Tensor, embeddings: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
    """Sum over positions of `weights [batch, length]` times `embeddings [batch, length, dim]`.

    A product of matrices, so the weighted embeddings are never stored. The gradient is written
    out: a batched product of a column and a row, which TensorFlow would derive, is about five
    times slower on CPU than multiplying them by broadcasting.
    """
    pooled = tf.squeeze(tf.matmul(weights[:, tf.newaxis, :], embeddings), axis=1)

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        by_weight = tf.squeeze(tf.matmul(embeddings, upstream[:, :, tf.newaxis]), axis=2)
        by_embedding = weights[:, :, tf.newaxis] * upstream[:, tf.newaxis, :]
        return by_weight, by_embedding

    return pooled, gradient


class PositionWeights(tf.Module):
    """Learned weights of list positions: how much the k-th latest item of a history counts.

    Weights are `exp(logit)`, so they stay above 0, and start alike.

    Args:
        name: Name of the weights.
        max_len: Longest list.
    """

    def __init__(self, name: str, max_len: int) -> None:
        super().__init__(name="position_weights")
        self.max_len = max_len
        self.logits = tf.Variable(tf.zeros([max_len]), name=f"{name}/position_logits")

    def __call__(self, length: tf.Tensor | int) -> tf.Tensor:
        """Returns the weights of the first `length <= max_len` positions, float32 `[length]`."""
        return tf.exp(self.logits[:length])
