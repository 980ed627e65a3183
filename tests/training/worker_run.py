"""One worker of a run; writes its weights: `python -m tests.training.worker_run CONFIG.json …`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from conf.errors import SluiceError
from conf.training import TrainConfig
from tests.training.killed_run import Silent
from training.fit import fit_run
from training.progress import TrainingProgress
from training.trainer import Trainer


class SignalAt(Silent):
    """Sends this process a signal after a step of the run; 0: never."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def step(self, status: Any) -> None:
        if self._step and (status.epoch - 1) * status.steps + status.step == self._step:
            os.kill(os.getpid(), self._number)


def fit_and_keep(
    config: TrainConfig, progress: TrainingProgress, weights: str | Path, *, resume: bool = False
) -> None:
    """Trains, and writes the last weights."""
    fit = Trainer.fit

    def fit_then_keep(self: Trainer, *arguments: Any) -> Any:
        result = fit(self, *arguments)
        np.savez(weights, *(variable.numpy() for variable in self.model.trainable_variables))
        return result

    with mock.patch.object(Trainer, "fit", fit_then_keep):
        fit_run(config, progress, resume=resume)


def main(config: str, weights: str, resume: str, step: str, number: str) -> int:
    """Trains, keeps the last weights, and returns the exit code."""
    try:
        resolved = TrainConfig.model_validate_json(Path(config).read_text())
        progress = SignalAt(int(step), signal.Signals[number])
        fit_and_keep(resolved, progress, weights, resume=resume == "resume")
    except SluiceError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
