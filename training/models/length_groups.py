"""Rows of like length that are computed together, so that short lists are not padded to long ones.

One long list makes a whole batch wide. A step cuts its batch into groups by length instead; which
rows a batch holds, what they give, and their order stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.networks.layers import may_cut
from training.networks.network import Network, TrainingPass
from training.reader.feature_columns import list_length

GROUPS, MIN_GROUP_ROWS = 4, 16
"""More of them have less padding, and more calls of small operations."""
FULL_SHARE = 0.6
"""Lists that are fuller in the mean are not worth the groups."""

FIRST_GROUP_STREAM = 16
"""Groups of rows drop numbers by streams of their own, from this one on."""

Encode = Callable[[Mapping[str, tf.Tensor], int], Any]


def plan_groups(manifest: Manifest, spec: FeatureSpec) -> int:
    """Returns how many groups a batch is computed in, by the lengths of a list in train.

    Args:
        manifest: The dataset version; one without statistics has one group.
        spec: The list, with its bound.
    """
    found = manifest.statistics.get("train", {}).get(spec.name, {}).get("length", {})
    mean, longest = found.get("mean"), list_length(spec) if spec.is_list else None
    if mean is None or not longest or mean > FULL_SHARE * longest:
        return 1
    return GROUPS


def call_in_groups(
    network: Network,
    inputs: Mapping[str, tf.Tensor],
    training: TrainingPass | None,
    mask: str,
    count: int,
) -> Any:
    """Returns what a network makes of a batch; in training, its rows are computed in groups.

    Args:
        network: What it makes of a row depends neither on others nor on padding behind a list.
        inputs: Of the whole batch.
        training: The pass of a training step; None elsewhere.
        mask: Name of the mask of the list that tells the lengths, bool `[batch, width]`.
        count: Groups.
    """
    if training is None or count == 1 or not may_cut():
        return network(inputs, training)
    tensors = network.keras_model.input
    lists = [name for name, tensor in tensors.items() if tensor.shape[1] is None]

    def encode(group: Mapping[str, tf.Tensor], number: int) -> Any:
        with training.drawing_from(FIRST_GROUP_STREAM + number):
            return network(group, training)

    read = {name: inputs[name] for name in (*tensors, mask)}
    return encode_in_groups(encode, read, lists, mask, count)


def encode_in_groups(
    encode: Encode, inputs: Mapping[str, tf.Tensor], lists: Collection[str], mask: str, count: int
) -> Any:
    """Encodes the rows of a batch in groups of like length.

    Args:
        encode: Returns `[rows, dim]` or `[rows, width, dim]` of the inputs of a group, and of its
            number, or several by name. What it makes of a row depends neither on others nor on
            padding behind a list.
        inputs: Of the whole batch.
        lists: Names of those that have a position for each column: `[batch, width, …]`.
        mask: Name of the mask of the list that tells the lengths, bool `[batch, width]`.
        count: Groups; a batch of fewer than `MIN_GROUP_ROWS` rows for each has fewer.

    Returns:
        `[batch, dim]` or `[batch, width, dim]`; zeros behind the width of a group. Several by name
        where `encode` returns them.
    """
    known = inputs[mask].shape[0]
    if known is not None:
        count = max(1, min(count, known // MIN_GROUP_ROWS))
    if count == 1:
        return encode(inputs, 0)
    rows, width = tf.shape(inputs[mask])[0], tf.shape(inputs[mask])[1]
    lengths = tf.reduce_max(tf.where(inputs[mask], tf.range(1, width + 1), 0), axis=1)
    order = tf.argsort(lengths, stable=True)
    back = tf.math.invert_permutation(order)
    ordered = {name: permute_rows(value, order, back) for name, value in inputs.items()}
    lengths, outputs = tf.gather(lengths, order), []
    for number in range(count):
        first, last = rows * number // count, rows * (number + 1) // count
        longest = tf.reduce_max(tf.concat([[0], lengths[first:last]], axis=0))
        own = tf.minimum(longest + 1, width)
        output = encode(
            {n: v[first:last, :own] if n in lists else v[first:last] for n, v in ordered.items()},
            number,
        )
        outputs.append(tf.nest.map_structure(partial(_pad_width, missing=width - own), output))
    return tf.nest.map_structure(
        lambda *parts: permute_rows(tf.concat(parts, axis=0), back, order), *outputs
    )


def _pad_width(output: tf.Tensor, missing: tf.Tensor) -> tf.Tensor:
    return tf.pad(output, [[0, 0], [0, missing], [0, 0]]) if output.shape.rank == 3 else output


def permute_rows(values: tf.Tensor, order: tf.Tensor, back: tf.Tensor) -> tf.Tensor:
    """Returns the rows in another order; its gradient takes them back, without a sum over rows.

    Args:
        values: `[rows, …]`.
        order: Row that comes to each place, int32 `[rows]`.
        back: The inverse of it.
    """

    @tf.custom_gradient
    def permute(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.gather(rows, order), lambda upstream: tf.gather(upstream, back)

    permuted: tf.Tensor = permute(values)
    return permuted
