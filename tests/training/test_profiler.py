from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.training.profile import StepRange
from training import profiler as module
from training.profiler import StepProfiler
from training.step import StepsResult


class Told:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str, **fields: object) -> None:
        self.texts.append(text)


class Steps:
    """Counts calls; loss of a step is its number, and not finite in one step."""

    def __init__(self, first: int, broken: int | None = None) -> None:
        self.done, self.broken, self.calls = first, broken, list[int]()

    def __call__(self, iterator: object, steps: tf.Tensor) -> StepsResult:
        losses = np.arange(self.done, self.done + int(steps), dtype=np.float32)
        if self.broken in losses:
            losses = losses[: int(self.broken - self.done) + 1]
            losses[-1] = np.nan
        self.calls.append(int(steps))
        self.done += len(losses)
        return StepsResult(tf.constant(losses), tf.constant(0.5, tf.float64))


@pytest.fixture
def marks(monkeypatch) -> list[str]:
    found: list[str] = []
    experimental = module.tf.profiler.experimental
    monkeypatch.setattr(experimental, "start", lambda logs: found.append("start"))
    monkeypatch.setattr(experimental, "stop", lambda: found.append("stop"))
    return found


@given(st.integers(0, 30), st.integers(1, 20), st.integers(0, 12))
def test_losses_are_those_of_one_call_and_the_range_is_exact(
    start: int, length: int, first: int
) -> None:
    steps, seen = Steps(first), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start", "stop"):
            patch.setattr(module.tf.profiler.experimental, name, lambda *_: seen.append(steps.done))
        profiled = StepProfiler(steps, StepRange(start, start + length), Told())
        with profiled.begin(Path("logs"), first):
            losses = [profiled(None, tf.constant(7)).losses.numpy() for _ in range(10)]
    assert np.concatenate(losses).tolist() == list(range(first, first + 70))
    expected = [max(start, first), start + length] if start + length > first else []
    assert seen == expected


def test_a_loss_that_is_not_finite_ends_the_call(marks: list[str]) -> None:
    steps, told = Steps(0, broken=3), Told()
    profiled = StepProfiler(steps, StepRange(2, 5), told)
    with profiled.begin(Path("logs"), 0):
        losses = profiled(None, tf.constant(9)).losses.numpy()
    assert losses[:3].tolist() == [0, 1, 2]
    assert len(losses) == 4
    assert marks == ["start", "stop"]
    assert "profiled steps 3 to 4" in told.texts[0]


def test_a_range_that_was_never_reached_is_told(marks: list[str]) -> None:
    told = Told()
    profiled = StepProfiler(Steps(0), StepRange(50, 60), told)
    with profiled.begin(Path("logs"), 0):
        profiled(None, tf.constant(9))
    assert marks == []
    assert "nothing was profiled" in told.texts[0]
