from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training import OptimizerConfig
from training.schedules import build_learning_rate

RATE, TOTAL = 0.5, 100


def rates(steps: list[int], **config: object) -> np.ndarray:
    full = OptimizerConfig.model_validate({"learning_rate": RATE, **config})
    rate = build_learning_rate(full, TOTAL)
    assert callable(rate)
    return np.array([float(rate(tf.constant(step, tf.int64))) for step in steps])


def test_no_schedule_is_a_plain_number() -> None:
    assert build_learning_rate(OptimizerConfig(learning_rate=0.5), 100) == 0.5
    assert build_learning_rate(OptimizerConfig(learning_rate=0.5), 100, 0.25) == 0.25


PEERS: dict[str, tuple[object, Callable[[], object]]] = {
    "cosine": ("cosine", lambda: keras.optimizers.schedules.CosineDecay(RATE, TOTAL)),
    "cosine to a share": (
        {"kind": "cosine", "final_share": 0.2},
        lambda: keras.optimizers.schedules.CosineDecay(RATE, TOTAL, alpha=0.2),
    ),
    "linear": (
        "linear",
        lambda: keras.optimizers.schedules.PolynomialDecay(RATE, TOTAL, end_learning_rate=0.0),
    ),
    "polynomial": (
        {"kind": "polynomial", "power": 2.5, "final_share": 0.1},
        lambda: keras.optimizers.schedules.PolynomialDecay(RATE, TOTAL, 0.1 * RATE, power=2.5),
    ),
    "exponential": (
        {"kind": "exponential", "decay_rate": 0.8, "decay_steps": 7},
        lambda: keras.optimizers.schedules.ExponentialDecay(RATE, 7, 0.8),
    ),
    "stairs": (
        {"kind": "exponential", "decay_rate": 0.8, "decay_steps": 7, "staircase": True},
        lambda: keras.optimizers.schedules.ExponentialDecay(RATE, 7, 0.8, staircase=True),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_equals_keras(name: str) -> None:
    schedule, build_peer = PEERS[name]
    steps = [0, 1, 6, 7, 13, 50, 99, 100, 130]
    expected = [float(build_peer()(step)) for step in steps]  # type: ignore[operator]
    np.testing.assert_allclose(rates(steps, schedule=schedule), expected, rtol=1e-5, atol=1e-7)


def test_warm_up_rises_in_a_line_then_the_schedule_has_the_steps_that_are_left() -> None:
    found = rates([0, 1, 9, 10, 55, 100], schedule="linear", warmup_steps=10)
    np.testing.assert_allclose(found, RATE * np.array([0.1, 0.2, 1, 1, 0.5, 0]), atol=1e-6)
    constant = rates([0, 3, 4, 90], warmup_steps=4)
    np.testing.assert_allclose(constant, RATE * np.array([0.25, 1, 1, 1]), rtol=1e-6)


def test_inverse_sqrt_is_the_transformers_schedule() -> None:
    steps = np.arange(1, 90)
    vaswani = np.minimum(steps**-0.5, steps * 16**-1.5)
    found = rates((steps - 1).tolist(), schedule="inverse_sqrt", warmup_steps=16)
    np.testing.assert_allclose(found, RATE * vaswani / vaswani.max(), rtol=1e-5)
    flat = rates([0, 8, 35], schedule={"kind": "inverse_sqrt", "flat_steps": 9})
    np.testing.assert_allclose(flat, RATE * np.array([1, 1, 0.5]), rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["constant", "cosine", "linear", "inverse_sqrt"]),
    warmup=st.integers(1, 150),
    step=st.integers(0, 300),
)
def test_the_rate_never_leaves_zero_to_the_configured_one(
    kind: str, warmup: int, step: int
) -> None:
    rate = rates([step], schedule=kind, warmup_steps=warmup)[0]
    assert 0 <= rate <= RATE * (1 + 1e-6)
    assert step >= warmup or rate > 0
