"""Hyperparameter sweeps by Optuna: trials one after the other, each a run of its own.

<root>/<name>/sweeps/<UTC time>-<hash>/
    sweep.json       the space and the config that it starts from
    study.sqlite3    the trials, for Optuna and its dashboard
    trials.json      the trials, for readers and scripts
    best.yaml        config of the best trial
    trials/<number>/runs/<id>/   a run as any other
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.run import RUN_CARD_FILE, read_json, resolve_run, write_json
from conf.errors import ConfigError, SluiceError, TooFewRowsError, TrainingDivergedError
from conf.load import override_config
from conf.metrics import LOSS_METRIC, is_minimised
from conf.schema import fingerprint
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import find_path
from conf.training.refit import RefitConfig
from conf.training.sweep import ChoicesConfig, SweepConfig
from conf.training.train import TrainConfig
from conf.yaml_text import dump_yaml
from training.fit import fit_run
from training.loop.early_stopping import (
    RETRIEVAL_METRIC,
    check_evaluated,
    default_metric,
    measures_loss,
    selection_metric,
)
from training.loop.validation import is_validated
from training.monitoring.epoch_records import (
    EpochRecord,
    StepValidation,
    read_history,
)
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_step_validations
from training.run_directory import find_unfinished_run, locked, make_entry, run_paths

BEST_FILE = "best.yaml"


@dataclass(frozen=True)
class TrialRecord:
    """A trial.

    Attributes:
        number: From 0.
        state: `complete`, `pruned`, `fail`, `running` or `waiting`.
        values: Its value of each key of the space.
        value: The metric at the epoch whose weights are kept; None unless it is complete.
        seconds: How long it took, None while it runs; with the pauses of what was resumed.
        detail: Directory of its run, or what ended it.
    """

    number: int
    state: str
    values: dict[str, Any]
    value: float | None
    seconds: float | None
    detail: str

    @property
    def run(self) -> Path | None:
        """Directory of its run; None unless it is complete."""
        return None if self.value is None else Path(self.detail)


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended: its directory, the metric, the trials by number, the best complete one."""

    directory: Path
    metric: str
    trials: tuple[TrialRecord, ...]
    best: TrialRecord | None

    @property
    def is_minimised(self) -> bool:
        """Whether a lower metric is better."""
        return is_minimised(self.metric)

    @property
    def keys(self) -> list[str]:
        """Keys of the space, in the order of the trials' values."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))

    @property
    def best_config(self) -> Path | None:
        """The config of the best trial, if there is one."""
        return None if self.best is None else self.directory / BEST_FILE


class TrialPrunedError(SluiceError):
    """A trial was ended early; the sweep goes on."""


class _PruningProgress:
    """Progress that reports each epoch's metric to an Optuna trial as well."""

    def __init__(self, progress: TrainingProgress, trial: Any, metric: str) -> None:
        self._trial, self._metric, self._show = trial, metric, progress.epoch
        self.message, self.step, self.close = progress.message, progress.step, progress.close

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """Shows the epoch, and ends the trial where its metric is worse than the median."""
        self._show(record, best, metric)
        self._trial.report(record.value(self._metric), record.epoch - 1)
        if self._trial.should_prune():
            why = f"{self._metric} is worse than the median of the trials before"
            raise TrialPrunedError(f"pruned after epoch {record.epoch}: {why}")


def run_sweep(
    config: TrainConfig,
    sweep: SweepConfig,
    progress: TrainingProgress,
    *,
    resume: bool = False,
    after: Callable[[SweepResult], None] | None = None,
) -> SweepResult:
    """Runs the trials that are left and returns all of them.

    A trial that diverges, or whose values do not go together, has failed, and the next one begins.

    Args:
        config: What trials start from.
        sweep: What they try.
        progress: Shows how it goes.
        resume: Whether to go on with the newest sweep of the same space and config, at the
            position of the trial that was interrupted.
        after: Called with all trials when one has ended, and at the end.

    Raises:
        ModuleNotFoundError: Optuna is not installed.
        ConfigError: The space or the metric does not fit the config or the dataset.
        TrainingInterruptedError: A signal came; the state of the trial is saved.
        SluiceError: Training failed for a reason that the next trial would meet too.
    """
    import optuna  # noqa: F401  # refused before anything is made

    metric = find_metric(config, sweep)
    sweep.check(config)
    directory = _open_directory(config, sweep, resume)
    with locked(directory):
        runner = _Sweep(config, sweep, progress, directory, metric)
        is_left = True
        while is_left:
            is_left = runner.run_next()
            result = runner.write()
            if after is not None:
                after(result)
        return result


def find_metric(config: TrainConfig, sweep: SweepConfig | RefitConfig) -> str:
    """Returns the metric that trials are compared by.

    Raises:
        ConfigError: Trials would not measure it.
    """
    metric = sweep.metric or selection_metric(config) or default_metric(config)
    if metric == LOSS_METRIC:
        if isinstance(sweep, RefitConfig) and not measures_loss(config):
            raise ConfigError(
                "fit.refit compares trials by held-out rows, which are ranked and have no loss",
                received=f"fit.refit.metric: {metric}",
                allowed=f"metrics of ranking, such as {RETRIEVAL_METRIC}",
                fix=f"set fit.refit.metric={RETRIEVAL_METRIC}, or leave it out",
            )
        stopping = config.fit.early_stopping
        if stopping is not None and stopping.by == "steps" and not measures_loss(config):
            raise ConfigError(
                "trials keep the weights of a step, whose validation ranks rows and has no loss",
                received=f"the metric {metric} with fit.early_stopping.by=steps",
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
    check_evaluated(config, metric, "the metric of the sweep")
    return metric


def check_comparable(config: TrainConfig, trial: TrainConfig, metric: str) -> None:
    """Refuses a trial whose loss is of training where that of others is of held-out rows.

    Args:
        config: What is tried on.
        trial: The config of the trial.
        metric: What trials are compared by.

    Raises:
        ConfigError: The losses are not of the same rows.
    """
    if metric == LOSS_METRIC and measures_loss(trial) != measures_loss(config):
        raise ConfigError(
            "its loss cannot be compared with that of other trials: one is of held-out rows, the "
            "other of training, as rows that are ranked have none",
            received=f"a loss of {'held-out rows' if measures_loss(trial) else 'training'}",
            allowed="trials whose loss is of the same rows",
            fix="compare trials of different objectives by a metric of ranking",
        )


def suggest_values(trial: Any, sweep: SweepConfig) -> dict[str, Any]:
    """Returns an Optuna trial's value of each key; a trial that has values keeps them."""
    values = {}
    for key, found in sweep.space.items():
        if isinstance(found, ChoicesConfig):
            values[key] = json.loads(trial.suggest_categorical(key, found.texts))
        elif found.integer:
            step = int(found.step or 1)
            values[key] = trial.suggest_int(key, *found.ends, step=step, log=found.log)
        else:
            values[key] = trial.suggest_float(key, *found.ends, step=found.step, log=found.log)
    return values


def read_values(params: Mapping[str, Any], sweep: SweepConfig) -> dict[str, Any]:
    """Returns the values that an Optuna trial's parameters stand for."""
    return {
        key: json.loads(value) if isinstance(sweep.space[key], ChoicesConfig) else value
        for key, value in params.items()
    }


def _read_kept(run: Path) -> EpochRecord | StepValidation:
    """The validation of the weights that a run has kept."""
    training = read_json(run / RUN_CARD_FILE)["training"]
    for record in read_step_validations(run):
        if record.step == training.get("best_step"):
            return record
    return read_history(run)[training["best_epoch"] - 1]


def _open_directory(config: TrainConfig, sweep: SweepConfig, resume: bool) -> Path:
    """A new directory, or on resuming the newest of the same config and space.

    The number of trials is no part of the space: with more of them a finished sweep goes on.
    """
    parent = run_paths(config).base / "sweeps"
    space = sweep.model_dump(mode="json", exclude={"trials"})
    content = {"config": config.resolved(), "sweep": space}
    sha256 = fingerprint(content)
    for file in sorted(parent.glob("*/sweep.json"), reverse=True) if resume else ():
        if read_json(file).get("sha256") == sha256:
            return file.parent
    directory = make_entry(parent, sha256)
    write_json(directory / "sweep.json", {**content, "sha256": sha256})
    return directory


@dataclass(frozen=True)
class _Sweep:
    """A sweep while it runs: an Optuna study whose trials are training runs."""

    config: TrainConfig
    sweep: SweepConfig
    progress: TrainingProgress
    directory: Path
    metric: str

    @cached_property
    def study(self) -> Any:
        """The Optuna study, made where there is none yet."""
        import optuna
        from sqlalchemy.engine import URL

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warmup = (self.sweep.prune_after_epochs or 1) - 1  # Without pruning no trial asks.
        url = URL.create("sqlite", database=str((self.directory / "study.sqlite3").resolve()))
        study = optuna.create_study(
            storage=url.render_as_string(),
            study_name="sweep",
            direction="minimize" if is_minimised(self.metric) else "maximize",
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=warmup),
            load_if_exists=True,
        )
        for point in self.sweep.list_grid() if self.sweep.sampler == "grid" else ():
            study.enqueue_trial(point, skip_if_exists=True)
        return study

    def _next_trial(self) -> Any | None:
        """The trial that was interrupted, else a new one; None where all are done."""
        from optuna import samplers
        from optuna.trial import Trial, TrialState

        trials = self.study.get_trials(deepcopy=False)
        running = next((trial for trial in trials if trial.state == TrialState.RUNNING), None)
        number = running.number if running else sum(t.state != TrialState.WAITING for t in trials)
        if running is None and number >= self.sweep.trial_count:
            return None
        # A sampler per trial: a sweep that was interrupted draws what it would have drawn.
        seed = int(np.random.SeedSequence([self.sweep.seed, number]).generate_state(1)[0])
        kind = samplers.TPESampler if self.sweep.sampler == "tpe" else samplers.RandomSampler
        self.study.sampler = kind(seed=seed)
        return Trial(self.study, running._trial_id) if running else self.study.ask()

    def run_next(self) -> bool:
        """Runs a trial; False where none is left."""
        from optuna.trial import TrialState

        trial = self._next_trial()
        if trial is None:
            return False
        values = suggest_values(trial, self.sweep)
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        text = f"trial {trial.number + 1} of {self.sweep.trial_count}: {shown}"
        self.progress.message(text, trial=trial.number, values=values)
        try:
            run = self._fit(trial, values)
            value = _read_kept(run).value(self.metric)
            if math.isnan(value):
                raise ConfigError(f"{self.metric} is not defined on the held-out rows")
        except (TrialPrunedError, TrainingDivergedError, ConfigError, TooFewRowsError) as error:
            self.progress.message(f"trial {trial.number + 1}: {error.what}", trial=trial.number)
            trial.set_user_attr("detail", error.what)
            pruned = isinstance(error, TrialPrunedError)
            self.study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
        else:
            trial.set_user_attr("detail", str(run))
            self.study.tell(trial, value)
        return True

    def _fit(self, trial: Any, values: dict[str, Any]) -> Path:
        where = {"root": str(self.directory / "trials"), "name": f"{trial.number:04d}"}
        config = override_config(self.config, {**values, **where}, f"of trial {trial.number}")
        check_comparable(self.config, config, self.metric)
        current = run_paths(config).current
        if current.exists():  # Killed after its last step, before Optuna was told.
            return resolve_run(str(current.parent))
        progress: TrainingProgress = self.progress
        if self.sweep.prune_after_epochs is not None:
            progress = _PruningProgress(progress, trial, self.metric)
        return fit_run(config, progress, resume=find_unfinished_run(config) is not None)

    def write(self) -> SweepResult:
        """Writes `trials.json` and `best.yaml`, and returns what they hold."""
        trials = tuple(self._describe(trial) for trial in self.study.get_trials(deepcopy=False))
        best = None
        if any(trial.value is not None for trial in trials):
            best = trials[self.study.best_trial.number]
            config = override_config(self.config, best.values, f"of trial {best.number}")
            text = dump_yaml(config.resolved())
            write_text_atomic(self.directory / BEST_FILE, text)
        listed = {"best": best and best.number, "trials": [asdict(trial) for trial in trials]}
        write_json(self.directory / "trials.json", {"metric": self.metric, **listed})
        return SweepResult(self.directory, self.metric, trials, best)

    def _describe(self, trial: Any) -> TrialRecord:
        return TrialRecord(
            number=trial.number,
            state=trial.state.name.lower(),
            values=read_values(trial.params, self.sweep),
            value=trial.value if trial.state.name == "COMPLETE" else None,
            seconds=trial.duration.total_seconds() if trial.duration else None,
            detail=str(trial.user_attrs.get("detail", "")),
        )
