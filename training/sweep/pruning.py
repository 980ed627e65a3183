"""Ends a trial whose validation metric stays behind that of the others."""

from __future__ import annotations

from typing import Any

from conf.errors import SluiceError
from training.history import LOSS_METRIC, EpochRecord
from training.progress import StepStatus, TrainingProgress


class TrialPrunedError(SluiceError):
    """A trial was ended early; the sweep goes on."""


class PruningProgress:
    """Passes everything on, and tells Optuna each epoch's metric.

    Args:
        progress: Where to pass it on to.
        trial: The Optuna trial.
        metric: What trials are compared by.
    """

    def __init__(self, progress: TrainingProgress, trial: Any, metric: str) -> None:
        self._progress, self._trial, self._metric = progress, trial, metric

    def message(self, text: str, **fields: Any) -> None:
        """Passes the message on."""
        self._progress.message(text, **fields)

    def step(self, status: StepStatus) -> None:
        """Passes the status on."""
        self._progress.step(status)

    def epoch(self, record: EpochRecord, best: bool) -> None:
        """Passes the epoch on and ends the trial where it is far behind.

        Raises:
            TrialPrunedError: The metric is worse than the median of the trials before.
        """
        self._progress.epoch(record, best)
        self._trial.report(read_metric(record, self._metric), record.epoch - 1)
        if self._trial.should_prune():
            raise TrialPrunedError(
                f"pruned after epoch {record.epoch}: {self._metric} is below the median of the "
                "trials before"
            )

    def close(self) -> None:
        """Passes it on."""
        self._progress.close()


def read_metric(record: EpochRecord, metric: str) -> float:
    """Returns a metric of an epoch as it is, the loss with its own sign.

    Raises:
        ConfigError: The epoch has no such metric.
    """
    value = record.metric(metric)
    return -value if metric == LOSS_METRIC else value
