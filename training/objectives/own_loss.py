"""Losses of one's own by their path, tried on a few rows before training starts.

A loss gives a value for each row, as weights, tasks and replicas each take their part of it: a mean
over the batch would be counted once for every row.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.objectives import OwnLossConfig
from training.embedding.key_mapping import read_keys
from training.input.batches import Batch, build_eval_dataset, read_batches
from training.models.model import find_feature
from training.networks.own_code import (
    Fault,
    OwnCode,
    call_reported,
    check_params,
    import_function,
)

TRIED_ROWS = 16
_TRIED_NEGATIVES = 5
_TRIED_SCALE = 3.0
_OF_LABELS = ("labels", "logits")
_OF_ITEMS = ("positives", "negatives", "counted")


class LossFeatures(dict[str, Any]):
    """Features of a batch that a loss may read, by name."""

    def __missing__(self, name: str) -> Any:
        """Refuses a feature that the config does not name.

        Raises:
            ConfigError: In any case.
        """
        raise ConfigError(
            "the loss reads a feature that its config does not name",
            received=name,
            allowed=", ".join(self) or "none: `features` of the loss is empty",
            fix=did_you_mean(name, self) if self else f"add it: loss.features=[{name}]",
        )


class OwnLoss:
    """A function of one's own as the loss of each row.

    Args:
        config: The function, its parameters, the features that it reads.
        code: What it is for.

    Attributes:
        inputs: Features of a batch that it reads.
        code: What it is for.
        path: The function's name, as the config has it.

    Raises:
        ConfigError: There is no such function, or it takes other parameters.
    """

    def __init__(self, config: OwnLossConfig, code: OwnCode) -> None:
        self.path, self.code, self.inputs = config.function, code, config.features
        self._function = import_function(config.function, code)
        parameters = inspect.signature(self._function).parameters
        check_params(config.function, code, parameters, config.params)
        self._reads_features = "features" in parameters
        if config.features and not self._reads_features:
            raise ConfigError(
                f"loss {config.function} has no parameter for the features of its config",
                received=f"{code.key}.features = {', '.join(config.features)}",
                fix="give the function a parameter `features`, or leave them out of the config",
            )
        self._params = dict(config.params)

    def __call__(self, *values: tf.Tensor, batch: Batch, rows: tf.Tensor | None = None) -> Any:
        """Returns the loss of each row, float32 `[n]`.

        Args:
            values: Labels and logits, `[n]` each; or the scores of rows' items `[n]`, those of
                other items `[n, count]`, and which of these count, bool `[n, count]`.
            batch: Features of the rows.
            rows: int32 `[n]`, the row of the batch that each value is of; None: one each.
        """
        given = {}
        if self._reads_features:
            # Of keys of dynamic tables a step has rows.
            read = {name: read_keys(batch, name) for name in self.inputs}
            if rows is not None:
                read = {name: tf.gather(value, rows) for name, value in read.items()}
            given["features"] = LossFeatures(read)
        losses = self._function(*values, **self._params, **given)
        return losses if losses is None else tf.cast(losses, tf.float32)


def build_label_loss(config: OwnLossConfig, key: str) -> OwnLoss:
    """Builds a loss of labels and logits.

    Args:
        config: Its config.
        key: Where that stands.

    Raises:
        ConfigError: As of `OwnLoss`.
    """
    return OwnLoss(config, OwnCode("loss", key, f"{key}.params", _OF_LABELS, ("features",)))


def build_item_loss(config: OwnLossConfig | None) -> OwnLoss | None:
    """Builds a loss of each row's item against others; None: the config has none.

    Raises:
        ConfigError: As of `OwnLoss`.
    """
    if config is None:
        return None
    key = "model.objective.loss"
    return OwnLoss(config, OwnCode("loss", key, f"{key}.params", _OF_ITEMS, ("features",)))


def check_loss(
    loss: OwnLoss, version_dir: ReadablePath, manifest: Manifest, label: str | None = None
) -> None:
    """Tries a loss on the first rows of train, with scores that are drawn.

    Args:
        loss: The loss.
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        label: Label that it learns; None: it compares items. One row has none that counts.

    Raises:
        ConfigError: It fails, or gives something else than a finite number for each row that the
            scores can be moved by.
        InputDataError: A record is damaged.
    """
    names = list(loss.inputs) if label is None else [label, *loss.inputs]
    for name in names:
        find_feature(manifest, name)
    batch, rows = _read_rows(version_dir, manifest, names or [manifest.require_key("item")])
    rng = np.random.default_rng(0)
    scores = tf.constant(_TRIED_SCALE * rng.standard_normal(rows), tf.float32)
    others: list[tf.Tensor] = []
    if label is None:
        drawn = _TRIED_SCALE * rng.standard_normal([rows, _TRIED_NEGATIVES])
        counted = np.repeat(np.arange(rows)[:, np.newaxis] > 0, _TRIED_NEGATIVES, axis=1)
        others = [tf.constant(drawn, tf.float32), tf.constant(counted)]

    @tf.function(autograph=False)
    def differentiate() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch([scores, *others[:1]])
            values = (scores, *others) if label is None else (batch[label], scores)
            losses = loss(*values, batch=batch)
        moved = [scores, *others[:1]]
        gradients = None if losses is None else tape.gradient(losses, moved)
        return losses, [g for g in gradients or () if g is not None]

    fault = Fault(
        f"loss {loss.path} fails on the first {rows} rows of train",
        allowed=f"TensorFlow's functions of {', '.join(loss.code.arguments)}",
        fix=f"correct the function, or {loss.code.params_key}",
    )
    losses, gradients = call_reported(fault, differentiate)
    _check_losses(loss, losses, gradients, rows)


def _read_rows(
    version_dir: ReadablePath, manifest: Manifest, names: list[str]
) -> tuple[Batch, int]:
    dataset = build_eval_dataset(version_dir, manifest, "train", TRIED_ROWS, names)
    found = next(iter(read_batches(dataset, version_dir, manifest, "train")))
    # Training pads lists without a bound too.
    pads = {name: manifest.schema[name].pad_value or 0 for name in found}
    batch = {
        name: value.to_tensor(tf.cast(pads[name], value.dtype))
        if isinstance(value, tf.RaggedTensor)
        else value
        for name, value in found.items()
    }
    return batch, int(next(iter(batch.values())).shape[0])


def _check_losses(loss: OwnLoss, losses: Any, gradients: list[tf.Tensor], rows: int) -> None:
    shape = None if losses is None else tuple(losses.shape)
    if shape != (rows,):
        raise ConfigError(
            f"loss {loss.path} does not give one value for each row",
            received="nothing" if shape is None else f"shape {shape} of {rows} rows",
            allowed=f"shape ({rows},)",
            fix="leave out the mean over rows (of Keras' losses: reduction=None)"
            if shape == ()
            else "return a tensor of shape [rows]; tf.squeeze(x, 1) drops a last axis of 1",
        )
    for what, tensors in (("values", [losses]), ("gradients", gradients)):
        bad = sum(int(tf.reduce_sum(tf.cast(~tf.math.is_finite(t), tf.int32))) for t in tensors)
        if bad:
            raise ConfigError(
                f"loss {loss.path} has {what} that are no numbers",
                received=f"{bad} that are NaN or infinite, on {rows} rows of train",
                allowed="finite numbers, whatever the label and the score; of items also where "
                "no other item counts",
                fix="bound what goes into log and division (tf.math.divide_no_nan)",
            )
    if not gradients:
        raise ConfigError(
            f"loss {loss.path} has no gradient: nothing would be learned",
            received="a loss that no score moves",
            fix="compute it of the scores, without steps such as tf.round or a comparison",
        )
