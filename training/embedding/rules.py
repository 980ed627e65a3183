"""Update rules of table rows: pure functions of rows, their summed gradients and their state.

What each rule does to a row equals what Keras' optimizer of the same name does to a dense weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import tensorflow as tf

from conf.training import (
    OptimizerConfig,
    SparseAdagradConfig,
    SparseAdamConfig,
    SparseFTRLConfig,
)

Slots = Mapping[str, tf.Tensor]


class SparseRule(Protocol):
    """How rows change.

    Attributes:
        slots: Names of the numbers that are kept per number of a table, with their first values.
    """

    @property
    def slots(self) -> Mapping[str, float]:
        """Names and first values of the state."""
        ...

    def update(
        self, rows: tf.Tensor, gradient: tf.Tensor, slots: Slots, rate: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the new rows and their new state.

        Args:
            rows: float32 `[n, dim]`.
            gradient: float32 `[n, dim]`, of the loss of the global batch.
            slots: State of the rows, `[n, dim]` each.
            rate: Learning rate, float32 scalar.
            step: Zero-based step, float32 scalar.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent: `w -= rate * g`."""

    slots: Mapping[str, float] = field(default_factory=dict)

    def update(
        self, rows: tf.Tensor, gradient: tf.Tensor, slots: Slots, rate: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the new rows; there is no state."""
        return rows - rate * gradient, {}


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi, Hazan & Singer 2011, "Adaptive subgradient methods", figure 1, diagonal).

    Attributes:
        initial_accumulator: What the sum of squares starts with, 0 or more.
        epsilon: Added to the sum of squares under the root, as in Keras.
    """

    initial_accumulator: float = 0.1
    epsilon: float = 1e-7

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients."""
        return {"accumulator": self.initial_accumulator}

    def update(
        self, rows: tf.Tensor, gradient: tf.Tensor, slots: Slots, rate: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the new rows and sums of squares."""
        accumulator = slots["accumulator"] + tf.square(gradient)
        rows -= rate * gradient * tf.math.rsqrt(accumulator + self.epsilon)
        return rows, {"accumulator": accumulator}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1, with the step size of section 2's last paragraph).

    Lazy: the moments of rows that a batch does not touch do not decay, while the bias
    corrections count all steps.

    Attributes:
        beta_1: Decay of the first moment, in `[0, 1)`.
        beta_2: Decay of the second moment, in `[0, 1)`.
        epsilon: Added to the root of the second moment, as in Keras.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    @property
    def slots(self) -> Mapping[str, float]:
        """The two moments."""
        return {"first_moment": 0.0, "second_moment": 0.0}

    def update(
        self, rows: tf.Tensor, gradient: tf.Tensor, slots: Slots, rate: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the new rows and moments."""
        nth = step + 1.0
        size = rate * tf.sqrt(1.0 - tf.pow(self.beta_2, nth)) / (1.0 - tf.pow(self.beta_1, nth))
        first, second = slots["first_moment"], slots["second_moment"]
        first = self.beta_1 * first + (1.0 - self.beta_1) * gradient
        second = self.beta_2 * second + (1.0 - self.beta_2) * tf.square(gradient)
        rows -= size * first / (tf.sqrt(second) + self.epsilon)
        return rows, {"first_moment": first, "second_moment": second}


@dataclass(frozen=True)
class FTRL:
    """FTRL-Proximal (McMahan et al. 2013, "Ad click prediction", algorithm 1).

    As in Keras, `l2` is doubled and `beta` divided by the rate counts as more of it.

    Attributes:
        learning_rate_power: Power of the sum of squares that the rate falls with, 0 or less.
        initial_accumulator: What the sum of squares starts with, above 0.
        l1: Weight of the L1 norm.
        l2: Weight of the squared L2 norm.
        beta: The paper's smoothing of the rate.
    """

    learning_rate_power: float = -0.5
    initial_accumulator: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients, and the sum of gradients less what was moved."""
        return {"accumulator": self.initial_accumulator, "linear": 0.0}

    def update(
        self, rows: tf.Tensor, gradient: tf.Tensor, slots: Slots, rate: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the new rows and sums."""
        accumulator = slots["accumulator"] + tf.square(gradient)
        before, after = self._power(slots["accumulator"]), self._power(accumulator)
        linear = slots["linear"] + gradient - (after - before) / rate * rows
        quadratic = (after + self.beta) / rate + 2.0 * self.l2
        rows = (tf.clip_by_value(linear, -self.l1, self.l1) - linear) / quadratic
        return rows, {"accumulator": accumulator, "linear": linear}

    def _power(self, accumulator: tf.Tensor) -> tf.Tensor:
        if self.learning_rate_power == -0.5:
            return tf.sqrt(accumulator)
        return tf.pow(accumulator, -self.learning_rate_power)


def build_rule(config: OptimizerConfig) -> SparseRule:
    """Returns the rule that a config asks for."""
    sparse = config.sparse
    if isinstance(sparse, SparseAdagradConfig):
        return Adagrad(sparse.initial_accumulator, sparse.epsilon)
    if isinstance(sparse, SparseFTRLConfig):
        return FTRL(
            sparse.learning_rate_power,
            sparse.initial_accumulator,
            sparse.l1,
            sparse.l2,
            sparse.beta,
        )
    if isinstance(sparse, SparseAdamConfig):
        own = {"beta_1": sparse.beta_1, "beta_2": sparse.beta_2, "epsilon": sparse.epsilon}
        return Adam(
            **{k: getattr(config, k) if value is None else value for k, value in own.items()}
        )
    return SGD()
