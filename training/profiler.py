"""A profile of some steps: what each device and each thread did, for TensorBoard."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.training.profile import StepRange
from training.progress import TrainingProgress
from training.step import RunSteps, StepsResult

PLUGIN = "tensorboard-plugin-profile"


class StepProfiler:
    """Runs steps as another function does, and profiles those of a range.

    Compiled calls that reach over an end of the range are cut in two there, so it is exact; steps
    give the same losses and weights either way.

    Args:
        run_steps: Runs steps in one compiled call.
        wanted: Steps to profile.
        progress: Where to tell.
    """

    def __init__(self, run_steps: RunSteps, wanted: StepRange, progress: TrainingProgress) -> None:
        self._run_steps, self._wanted, self._progress = run_steps, wanted, progress
        self._logs: Path | None = None
        self._step = 0
        self._started_at: int | None = None

    def begin(self, logs: Path, step: int) -> closing[StepProfiler]:
        """Says where the run stands and where to write; leaving the context ends the profile.

        Args:
            logs: Directory of TensorBoard's files.
            step: Steps of the run so far.
        """
        self._logs, self._step = logs, step
        return closing(self)

    def __call__(self, iterator: Any, steps: tf.Tensor) -> StepsResult:
        """Runs the steps, one call for each part on either side of the range."""
        left, results = int(steps), list[StepsResult]()
        while left:
            self._start_or_stop()
            ends = [e - self._step for e in (self._wanted.start, self._wanted.end)]
            part = min([left, *(end for end in ends if end > 0)])
            result = self._run_steps(iterator, tf.constant(part))
            results.append(result)
            losses = result.losses.numpy()
            self._step += len(losses)
            left -= part
            if not np.isfinite(losses[-1]):
                break
        self._start_or_stop()
        if len(results) == 1:
            return results[0]
        return StepsResult(
            tf.concat([result.losses for result in results], axis=0),
            tf.add_n([result.wait_s for result in results]),
        )

    def close(self) -> None:
        """Ends the profile where the run has ended inside of the range."""
        if self._started_at is not None:
            self._stop()
        elif self._logs is not None:
            self._progress.message(
                f"nothing was profiled: this process has run no step of "
                f"{self._wanted.start}:{self._wanted.end}"
            )

    def _start_or_stop(self) -> None:
        if self._started_at is None and self._wanted.start <= self._step < self._wanted.end:
            tf.profiler.experimental.start(str(self._logs))
            self._started_at = self._step
        elif self._started_at is not None and self._step >= self._wanted.end:
            self._stop()

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        first, logs = self._started_at, self._logs
        self._started_at = self._logs = None
        self._progress.message(
            f"profiled steps {(first or 0) + 1} to {self._step}: tensorboard --logdir {logs} "
            f"(tab Profile, by the plugin {PLUGIN})",
            profile=str(logs),
        )
