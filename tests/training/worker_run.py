"""One worker of a run; writes its weights: `python -m tests.training.worker_run CONFIG.json …`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from conf.errors import SluiceError
from conf.training import TrainConfig
from tests.training.killed_run import Silent
from training.fit import fit_run
from training.trainer import Trainer


class SignalAt(Silent):
    """Sends this process a signal after a step of the run; 0: never."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def step(self, status: Any) -> None:
        if self._step and (status.epoch - 1) * status.steps + status.step == self._step:
            os.kill(os.getpid(), self._number)


def main(config: str, weights: str, resume: str, step: str, number: str) -> int:
    """Trains, keeps the last weights, and returns the exit code."""
    fit = Trainer.fit

    def fit_and_keep(self: Trainer, *arguments: Any) -> Any:
        result = fit(self, *arguments)
        np.savez(weights, *(variable.numpy() for variable in self.model.trainable_variables))
        return result

    Trainer.fit = fit_and_keep  # type: ignore[method-assign]
    try:
        resolved = TrainConfig.model_validate_json(Path(config).read_text())
        fit_run(resolved, SignalAt(int(step), signal.Signals[number]), resume=resume == "resume")
    except SluiceError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
