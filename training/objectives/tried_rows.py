"""Rows of train that code of one's own is tried on before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from training.input.batches import (
    FINITE_ADVICE,
    Batch,
    build_eval_dataset,
    read_batches,
    tell_non_finite,
)
from training.objectives.user_items import TrainRows

TRIED_ROWS = 16


def read_tried_rows(train: TrainRows, names: Sequence[str]) -> tuple[Batch, int]:
    """Returns features of the first rows of train as a step has them, and how many rows.

    Args:
        train: The rows that are trained on.
        names: The features, at least one.

    Raises:
        InputDataError: A record is damaged, and training does not go on without it.
    """
    where, config = (train.version_dir, train.manifest), train.config or InputConfig()
    dataset = build_eval_dataset(
        *where, "train", TRIED_ROWS, names, evaluation_filter=config.filter,
        on_corrupt=config.on_corrupt,
    )  # fmt: skip
    found = next(read_batches(dataset, *where, "train"))
    # Training pads lists without a bound too.
    batch = {
        name: value.to_tensor(_find_pad(train.manifest, name, value.dtype))
        if isinstance(value, tf.RaggedTensor)
        else value
        for name, value in found.items()
    }
    return batch, int(next(iter(batch.values())).shape[0])


def empty_lists(batch: Batch, manifest: Manifest) -> Batch:
    """Returns rows whose first one has nothing in its lists, as a new user has."""
    emptied = {}
    for name, values in batch.items():
        emptied[name] = values
        if manifest.schema[name].is_list:
            pads = tf.fill(tf.shape(values[:1]), _find_pad(manifest, name, values.dtype))
            emptied[name] = tf.concat([pads, values[1:]], axis=0)
    return emptied


def _find_pad(manifest: Manifest, name: str, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(manifest.schema[name].pad_value or 0, dtype)


def check_finite(
    name: str, parts: Mapping[str, Sequence[tf.Tensor]], batch: Batch, rows: int, always: str
) -> None:
    """Refuses numbers of code of one's own that are none.

    Args:
        name: What the code is.
        parts: The numbers, by what they are.
        batch: What they are made of.
        rows: On how many rows of train.
        always: Where they have to be finite too.

    Raises:
        ConfigError: One is NaN or infinite.
        InputDataError: So is a feature.
    """
    for what, tensors in parts.items():
        bad = sum(int(tf.reduce_sum(tf.cast(~tf.math.is_finite(t), tf.int32))) for t in tensors)
        if bad and (odd := tell_non_finite(batch)):
            raise InputDataError(
                f"{name} has {what} that are no numbers, as its features are",
                received=f"{bad} that are NaN or infinite, on {rows} rows of train{odd}",
                fix=FINITE_ADVICE,
            )
        if bad:
            raise ConfigError(
                f"{name} has {what} that are no numbers",
                received=f"{bad} that are NaN or infinite, on {rows} rows of train",
                allowed=f"finite numbers, {always}",
                fix="bound what goes into log, division and softmax (tf.math.divide_no_nan, -1e9 "
                "in the place of minus infinity)",
            )
