"""Trials: runs that are compared by a metric, of a sweep or of `fit.refit`.

A sweep tries a grid, or what Optuna draws; what a refit tries is in `training.refit`.

<root>/<name>/sweeps or refits/<UTC time>-<hash>/
    trials.json                  what was asked, the trials that have ended, and the run of a refit
    best.yaml                    of a sweep: config of the best trial
    trials/<number>/runs/<id>/   a run as any other
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.artefacts.run import RUN_CARD_FILE, read_json, resolve_run, write_json
from conf.errors import ConfigError, SluiceError, TooFewRowsError, TrainingDivergedError
from conf.load import override_config
from conf.manifest import MANIFEST_FILE
from conf.metrics import LOSS_METRIC, is_minimised
from conf.schema import fingerprint
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import find_path
from conf.training.input import ROWS_OF_TRIALS
from conf.training.train import TrainConfig
from conf.training.trials import ChoicesConfig, SweepConfig
from conf.yaml_text import dump_yaml
from training.fit import fit_run
from training.loop.plan import (
    RETRIEVAL_METRIC,
    check_evaluated,
    default_metric,
    is_scored_by_label,
    keeps_steps_without_loss,
    selection_metric,
)
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import EpochRecord, read_history, read_step_validations
from training.reader.training_data import (
    pin_mixed,
    read_current_data,
    read_current_mixed,
)
from training.run_directory import (
    find_unfinished_run,
    locked,
    make_entry,
    run_paths,
)

TRIALS_FILE = "trials.json"
BEST_FILE = "best.yaml"
_FIXED = {
    "root": "says where runs lie",
    "name": "says where runs lie",
    "dataset": "is the same for all trials",
    "evaluation": "decides what trials are compared by",
    "fit.refit": "is of the run, not of its trials",
}


class TrialEndedError(SluiceError):
    """A trial was ended early; the next one begins."""


_TRIAL_ERRORS = (TrialEndedError, TrainingDivergedError, ConfigError, TooFewRowsError)
"""What ends a trial and not those after it; once user code is corrected, all go on."""


@dataclass(frozen=True)
class Trial:
    """A trial that has ended: `complete`, `pruned` or `fail`.

    `detail` is the directory of its run, or what ended it; `value` and `epoch` (from 1) are its
    best ones, None unless it is complete; `curve` has the metric after each epoch, where defined.
    """

    number: int
    state: str
    values: dict[str, Any]
    detail: str
    seconds: float
    value: float | None = None
    epoch: int | None = None
    curve: list[float | None] = field(default_factory=list)

    @property
    def run(self) -> Path | None:
        return None if self.value is None else Path(self.detail)


@dataclass
class Study:
    """Trials of one config that have ended: what `trials.json` holds.

    `asked` is the fingerprint of the config and of what it tries; `dataset` and `mixed` are the
    versions that all train on; `run` is that of a refit, once it has finished.
    """

    directory: Path
    metric: str
    trials: list[Trial] = field(default_factory=list)
    asked: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    mixed: list[str] = field(default_factory=list)
    run: str | None = None

    @classmethod
    def open(cls, config: TrainConfig, kind: str, asked: str, metric: str) -> Study:
        """Makes a study of the dataset versions that are current."""
        directory = make_entry(run_paths(config).base / kind, asked)
        read = (read_current_data(config), *read_current_mixed(config))
        dataset, *mixed = (str(data.version_dir.absolute()) for data in read)
        study = cls(directory, metric, [], asked, config.resolved(), dataset, mixed)
        study.write()
        return study

    @classmethod
    def find(cls, config: TrainConfig, kind: str, asked: str) -> Study | None:
        """Returns the newest study that was asked for, if its dataset versions are still there."""
        files = sorted(run_paths(config).base.glob(f"{kind}/*/{TRIALS_FILE}"), reverse=True)
        for content, file in ((read_json(file), file) for file in files):
            if content["asked"] == asked:
                trials = [Trial(**trial) for trial in content.pop("trials")]
                content.pop("best")
                study = cls(**{**content, "directory": file.parent, "trials": trials})
                places = (study.dataset, *study.mixed)
                are_there = all((find_path(place) / MANIFEST_FILE).is_file() for place in places)
                return study if are_there else None
        return None

    def write(self) -> None:
        """Writes `trials.json`, whole or not at all."""
        best = None if self.best is None else self.best.number
        content = {"best": best, **asdict(self), "directory": str(self.directory)}
        write_json(self.directory / TRIALS_FILE, content)

    @property
    def best(self) -> Trial | None:
        return self.find_best(len(self.trials))

    def find_best(self, count: int) -> Trial | None:
        """Returns the first of the best complete trials of the first ones."""
        done = [trial for trial in self.trials[:count] if trial.value is not None]
        sign = -1.0 if self.is_minimised else 1.0
        return max(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    @property
    def is_minimised(self) -> bool:
        return is_minimised(self.metric)

    @property
    def keys(self) -> list[str]:
        """Keys that were tried, in the order of the trials' values."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))

    @property
    def best_config(self) -> Path | None:
        return None if self.best is None else self.directory / BEST_FILE

    def pin(self, config: TrainConfig) -> TrainConfig:
        """Returns a config of the dataset versions that the study began with."""
        pinned = override_config(config, {"dataset": self.dataset}, "of the trials")
        return pin_mixed(pinned, self.mixed)


# Why a trial with these values after its epochs, of so many, is ended; None: it is not.
Pace = Callable[[Study, list[float], int], str | None]
# The metric of a run, and its best epoch, from 1.
Measure = Callable[[Path, str], tuple[float, int]]


@dataclass
class _PacedProgress(TrainingProgress):
    """Progress of a trial, which is checked after each epoch, once that has been shown."""

    show: TrainingProgress
    check: Callable[[EpochRecord], None]

    def __post_init__(self) -> None:
        for name in ("message", "step", "close"):
            setattr(self, name, getattr(self.show, name))

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        self.show.epoch(record, best, metric)
        self.check(record)


@dataclass(frozen=True)
class Trials:
    """Runs the trials of a study, which start from a config, one after the other."""

    study: Study
    config: TrainConfig
    measure: Measure
    pace: Pace
    progress: TrainingProgress

    def run(self, propose: Callable[[Study], dict[str, Any] | None], most: int) -> Iterator[Trial]:
        """Runs the trials that are left, of so many at most; yields each when it is noted.

        What the next one tries is a function of those before it; None: all are done.
        """
        while (values := propose(self.study)) is not None:
            trial = self._run_one(values, most)
            self.study.trials.append(trial)
            self.study.write()
            yield trial

    def _run_one(self, values: dict[str, Any], most: int) -> Trial:
        number, metric, started = len(self.study.trials), self.study.metric, time.monotonic()
        name = f"trial {number} (at most {most} in all)"
        self.progress.message(f"{name}: {describe_values(values)}", trial=number, values=values)
        try:
            run = self._fit(build_trial(self.config, self.study.directory, number, values))
            value, epoch = self.measure(run, metric)
            if math.isnan(value):
                raise ConfigError(f"{metric} is not defined on the held-out rows")
            curve = [record.value(metric) for record in read_history(run)]
        except _TRIAL_ERRORS as error:
            if not values:  # The config alone: there is no other trial to go on with.
                raise
            self.progress.message(f"{name}: {error.what}", trial=number)
            state = "pruned" if isinstance(error, TrialEndedError) else "fail"
            return Trial(number, state, values, error.what, time.monotonic() - started)
        told = f"{name}: {metric} {value:.4f} after epoch {epoch}"
        self.progress.message(told, trial=number, value=value, epoch=epoch)
        seconds, points = time.monotonic() - started, [None if math.isnan(v) else v for v in curve]
        return Trial(number, "complete", values, str(run), seconds, value, epoch, points)

    def _fit(self, trial: TrainConfig) -> Path:
        """Trains a trial, or goes on with it, or takes what is there; returns its run."""
        has_loss = [is_scored_by_label(config) for config in (trial, self.config)]
        if self.study.metric == LOSS_METRIC and len(set(has_loss)) > 1:
            raise ConfigError(
                "its loss cannot be compared: one is of held-out rows, the other of training",
                fix="compare trials of different objectives by a metric of ranking",
            )
        current = run_paths(trial).current
        if current.exists():  # Killed after its last step, before that was noted.
            return resolve_run(str(current.parent))
        unfinished = find_unfinished_run(trial)
        before = [] if unfinished is None else read_history(unfinished)
        seen = [record.value(self.study.metric) for record in before]

        def check(record: EpochRecord) -> None:
            seen[record.epoch - 1 :] = [record.value(self.study.metric)]
            why = self.pace(self.study, seen, trial.fit.epochs or 1)
            if why is not None:
                raise TrialEndedError(f"ended after epoch {record.epoch}: {why}")

        progress = _PacedProgress(self.progress, check)
        return fit_run(trial, progress, resume=unfinished is not None)


def build_trial(
    config: TrainConfig, directory: Path, number: int, values: Mapping[str, Any]
) -> TrainConfig:
    """Returns the config of a trial; refused are values that do not go together."""
    where = {"root": str(directory / "trials"), "name": f"{number:04d}", "fit.refit": None}
    return override_config(config, {**values, **where}, f"of trial {number}")


def describe_values(values: Mapping[str, Any]) -> str:
    """Returns the values of a trial in words."""
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "as configured"


def find_metric(config: TrainConfig, asked: str | None, name: str) -> str:
    """Returns the metric that trials are compared by, else (None) what chooses the epoch."""
    metric = asked or selection_metric(config) or default_metric(config)
    if metric == LOSS_METRIC:
        if keeps_steps_without_loss(config):
            raise ConfigError(
                "trials keep the weights of a step, whose validation ranks rows and has no loss",
                fix=f"compare by {RETRIEVAL_METRIC}, or set fit.early_stopping.by=epochs",
            )
        return metric
    check_evaluated(config, metric, name)
    return metric


def check_space(config: TrainConfig, space: Mapping[str, Iterable[Any]]) -> None:
    """Refuses keys that make trials incomparable, and values that no trial may have.

    Each value is checked alone; values that do not go together end their trial.
    """
    held_out = config.input.validation is not None or "input.validation" in space
    stopping = config.fit.early_stopping
    by_steps = stopping is not None and stopping.by == "steps"
    rows = (*(ROWS_OF_TRIALS if held_out else ()), *(("fit.validation",) if by_steps else ()))
    fixed = {**_FIXED, **dict.fromkeys(rows, "decides which rows trials are measured on")}
    alone = override_config(config, {"fit.refit": None}, "of the trials")
    for key, values in space.items():
        for other, why in fixed.items():
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise ConfigError(f"{other} {why}", received=f"{key} among what is tried")
        for value in values:
            override_config(alone, {key: value}, f"of what is tried, {key}")


def find_sweep_metric(config: TrainConfig, sweep: SweepConfig) -> str:
    """Returns the metric of a sweep, and checks what it tries."""
    check_space(config, {key: found.values for key, found in sweep.space.items()})
    return find_metric(config, sweep.metric, "the metric of the sweep")


def run_sweep(
    config: TrainConfig,
    sweep: SweepConfig,
    progress: TrainingProgress,
    *,
    resume: bool = False,
    after: Callable[[Study], None] | None = None,
) -> Study:
    """Runs the trials of a sweep that are left and returns all of them.

    With `resume` the newest sweep of the same space and config goes on, where its trial was
    interrupted. `after` is called when a trial has ended, and at the end.
    """
    import optuna  # noqa: F401  # refused before anything is made

    metric = find_sweep_metric(config, sweep)
    # The number of trials is no part of it: with more of them a finished sweep goes on.
    space = sweep.model_dump(mode="json", exclude={"trials"})
    asked = fingerprint({"config": config.resolved(), "sweep": space})
    study = Study.find(config, "sweeps", asked) if resume else None
    study = study or Study.open(config, "sweeps", asked, metric)
    pace = partial(tell_below_median, sweep)
    with locked(study.directory):
        trials = Trials(study, study.pin(config), _measure_kept, pace, progress)
        for _ in trials.run(partial(_suggest, sweep), sweep.trial_count):
            _end_trial(study, config, after)
        _end_trial(study, config, after)
    return study


def _end_trial(study: Study, config: TrainConfig, after: Callable[[Study], None] | None) -> None:
    if study.best is not None:
        best = override_config(config, study.best.values, f"of trial {study.best.number}")
        write_text_atomic(study.directory / BEST_FILE, dump_yaml(best.resolved()))
    if after is not None:
        after(study)


def _suggest(sweep: SweepConfig, study: Study) -> dict[str, Any] | None:
    """Returns what the next trial of a sweep tries: a function of the seed and of those before."""
    number = len(study.trials)
    if number >= sweep.trial_count:
        return None
    if sweep.sampler == "grid":
        return sweep.list_grid()[number]
    params = _open_optuna(sweep, study).ask(_build_space(sweep)).params
    is_json = {key: isinstance(found, ChoicesConfig) for key, found in sweep.space.items()}
    return {key: json.loads(v) if is_json[key] else v for key, v in params.items()}


def _open_optuna(sweep: SweepConfig, study: Study) -> Any:
    """Returns the trials that have ended as a study of Optuna, which draws by their number."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = np.random.SeedSequence([sweep.seed, len(study.trials)]).generate_state(1)[0]
    samplers = optuna.samplers
    kind = samplers.TPESampler if sweep.sampler == "tpe" else samplers.RandomSampler
    pruner = optuna.pruners.MedianPruner(n_warmup_steps=(sweep.prune_after_epochs or 1) - 1)
    direction = "minimize" if study.is_minimised else "maximize"
    found = optuna.create_study(sampler=kind(seed=int(seed)), pruner=pruner, direction=direction)
    found.add_trials([_build_earlier(trial, sweep) for trial in study.trials])
    return found


def _build_space(sweep: SweepConfig) -> dict[str, Any]:
    """What Optuna draws from; choices as JSON, as it takes plain values only."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space: dict[str, Any] = {}
    for key, found in sweep.space.items():
        if isinstance(found, ChoicesConfig):
            space[key] = CategoricalDistribution([json.dumps(one) for one in found.choices])
        elif found.integer:
            space[key] = IntDistribution(*found.values, found.log, int(found.step or 1))
        else:
            space[key] = FloatDistribution(*found.values, found.log, found.step)
    return space


def _build_earlier(trial: Trial, sweep: SweepConfig) -> Any:
    """A trial that has ended, as Optuna knows it."""
    from optuna.trial import TrialState, create_trial

    params = {
        key: json.dumps(value) if isinstance(sweep.space[key], ChoicesConfig) else value
        for key, value in trial.values.items()
    }
    return create_trial(
        state=TrialState[trial.state.upper()],
        value=trial.value,
        params=params,
        distributions=_build_space(sweep),
        intermediate_values={e: v for e, v in enumerate(trial.curve) if v is not None},
    )


def _measure_kept(run: Path, metric: str) -> tuple[float, int]:
    """The metric of the weights that a run has kept, and their epoch."""
    training = read_json(run / RUN_CARD_FILE)["training"]
    for record in read_step_validations(run):
        if record.step == training.get("best_step"):
            return record.value(metric), record.epoch
    epoch = training["best_epoch"]
    return read_history(run)[epoch - 1].value(metric), epoch


def tell_below_median(sweep: SweepConfig, study: Study, values: list[float], _: int) -> str | None:
    """Ends a trial whose best value is below the median of five complete ones or more."""
    if sweep.prune_after_epochs is None:
        return None
    trial = _open_optuna(sweep, study).ask()
    for epoch, value in enumerate(values):
        trial.report(value, epoch)
    is_behind = trial.should_prune()
    return f"{study.metric} is worse than the median of earlier trials" if is_behind else None
