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
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.artefacts.run import RUN_CARD_FILE, read_json, write_json
from conf.errors import ConfigError
from conf.load import override_config
from conf.metrics import is_minimised
from conf.schema import fingerprint
from conf.storage.atomic_output import write_text_atomic
from conf.training.sweep import ChoicesConfig, SweepConfig
from conf.training.train import TrainConfig
from conf.yaml_text import dump_yaml
from training.monitoring.epoch_records import EpochRecord, StepValidation, read_history
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_step_validations
from training.run_directory import locked, make_entry, run_paths
from training.trials import (
    TRIAL_ERRORS,
    TrialEndedError,
    TrialProgress,
    build_trial,
    describe_values,
    find_metric,
    fit_trial,
    name_trial,
)

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

    metric = find_sweep_metric(config, sweep)
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


def find_sweep_metric(config: TrainConfig, sweep: SweepConfig) -> str:
    """Returns the metric that the trials of a sweep are compared by.

    Raises:
        ConfigError: Trials would not measure it.
    """
    return find_metric(config, sweep.metric, "the metric of the sweep")


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
        name = name_trial(trial.number)
        text = f"{name} ({self.sweep.trial_count} in all): {describe_values(values)}"
        self.progress.message(text, trial=trial.number, values=values)
        try:
            run = self._fit(trial, values)
            value = _read_kept(run).value(self.metric)
            if math.isnan(value):
                raise ConfigError(f"{self.metric} is not defined on the held-out rows")
        except TRIAL_ERRORS as error:
            self.progress.message(f"{name}: {error.what}", trial=trial.number)
            trial.set_user_attr("detail", error.what)
            pruned = isinstance(error, TrialEndedError)
            self.study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
        else:
            trial.set_user_attr("detail", str(run))
            self.study.tell(trial, value)
        return True

    def _fit(self, trial: Any, values: dict[str, Any]) -> Path:
        config = build_trial(self.config, self.directory, trial.number, values)
        progress: TrainingProgress = self.progress
        if self.sweep.prune_after_epochs is not None:
            progress = TrialProgress(progress, partial(self._prune, trial))
        return fit_trial(self.config, config, self.metric, progress)

    def _prune(self, trial: Any, record: EpochRecord) -> None:
        """Reports an epoch to Optuna, and ends the trial where it is worse than the median."""
        trial.report(record.value(self.metric), record.epoch - 1)
        if trial.should_prune():
            why = f"{self.metric} is worse than the median of the trials before"
            raise TrialEndedError(f"pruned after epoch {record.epoch}: {why}")

    def write(self) -> SweepResult:
        """Writes `trials.json` and `best.yaml`, and returns what they hold."""
        trials = tuple(self._describe(trial) for trial in self.study.get_trials(deepcopy=False))
        best = None
        if any(trial.value is not None for trial in trials):
            best = trials[self.study.best_trial.number]
            config = override_config(self.config, best.values, f"of {name_trial(best.number)}")
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
