"""The trial of a loss of one's own on the first rows of train, before training starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from training.input.batches import mask_unlabelled
from training.models.model import find_feature
from training.networks.own_code import Fault, call_reported
from training.objectives.own_loss import OwnLoss
from training.objectives.tried_rows import check_finite, read_tried_rows
from training.objectives.user_items import TrainRows

_TRIED_SCALE = 3.0


def check_loss(
    loss: OwnLoss, train: TrainRows, *, label: str | None = None, compared: int = 0
) -> None:
    """Tries a loss on the first rows of train, with scores that are drawn.

    Args:
        loss: The loss.
        train: The rows that are trained on.
        label: Label that it learns; None: it compares items.
        compared: How many other items a row's is compared with; one row has none that counts.

    Raises:
        ConfigError: It fails, or gives something else than a finite number for each row that the
            scores can be moved by.
        InputDataError: A record is damaged.
    """
    names = list(loss.inputs) if label is None else [label, *loss.inputs]
    for name in names:
        find_feature(train.manifest, name)
    batch, rows = read_tried_rows(train, names or [train.manifest.require_key("item")])
    rng = np.random.default_rng(0)
    scores = tf.constant(_TRIED_SCALE * rng.standard_normal(rows), tf.float32)
    others: list[tf.Tensor] = []
    if label is None:
        drawn = _TRIED_SCALE * rng.standard_normal([rows, compared])
        counted = np.repeat(np.arange(rows)[:, np.newaxis] > 0, compared, axis=1)
        others = [tf.constant(drawn, tf.float32), tf.constant(counted)]

    if label is not None and train.manifest.may_lack(train.manifest.schema[label]):
        batch = {**batch, label: mask_unlabelled(batch[label])[0]}
    labels = [] if label is None else [batch[label], _swap(batch[label])]

    @tf.function(autograph=False)
    def differentiate(*values: tf.Tensor) -> tuple[Any, Any]:
        moved = list(values[:2] if label is None else values[1:])
        with tf.GradientTape() as tape:
            tape.watch(moved)
            losses = loss(*values, batch=batch)
        gradients = tape.gradient(losses, moved)
        return losses, [g for g in gradients if g is not None]

    fault = Fault(
        f"loss {loss.path} fails on the first {rows} rows of train",
        allowed=f"TensorFlow's functions of {', '.join(loss.code.arguments)}",
        fix=f"correct the function, or {loss.code.params_key}",
    )
    tried = [(scores, *others)] if label is None else [(each, scores) for each in labels]
    results = [call_reported(fault, differentiate, *values) for values in tried]
    losses, gradients = results[0]
    always = "whatever the label and the score; of items also where no other item counts"
    check_finite(f"loss {loss.path}", {"values": [losses], "gradients": gradients}, rows, always)
    if not any(bool(tf.reduce_any(g != 0.0)) for _, found in results for g in found):
        raise ConfigError(
            f"loss {loss.path} has no gradient: nothing would be learned",
            received="a loss that no score moves",
            fix="compute it of the scores, without steps such as tf.round or a comparison",
        )


def _swap(labels: tf.Tensor) -> tf.Tensor:
    """Returns the other label of each row: a loss of positives alone may have met none of them."""
    return tf.cast(labels <= tf.cast(0.5, labels.dtype), labels.dtype)
