"""One worker of a run; writes its weights."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from conf.training.train import TrainConfig
from tests.training.processes import ClusterTask
from training.embedding.worker_rows import RowExchange
from training.fit import fit_run
from training.loop.trainer import Trainer
from training.monitoring.progress import TrainingProgress


class SignalAt(TrainingProgress):
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
        model = self.parts.model
        tables = [model.tables[name].rows for name in sorted(model.tables)]
        np.savez(weights, *(part.numpy() for part in (*tables, *model.dense_variables)))
        return result

    with mock.patch.object(Trainer, "fit", fit_then_keep):
        fit_run(config, progress, resume=resume)


@contextmanager
def dying_in(collective: str, call: int) -> Iterator[None]:
    """Kills this process in a collective of `RowExchange` that the others are in by then.

    Args:
        collective: Name of the method.
        call: Number of its call, from 1 on; 0: none.
    """
    method, calls = getattr(RowExchange, collective), itertools.count(1)

    def die() -> int:
        if next(calls) == call:
            time.sleep(1.0)  # Until the others wait for what this process has to send.
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def dying(self: RowExchange, tensors: Any, *arguments: Any) -> Any:
        with tf.control_dependencies([tf.py_function(die, [], tf.int64)] if call else []):
            tensors = tf.nest.map_structure(tf.identity, tensors)
        return method(self, tensors, *arguments)

    with mock.patch.object(RowExchange, collective, dying):
        yield


@dataclass(frozen=True)
class Worker(ClusterTask):
    """What a worker does.

    Attributes:
        weights: Where its last weights go.
        stop: Step after which it sends itself a signal, and that signal; step 0: it does not.
        dies_in: Collective of rows in which it is killed, and the number of the call; 0: in none.
    """

    weights: Path
    stop: tuple[int, str]
    dies_in: tuple[str, int] = ("gather", 0)


def run_worker(worker: Worker) -> None:
    """Trains, keeps the last weights, and ends the process."""
    step, number = worker.stop
    with worker.in_cluster():
        config = TrainConfig.model_validate_json(worker.config.read_text())
        progress = SignalAt(step, signal.Signals[number])
        with dying_in(*worker.dies_in):
            fit_and_keep(config, progress, worker.weights, resume=worker.resume)
