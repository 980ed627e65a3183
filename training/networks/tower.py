"""Hidden layers with their activations, towers of two-tower models, and users' own towers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from conf.errors import ConfigError
from conf.training.models import OwnTowerConfig
from training.networks.network import NetworkInputs, find_read_inputs
from training.networks.user_code import call_function, import_function, pick_parameters

EPSILON = 1e-8
"""Added to the variance of Dice."""


@dataclass(frozen=True)
class HiddenLayers:
    """Dense layers: batch normalization if asked for, activation, dropout behind each."""

    activation: str = "relu"  # `dice`, `prelu` or the name of a Keras activation
    dropout: float | None = None
    batch_normalization: bool = False  # by the batch of all replicas

    def stack(
        self, hidden: keras.KerasTensor, units: Sequence[int], mask: keras.KerasTensor | None = None
    ) -> keras.KerasTensor:
        """Builds layers of these lengths over `[batch, width]`, or `[batch, length, width]`.

        Statistics are of the positions in `mask`, if any, bool `[batch, length]`, by replica.
        """
        for size in units:
            hidden = self.finish(keras.layers.Dense(size)(hidden), mask)
        return hidden

    def finish(
        self, hidden: keras.KerasTensor, mask: keras.KerasTensor | None = None
    ) -> keras.KerasTensor:
        if self.batch_normalization:
            hidden = keras.layers.BatchNormalization(synchronized=True)(hidden, mask=mask)
        hidden = activate(hidden, self.activation, mask)
        return hidden if self.dropout is None else keras.layers.Dropout(self.dropout)(hidden)


def activate(
    hidden: keras.KerasTensor, activation: str, mask: keras.KerasTensor | None = None
) -> keras.KerasTensor:
    if activation == "dice":
        return Dice()(hidden, tokens=mask)
    if activation == "prelu":  # A slope for each unit, not for each position too.
        return keras.layers.PReLU(shared_axes=list(range(1, len(hidden.shape) - 1)))(hidden)
    return keras.layers.Activation(activation)(hidden)


def build_own_tower(
    config: OwnTowerConfig, inputs: NetworkInputs, output_dim: int
) -> keras.KerasTensor:
    """Builds the user tower that a user has written, `[batch, output_dim]`."""
    path = config.function
    build = import_function("user tower", path)
    given = pick_parameters(build, {"output_dim": output_dim})
    fault = f"user tower {path} cannot be built"
    output = call_function(fault, build, inputs, **config.params, **given)
    check_output(f"user tower {path}", output, (None, output_dim))
    read = find_read_inputs(inputs, output)
    unread = [name for name in inputs if name not in (*read, *inputs.masks.values())]
    if unread:
        raise ConfigError(
            f"user tower {path} does not read every feature of its side",
            received=f"it ignores {', '.join(unread)}",
            fix="leave them out of model.user_features, or connect them to the output",
        )
    return output


def check_output(what: str, output: Any, *shapes: tuple[int | None, ...]) -> None:
    """Refuses what user code returns unless it is a tensor of one of the shapes."""
    found = getattr(output, "shape", None)
    if not isinstance(output, keras.KerasTensor) or found not in shapes:
        raise ConfigError(
            f"{what} returns something else than numbers for each row of a batch",
            received=f"{type(output).__name__} of shape {found}",
            allowed=f"a Keras tensor of shape {shapes[0]}",
            fix=f"end it with keras.layers.Dense({shapes[0][-1]})",
        )


def build_output(
    hidden: keras.KerasTensor, base_scores: Mapping[str, float] | None, task: str | None = None
) -> keras.KerasTensor:
    """Builds a linear map to one number, `[batch, 1]`, whose bias is a constant's score."""
    first = keras.initializers.Constant(first_score(base_scores, task))
    return keras.layers.Dense(1, bias_initializer=first)(hidden)


def first_score(base_scores: Mapping[str, float] | None, task: str | None = None) -> float:
    """Returns the score that an output starts at: of a task, or of the only one."""
    scores = base_scores or {}
    return next(iter(scores.values()), 0.0) if task is None else scores.get(task, 0.0)


def concatenate(tensors: Sequence[keras.KerasTensor], axis: int = -1) -> keras.KerasTensor:
    return tensors[0] if len(tensors) == 1 else keras.layers.Concatenate(axis)(list(tensors))


def add(tensors: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
    return tensors[0] if len(tensors) == 1 else keras.layers.Add()(list(tensors))


class Dice(keras.layers.Layer):
    """`p x + (1 - p) a x`: p the sigmoid of x normalized by the batch, a trained.

    Zhou et al. 2018, "Deep interest network", equation 4. Over the positions of histories it takes
    most of a step of DIN: there its gradient is written out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.normalize = keras.layers.BatchNormalization(
            center=False, scale=False, epsilon=EPSILON, synchronized=True
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.normalize.build(input_shape)
        self.slope = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="slope")

    def call(
        self,
        inputs: keras.KerasTensor,
        training: bool | None = None,
        tokens: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """Returns the activation of `[batch, …, units]`; `tokens` is the mask of `HiddenLayers`."""
        if tokens is None or not training:
            gate = keras.ops.sigmoid(self.normalize(inputs, training=training))
            return inputs * (gate + (1.0 - gate) * self.slope)
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        weights = tf.cast(tf.reshape(tokens, [1, -1]), rows.dtype)
        outputs, mean, variance = apply_dice(rows, weights, tf.convert_to_tensor(self.slope))
        kept = self.normalize  # Moves towards the statistics of the batch, as Keras' layer does.
        for variable, value in ((kept.moving_mean, mean), (kept.moving_variance, variance)):
            old = keras.ops.cast(variable, value.dtype)
            variable.assign(old * kept.momentum + value * (1.0 - kept.momentum))
        return tf.reshape(outputs, tf.shape(inputs))


@tf.custom_gradient
def apply_dice(
    rows: tf.Tensor, weights: tf.Tensor, slope: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Callable[..., Any]]:
    """Dice of rows x, float `[n, units]`, normalized by those whose weight `[1, n]` is 1, not 0.

    With z the normalized x, p its sigmoid and a the slope, y = x (a + (1 - a) p). The gradient
    through z is that of batch normalization (Ioffe & Szegedy 2015, section 3). Returns y, and the
    mean and the variance, `[units]`, which have no gradient.
    """
    share = weights / tf.maximum(tf.reduce_sum(weights), 1.0)
    mean = tf.matmul(share, rows)
    centred = rows - mean
    variance = tf.matmul(share, tf.square(centred))
    scale = tf.math.rsqrt(variance + EPSILON)
    normalized = centred * scale
    gate = tf.sigmoid(normalized)
    factor = slope + (1.0 - slope) * gate

    def differentiate(
        upstream: tf.Tensor, _mean: tf.Tensor, _variance: tf.Tensor
    ) -> tuple[tf.Tensor, None, tf.Tensor]:
        each = tf.ones_like(weights)
        through = upstream * rows
        of_gate = through * gate
        of_slope = tf.matmul(each, through) - tf.matmul(each, of_gate)
        of_normalized = of_gate - of_gate * factor  # 1 - factor is (1 - a) (1 - p).
        total = tf.matmul(each, of_normalized) * scale
        along = tf.matmul(each, of_normalized * normalized) * scale
        correction = (normalized * along + total) * tf.transpose(share)
        gradient = upstream * factor + of_normalized * scale - correction
        return gradient, None, tf.squeeze(of_slope, 0)

    return (rows * factor, tf.squeeze(mean, 0), tf.squeeze(variance, 0)), differentiate
