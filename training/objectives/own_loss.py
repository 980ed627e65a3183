"""Losses of one's own by their path.

A loss gives a value for each row, as weights, tasks and replicas each take their part of it: a mean
over the batch would be counted once for every row.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.training.objectives import OwnLossConfig
from training.embedding.key_mapping import read_keys
from training.input.batches import Batch
from training.networks.own_code import (
    OWN_FAULT,
    Fault,
    OwnCode,
    call_reported,
    import_function,
    read_parameters,
)

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
        parameters = read_parameters(config.function, code, self._function, config.params)
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

        Raises:
            ConfigError: It fails, or gives something else than a float for each row.
        """
        given = {}
        if self._reads_features:
            # Of keys of dynamic tables a step has rows.
            read = {name: read_keys(batch, name) for name in self.inputs}
            if rows is not None:
                read = {name: tf.gather(value, rows) for name, value in read.items()}
            given["features"] = LossFeatures(read)
        fault = Fault(
            f"loss {self.path} fails on {_describe_rows(values[0])}",
            allowed=f"TensorFlow's functions of {', '.join(self.code.arguments)}",
            fix=f"correct the function, or {self.code.params_key}",
        )
        losses = call_reported(fault, self._function, *values, **self._params, **given)
        if losses is not None:
            losses = call_reported(fault, tf.convert_to_tensor, losses)
        return tf.cast(self._check(losses, values[0]), tf.float32)

    def _check(self, losses: tf.Tensor | None, first: tf.Tensor) -> tf.Tensor:
        """Refuses losses that are not a float for each row, at the latest as the step runs."""
        if losses is None or not losses.shape.is_compatible_with(first.shape):
            is_scalar = losses is not None and losses.shape.rank == 0
            raise ConfigError(
                f"loss {self.path} does not give one value for each row",
                received="nothing"
                if losses is None
                else f"shape {_describe_shape(losses)} of {_describe_rows(first)}",
                allowed=f"shape {_describe_shape(first)}",
                fix="leave out the mean over rows (Keras' losses: reduction=None, and give them "
                "labels[:, None] and logits[:, None])"
                if is_scalar
                else "return a tensor of shape [rows]; tf.squeeze(x, 1) drops a last axis of 1",
            )
        if not losses.dtype.is_floating:
            raise ConfigError(
                f"loss {self.path} gives values that are no floating-point numbers",
                received=losses.dtype.name,
                allowed="float32; float16, bfloat16 and float64 are turned into it",
                fix="compute it of the scores, and return tf.cast(x, tf.float32)",
            )
        if losses.shape.is_fully_defined() and first.shape.is_fully_defined():
            return losses
        fault = f"{OWN_FAULT}loss {self.path} does not give one value for each row"
        same = tf.debugging.assert_equal(tf.shape(losses), tf.shape(first), fault)
        with tf.control_dependencies([same]):
            return tf.ensure_shape(losses, first.shape)


def _describe_rows(first: tf.Tensor) -> str:
    count = first.shape[0]
    return "the rows of a step" if count is None else f"{count} rows"


def _describe_shape(tensor: tf.Tensor) -> str:
    return str(tuple(tensor.shape))


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
