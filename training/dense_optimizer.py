"""Keras optimizers by name, for the weights that every step touches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace

import keras
import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.training import OptimizerConfig
from training.schedules import build_learning_rate

# What is done to the gradients of tables and dense weights together, or by no one at the end.
_REPLACED = {
    "clipnorm": "optimizer.clip_norm",
    "global_clipnorm": "optimizer.clip_norm",
    "clipvalue": "optimizer.clip_value",
    "gradient_accumulation_steps": "optimizer.accumulate_steps",
    "loss_scale_factor": "compute.mixed_precision",
    "use_ema": None,
    "ema_momentum": None,
    "ema_overwrite_frequency": None,
    "name": None,
}
# Bases and wrappers.
_LEFT_OUT = ("optimizer", "lossscaleoptimizer", "multioptimizer")


class ScheduleFreeAdamW(keras.optimizers.ScheduleFreeAdamW):
    """Schedule-Free AdamW (Defazio et al. 2024, "The road less scheduled", equations 2 to 4).

    Keras' own on TensorFlow takes the auxiliary weight after its update for the one before it,
    which leaves out a part of the average; here it is kept apart. Weights may also be set after
    the optimizer has been built, as warm starts do.
    """

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes the state.

        Raises:
            ValueError: `beta_1` is 0: the average cannot be told from the weights then.
        """
        if not 0.0 < self.beta_1 < 1.0:
            raise ValueError(f"beta_1 must be between 0 and 1, both left out; it is {self.beta_1}")
        super().build(var_list)

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Updates a weight; what it is averaged with starts where the weight does."""
        auxiliary = self._momentums[self._get_variable_index(variable)]
        is_first = tf.equal(tf.convert_to_tensor(self.iterations), 0)
        weight = tf.convert_to_tensor(variable)
        before = tf.where(is_first, weight, tf.convert_to_tensor(auxiliary))
        self.assign(auxiliary, before)
        super().update_step(gradient, variable, learning_rate)
        after = tf.convert_to_tensor(auxiliary)
        share = 1.0 / tf.cast(self.iterations + 1, after.dtype)
        average = (weight - (1.0 - self.beta_1) * before) / self.beta_1
        average += share * (after - average)
        self.assign(variable, (1.0 - self.beta_1) * after + self.beta_1 * average)


class Muon(keras.optimizers.Muon):
    """Keras' Muon for variables that are not Keras' own: their names stand for paths."""

    def _should_use_adamw(self, variable: tf.Variable) -> bool:
        path = getattr(variable, "path", variable.name)
        return bool(super()._should_use_adamw(SimpleNamespace(shape=variable.shape, path=path)))


def dense_optimizer_classes() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Returns Keras' optimizers by name, in small letters."""
    classes = {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer)
    }
    classes |= {"muon": Muon, "schedulefreeadamw": ScheduleFreeAdamW}
    return {name: value for name, value in classes.items() if name not in _LEFT_OUT}


def build_dense_optimizer(
    config: OptimizerConfig, variables: Sequence[tf.Variable], total_steps: int
) -> keras.optimizers.Optimizer:
    """Builds the optimizer of dense weights; call it under the strategy's scope.

    Args:
        config: Its name, arguments and learning rate.
        variables: The weights.
        total_steps: Steps of the whole run, for the schedule.

    Raises:
        ConfigError: Keras has no such optimizer, or refuses its arguments.
    """
    dense = config.dense
    classes = dense_optimizer_classes()
    kind = dense.kind.lower()
    if kind not in classes:
        raise ConfigError(
            "optimizer.dense.kind is none of Keras' optimizers",
            received=dense.kind,
            allowed=", ".join(sorted(classes)),
            fix=did_you_mean(kind, classes),
        )
    arguments = dense.arguments
    _check_arguments(kind, classes[kind], arguments)
    if kind == "adam":
        of_adam = {"beta_1": config.beta_1, "beta_2": config.beta_2, "epsilon": config.epsilon}
        arguments = {**of_adam, **arguments}
    try:
        optimizer = classes[kind](
            build_learning_rate(config, total_steps, dense.learning_rate), **arguments
        )
        optimizer.build(variables)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras refuses the arguments of optimizer.dense (kind {kind})",
            received=f"{arguments}: {error}",
            fix=f"correct the keys of optimizer.dense; {kind} takes "
            f"{', '.join(_argument_names(classes[kind]))}",
        ) from error
    return optimizer


def _argument_names(cls: type[keras.optimizers.Optimizer]) -> list[str]:
    parameters = inspect.signature(cls.__init__).parameters.values()
    taken = {"self", "learning_rate", *_REPLACED}
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in taken]


def _check_arguments(
    kind: str, cls: type[keras.optimizers.Optimizer], arguments: dict[str, object]
) -> None:
    known = _argument_names(cls)
    for name in arguments:
        if name in known:
            continue
        instead = _REPLACED.get(name)
        raise ConfigError(
            f"optimizer.dense (kind {kind}) takes no such argument",
            received=name,
            allowed=", ".join(known),
            fix=f"set {instead} instead" if instead else did_you_mean(name, known),
        )
