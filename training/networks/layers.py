"""What models compute with rows: pooling of lists, norms, products in half precision."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from conf.schema import PAD_ID
from training.distribution.strategy import count_replicas, has_gpu
from training.embedding.distinct_rows import BatchRows, spread_rows
from training.embedding.static_table import EmbeddingTable

GRADIENT_FLOOR = 1e-2


def may_cut() -> bool:
    """Returns whether shapes may depend on data.

    Collectives between replicas need equal ones, and a GPU gains nothing by smaller ones.
    """
    return count_replicas() == 1 and not has_gpu()


def matmul_rows(left: tf.Tensor, right: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Dot products of `[rows, dim]` and `[columns, dim]`, computed in `dtype`, as float32."""
    product = tf.matmul(tf.cast(left, dtype), tf.cast(right, dtype), transpose_b=True)
    return tf.cast(product, tf.float32)


@tf.custom_gradient
def normalize_rows(
    vectors: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Divides each row of `[…, dim]` by its L2 norm; a row of zeros stays zeros.

    The gradient is the part of the upstream one at right angles to `v`, divided by `|v|`, or by
    `GRADIENT_FLOOR` near zero: there it would drown the rest of the batch. It is not cut to zero,
    as such rows could then never be trained.
    """
    unit = tf.math.l2_normalize(vectors, axis=-1)
    norms = tf.norm(vectors, axis=-1, keepdims=True)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        along = tf.reduce_sum(unit * upstream, axis=-1, keepdims=True)
        return (upstream - unit * along) / tf.maximum(norms, GRADIENT_FLOOR)

    return unit, gradient


def pool_mean(
    embeddings: tf.Tensor, ids: tf.Tensor, position_weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Mean of the tokens of lists by float32 weights above 0, `[length]`; zeros without a token."""
    is_token = tf.not_equal(ids, PAD_ID)
    weights = tf.cast(is_token, embeddings.dtype)
    if position_weights is not None:
        weights *= position_weights
    total = tf.reduce_sum(weights, axis=1, keepdims=True)
    weights = tf.math.divide_no_nan(weights, total)
    return _sum_weighted(weights, _keep(is_token, embeddings))


def pool_rows(
    table: EmbeddingTable,
    ids: tf.Tensor,
    position_weights: tf.Tensor | None = None,
    rows: BatchRows | None = None,
) -> tf.Tensor:
    """As `pool_mean` of a table's rows, without a copy of a row for each position if possible."""
    found = None if position_weights is not None else table.find_rows(ids, rows)
    if found is None:
        return pool_mean(table.gather(ids, rows), ids, position_weights)
    mean = tf.sparse.segment_mean(
        found.rows, found.positions, found.segments, num_segments=tf.shape(ids)[0]
    )
    return tf.ensure_shape(mean, [ids.shape[0], table.dim])


@tf.custom_gradient
def _sum_weighted(
    weights: tf.Tensor, embeddings: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
    """Sum over positions of `weights [batch, length]` times `embeddings [batch, length, dim]`.

    The gradient that TensorFlow would derive is about five times slower on CPU.
    """
    pooled = tf.squeeze(tf.matmul(weights[:, tf.newaxis, :], embeddings), axis=1)

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        by_weight = tf.squeeze(tf.matmul(embeddings, upstream[:, :, tf.newaxis]), axis=2)
        by_embedding = weights[:, :, tf.newaxis] * upstream[:, tf.newaxis, :]
        return by_weight, by_embedding

    return pooled, gradient


def gather_positions(
    table: EmbeddingTable,
    ids: tf.Tensor,
    source: tf.Tensor | None = None,
    rows: BatchRows | None = None,
) -> tf.Tensor:
    """Returns the row of each position of ids `[batch, length]`; not defined where they are 0.

    `source` is the tensor of the batch that has the same tokens, and other padding behind them.
    """
    found = table.find_rows(ids if source is None else source, rows)
    if found is None:
        return table.gather(ids, rows)
    # The step has each token's row once; padding has none.
    tokens = tf.cast(tf.reshape(tf.not_equal(ids, PAD_ID), [-1]), tf.int32)
    number = tf.cumsum(tokens, exclusive=True) * tokens
    padded = tf.concat([found.positions, [0]], axis=0)  # A batch may hold no token at all.
    none = tf.zeros([1, table.dim])
    known = tf.cond(tf.shape(found.rows)[0] > 0, lambda: found.rows, lambda: none)
    each = spread_rows(known, tf.gather(padded, number))
    shape = tf.concat([tf.shape(ids), [table.dim]], axis=0)
    return tf.ensure_shape(tf.reshape(each, shape), [*ids.shape, table.dim])


def sum_squared_norms(
    table: EmbeddingTable, ids: tf.Tensor, rows: BatchRows | None = None
) -> tf.Tensor:
    """Returns the sum of the squared norms of the rows of ids that are no padding."""
    found = table.find_rows(ids, rows)
    if found is None:
        return tf.reduce_sum(tf.square(table.lookup(ids, rows)))
    norms = tf.reduce_sum(tf.square(found.rows), axis=1)
    return tf.reduce_sum(tf.gather(norms, found.positions))


def combine_positions(
    embeddings: tf.Tensor, ids: tf.Tensor, weights: tf.Tensor | None, combiner: str
) -> tf.Tensor:
    """Combines the positions of lists that hold a token.

    Embeddings are float32 `[batch, length, dim]`, ids int `[batch, length]`, 0 for padding, where
    nothing is read; rows are multiplied by weights, float32 `[batch, length]`, first. Combiners are
    `sum`, `mean` (of the tokens, whatever their weights), `max`, `last` (token): `[batch, dim]`,
    zeros for lists without a token; and `none`: `[batch, length, dim]`, zeros at padded positions.
    """
    is_token = tf.not_equal(ids, PAD_ID)
    if combiner == "last":
        tokens = tf.cast(is_token, tf.int32)
        later = tf.cumsum(tokens, axis=1, exclusive=True, reverse=True)
        is_token, combiner = is_token & tf.equal(later, 0), "sum"
    factors = tf.cast(is_token, embeddings.dtype)
    if combiner in ("sum", "mean"):
        counts = tf.reduce_sum(factors, axis=1, keepdims=True)
        factors = factors if weights is None else _keep(is_token, weights)
        total = _sum_weighted(factors, _keep(is_token, embeddings))
        return total if combiner == "sum" else total / (counts + 1e-8)
    rows = _keep(is_token, embeddings)
    if weights is not None:
        rows *= _keep(is_token, weights)[..., tf.newaxis]
    if combiner == "none":
        return rows
    lowest = (1.0 - factors)[..., tf.newaxis] * 1e9
    has_token = tf.reduce_any(is_token, axis=1, keepdims=True)
    return _keep(has_token[:, 0], tf.reduce_max(rows - lowest, axis=1))


def sum_elements(
    embeddings: tf.Tensor, ids: tf.Tensor, weights: tf.Tensor | None, combiner: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns Σ x v and Σ (x v)² of the elements of lists (Rendle 2010, lemma 3.1).

    Each is float32 `[batch, dim]`, with v the embeddings and x the weights, 1 if None; `mean`
    divides x by the number of tokens.
    """
    rows = combine_positions(embeddings, ids, weights, "none")
    if combiner == "mean":
        is_token = tf.cast(tf.not_equal(ids, PAD_ID), rows.dtype)
        counts = tf.reduce_sum(is_token, axis=1)[:, tf.newaxis, tf.newaxis]
        rows = tf.math.divide_no_nan(rows, counts)
    return tf.reduce_sum(rows, axis=1), tf.reduce_sum(tf.square(rows), axis=1)


def _keep(mask: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns values where a mask is true and zeros elsewhere, even where a value is NaN."""
    if len(values.shape) > len(mask.shape):
        mask = mask[..., tf.newaxis]
    return tf.where(mask, values, tf.zeros_like(values))


class PositionWeights(tf.Module):
    """Learned weights of list positions, `exp(logit)`: they stay above 0, and start alike."""

    def __init__(self, name: str, max_len: int) -> None:
        super().__init__(name="position_weights")
        self.max_len = max_len
        self.logits = tf.Variable(tf.zeros([max_len]), name=f"{name}/position_logits")

    def __call__(self, length: tf.Tensor | int) -> tf.Tensor:
        return tf.exp(self.logits[:length])
