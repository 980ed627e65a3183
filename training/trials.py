"""Trials: runs that are compared by a metric, by a sweep or by `fit.refit`.

Both keep their trials as `trials/<number>/runs/<id>/`, each a run as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.run import resolve_run
from conf.errors import ConfigError, SluiceError, TooFewRowsError, TrainingDivergedError
from conf.load import override_config
from conf.metrics import LOSS_METRIC
from conf.storage.locations import find_path
from conf.training.train import TrainConfig
from training.fit import fit_run
from training.loop.plan import (
    RETRIEVAL_METRIC,
    check_evaluated,
    default_metric,
    is_scored_by_label,
    is_validated,
    keeps_steps_without_loss,
    selection_metric,
)
from training.monitoring.epoch_records import EpochRecord
from training.monitoring.progress import TrainingProgress
from training.run_directory import find_unfinished_run, run_paths


class TrialEndedError(SluiceError):
    """A trial was ended early; the next one begins."""


TRIAL_ERRORS = (TrialEndedError, TrainingDivergedError, ConfigError, TooFewRowsError)
"""What ends a trial and not those after it; once code of one's own is corrected, all go on."""


@dataclass
class TrialProgress:
    """Progress of a trial that a check after each epoch may end.

    Attributes:
        show: Shows how it goes.
        check: Called when an epoch has been shown; ends the trial by a `TrialEndedError`.
    """

    show: TrainingProgress
    check: Callable[[EpochRecord], None]

    def __post_init__(self) -> None:
        self.message, self.step, self.close = self.show.message, self.show.step, self.show.close

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """Shows the epoch, and checks it."""
        self.show.epoch(record, best, metric)
        self.check(record)


def find_metric(config: TrainConfig, asked: str | None, name: str) -> str:
    """Returns the metric that trials are compared by.

    Args:
        config: What trials start from.
        asked: The metric that was asked for; None: what chooses the epoch.
        name: What it is called in the message.

    Raises:
        ConfigError: Trials would not measure it.
    """
    metric = asked or selection_metric(config) or default_metric(config)
    if metric == LOSS_METRIC:
        if keeps_steps_without_loss(config):
            raise ConfigError(
                "trials keep the weights of a step, whose validation ranks rows and has no loss",
                received=f"the metric {LOSS_METRIC} with fit.early_stopping.by=steps",
                allowed=f"metrics of ranking, such as {RETRIEVAL_METRIC}",
                fix=f"compare by {RETRIEVAL_METRIC}, or set fit.early_stopping.by=epochs",
            )
        return metric
    version = resolve_version(find_path(config.dataset))
    if not is_validated(config, read_manifest(version, config.input.tolerates)):
        raise ConfigError(
            "trials are compared by a validation metric, and the dataset has no validation split",
            received=metric,
            allowed=LOSS_METRIC,
            fix="set `metric: loss` in the sweep's file, hold rows of train out by "
            "input.validation, or build the dataset with a validation split",
        )
    check_evaluated(config, metric, name)
    return metric


def name_trial(number: int) -> str:
    """Returns what messages call a trial: by its number from 0, as its folder and its row are."""
    return f"trial {number}"


def describe_values(values: Mapping[str, Any]) -> str:
    """Returns the values of a trial in words."""
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "as configured"


def build_trial(
    config: TrainConfig, directory: Path, number: int, values: Mapping[str, Any]
) -> TrainConfig:
    """Returns the config of a trial.

    Args:
        config: What trials start from.
        directory: Directory of the sweep or the refit.
        number: From 0.
        values: Its value of each key that is tried.

    Raises:
        ConfigError: The values do not go together.
    """
    where = {"root": str(directory / "trials"), "name": f"{number:04d}"}
    return override_config(config, {**values, **where}, f"of {name_trial(number)}")


def fit_trial(
    config: TrainConfig, trial: TrainConfig, metric: str, progress: TrainingProgress
) -> Path:
    """Trains a trial, or goes on with it, or takes what is there; returns its run.

    Args:
        config: What trials start from.
        trial: The config of the trial.
        metric: What trials are compared by.
        progress: Shows how it goes, and may end the trial.

    Raises:
        TrainingInterruptedError: A signal came; the state is saved.
        SluiceError: One of `TRIAL_ERRORS`, or what the next trial would meet too.
    """
    _check_comparable(config, trial, metric)
    current = run_paths(trial).current
    if current.exists():  # Killed after its last step, before that was noted.
        return resolve_run(str(current.parent))
    return fit_run(trial, progress, resume=find_unfinished_run(trial) is not None)


def _check_comparable(config: TrainConfig, trial: TrainConfig, metric: str) -> None:
    """Refuses a trial whose loss is of training where that of others is of held-out rows."""
    if metric == LOSS_METRIC and is_scored_by_label(trial) != is_scored_by_label(config):
        raise ConfigError(
            "its loss cannot be compared with that of other trials: one is of held-out rows, the "
            "other of training, as rows that are ranked have none",
            received=f"a loss of {'held-out rows' if is_scored_by_label(trial) else 'training'}",
            allowed="trials whose loss is of the same rows",
            fix="compare trials of different objectives by a metric of ranking",
        )
