from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from conf.training.train import StepRange
from training.distribution.strategy import StepsResult
from training.monitoring import run_logs as module
from training.monitoring.progress import LineProgress, TrainingProgress
from training.monitoring.run_logs import (
    EpochLog,
    EpochRecord,
    RecordLog,
    StepProfiler,
    StepRecord,
    read_steps,
)


def record(step: int) -> StepRecord:
    return StepRecord(step, 1 + step // 10, 1 / (step + 3), 100.0, 0.25)


def write(run: Path, steps: range, finished: int = 0) -> None:
    log = RecordLog(run / "metrics.jsonl", StepRecord, finished)
    for step in steps:
        log.write(record(step))
    log.sync()
    log.close()


def test_a_line_per_record_that_brings_every_bit_back(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    write(tmp_path, range(1, 6))
    assert read_steps(tmp_path) == [record(step) for step in range(1, 6)]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    names = {"step", "epoch", "loss", "examples_per_s", "input_wait_share"}
    assert set(json.loads(lines[0])) == names


@pytest.mark.parametrize("finished", [0, 3, 5, 9])
def test_what_is_done_again_is_cut_off(tmp_path: Path, finished: int) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(finished + 1, 8), finished)
    expected = [*range(1, min(finished, 5) + 1), *range(finished + 1, 8)]
    assert [line.step for line in read_steps(tmp_path)] == expected


@pytest.mark.parametrize("torn", [b'{"step": 6, "epo', b"\xff\xfe", b"[]\n", b'{"step": 6}\n'])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    write(tmp_path, range(6, 8), 5)
    assert [line.step for line in read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


RECORD = EpochRecord(1, 0.5, 2.0, 100, 50.0, 0.25, {"mrr": 0.125})


def test_an_epoch_is_one_point_per_metric(tmp_path: Path) -> None:
    log = EpochLog(tmp_path)
    log.write(RECORD, 7)
    log.close()
    (file,) = tmp_path.glob("events.*")
    points = {
        value.tag: (event.step, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert points == {
        "train/loss": (7, 0.5),
        "train/examples_per_s": (7, 50.0),
        "train/input_wait_share": (7, 0.25),
        "validation/mrr": (7, 0.125),
    }


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
        profiled = StepProfiler(steps, StepRange(start, start + length), TrainingProgress())
        with profiled.begin(Path("logs"), first):
            losses = [profiled(None, tf.constant(7)).losses.numpy() for _ in range(10)]
    assert np.concatenate(losses).tolist() == list(range(first, first + 70))
    expected = [max(start, first), start + length] if start + length > first else []
    assert seen == expected


def test_a_loss_that_is_not_finite_ends_the_call(marks: list[str]) -> None:
    steps, told = Steps(0, broken=3), io.StringIO()
    profiled = StepProfiler(steps, StepRange(2, 5), LineProgress(told, 1.0))
    with profiled.begin(Path("logs"), 0):
        losses = profiled(None, tf.constant(9)).losses.numpy()
    assert losses[:3].tolist() == [0, 1, 2]
    assert len(losses) == 4
    assert marks == ["start", "stop"]
    assert "profiled steps 3 to 4" in told.getvalue()
