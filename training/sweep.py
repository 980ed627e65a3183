"""Hyperparameter sweeps by Optuna: trials one after the other, each a run of its own.

<root>/<name>/sweeps/<UTC time>-<hash>/
    sweep.json       the space and the config that it starts from
    study.sqlite3    the trials, for Optuna and its dashboard
    trials.json      the trials, for people and scripts
    best.yaml        config of the best trial
    trials/<number>/runs/<id>/   a run as any other
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from conf.errors import (
    ConfigError,
    SluiceError,
    TooFewRowsError,
    TrainingDivergedError,
    did_you_mean,
)
from conf.load import override_config
from conf.paths import read_manifest, resolve_version, write_text_atomic
from conf.run import RUN_CARD_FILE, read_json, resolve_run, write_json
from conf.schema import fingerprint
from conf.training.sweep import ChoicesConfig, RangeConfig, SweepConfig
from conf.training.train import TrainConfig
from etl.tfrecord.reading import find_path
from training.fit import fit_run
from training.loop.epoch_records import LOSS_METRIC, EpochRecord, read_history
from training.loop.validation import is_scored_by_label, is_validated
from training.monitoring.progress import StepStatus, TrainingProgress
from training.run_directory import find_unfinished_run, locked, make_entry, run_paths

SWEEPS_DIR = "sweeps"
SWEEP_FILE = "sweep.json"
TRIALS_FILE = "trials.json"
BEST_FILE = "best.yaml"
TRIALS_DIR = "trials"


def open_sweep(config: TrainConfig, sweep: SweepConfig, resume: bool) -> Path:
    """Returns the directory of a sweep: a new one, or on resuming the newest of the same space.

    The number of trials is not part of what makes two sweeps the same: with more of them a
    finished sweep goes on.

    Raises:
        InternalError: The directory cannot be made.
        InputDataError: A `sweep.json` is damaged.
    """
    parent = run_paths(config).base / SWEEPS_DIR
    space = sweep.model_dump(mode="json", exclude={"trials"})
    content = {"config": config.resolved(), "sweep": space}
    sha256 = fingerprint(content)
    if resume and parent.is_dir():
        for found in sorted(parent.iterdir(), key=lambda path: path.name, reverse=True):
            file = found / SWEEP_FILE
            if file.is_file() and read_json(file).get("sha256") == sha256:
                return found
    directory = make_entry(parent, sha256)
    write_json(directory / SWEEP_FILE, {**content, "sha256": sha256})
    return directory


def suggest_values(trial: Any, sweep: SweepConfig) -> dict[str, Any]:
    """Returns a trial's value of each key; a trial that has values already keeps them.

    Args:
        trial: An Optuna trial.
        sweep: The space.
    """
    return {key: _suggest(trial, key, found) for key, found in sweep.space.items()}


def _suggest(trial: Any, key: str, found: ChoicesConfig | RangeConfig) -> Any:
    if isinstance(found, ChoicesConfig):
        return json.loads(trial.suggest_categorical(key, _texts(found)))
    if found.integer:
        step = 1 if found.step is None else int(found.step)
        return trial.suggest_int(key, int(found.low), int(found.high), step=step, log=found.log)
    return trial.suggest_float(key, found.low, found.high, step=found.step, log=found.log)


def list_grid(sweep: SweepConfig) -> list[dict[str, str]]:
    """Returns all points of a grid, the last key running fastest, as Optuna keeps them."""
    choices = [_texts(d) for d in sweep.space.values() if isinstance(d, ChoicesConfig)]
    return [dict(zip(sweep.space, point, strict=True)) for point in itertools.product(*choices)][
        : sweep.trial_count
    ]


def read_values(params: Mapping[str, Any], sweep: SweepConfig) -> dict[str, Any]:
    """Returns a finished trial's value of each key that it had one of."""
    return {
        key: json.loads(value) if isinstance(sweep.space[key], ChoicesConfig) else value
        for key, value in params.items()
    }


def check_space(config: TrainConfig, sweep: SweepConfig) -> None:
    """Refuses keys and values that the config does not take, before anything is trained.

    Each value is looked at alone; what does not go together ends its trial.

    Raises:
        ConfigError: A key is unknown, or a value or the end of a range is refused.
    """
    for key, found in sweep.space.items():
        tried = found.choices if isinstance(found, ChoicesConfig) else _ends(found)
        for value in tried:
            override_config(config, {key: value}, f"of the sweep, {key}")


def _ends(found: RangeConfig) -> tuple[float, float] | tuple[int, int]:
    ends = found.low, found.high
    return (int(ends[0]), int(ends[1])) if found.integer else ends


def _texts(found: ChoicesConfig) -> list[str]:
    """Choices as JSON: Optuna stores plain values only, and a choice may be a list."""
    return [json.dumps(choice) for choice in found.choices]


STUDY_FILE = "study.sqlite3"
STUDY_NAME = "sweep"


def open_study(directory: Path, sweep: SweepConfig, metric: str) -> Any:
    """Returns the sweep's Optuna study, made where there is none yet.

    Raises:
        ModuleNotFoundError: Optuna is not installed.
    """
    import optuna
    from sqlalchemy.engine import URL

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if sweep.prune_after_epochs is not None:
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=sweep.prune_after_epochs - 1)
    url = URL.create("sqlite", database=str((directory / STUDY_FILE).resolve()))
    study = optuna.create_study(
        storage=url.render_as_string(),
        study_name=STUDY_NAME,
        direction="minimize" if metric == LOSS_METRIC else "maximize",
        pruner=pruner,
        load_if_exists=True,
    )
    if sweep.sampler == "grid":
        for point in list_grid(sweep):
            study.enqueue_trial(point, skip_if_exists=True)
    return study


def next_trial(study: Any, sweep: SweepConfig) -> Any | None:
    """Returns the trial to run: one that was interrupted, else a new one; None: all are done."""
    from optuna.trial import Trial, TrialState

    trials = study.get_trials(deepcopy=False)
    for trial in trials:
        if trial.state == TrialState.RUNNING:
            study.sampler = _build_sampler(sweep, trial.number)
            return Trial(study, trial._trial_id)
    done = sum(trial.state != TrialState.WAITING for trial in trials)
    if done >= sweep.trial_count:
        return None
    # A sampler of its own per trial: a sweep that was interrupted draws what it would have drawn.
    study.sampler = _build_sampler(sweep, done)
    return study.ask()


def _build_sampler(sweep: SweepConfig, number: int) -> Any:
    import optuna

    seed = int(np.random.SeedSequence([sweep.seed, number]).generate_state(1)[0])
    if sweep.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.RandomSampler(seed=seed)


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


DEFAULT_METRIC = "ndcg@10"


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
    """How a sweep ended.

    Attributes:
        directory: Its directory.
        metric: What trials are compared by.
        trials: All trials, by number.
        best: The best of them; None where none is complete.
    """

    directory: Path
    metric: str
    trials: tuple[TrialRecord, ...]
    best: TrialRecord | None

    @property
    def is_minimised(self) -> bool:
        """Whether a lower metric is better."""
        return self.metric == LOSS_METRIC

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
        progress: Where to tell how it goes.
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
    check_space(config, sweep)
    directory = open_sweep(config, sweep, resume)
    with locked(directory):
        runner = _Sweep(config, sweep, progress, directory, metric)
        while True:
            is_done = not runner.run_next()
            result = runner.write()
            if after is not None:
                after(result)
            if is_done:
                return result


def find_metric(config: TrainConfig, sweep: SweepConfig) -> str:
    """Returns what trials are compared by.

    Raises:
        ConfigError: Trials would not measure it.
    """
    stopping, is_scored = config.fit.early_stopping, is_scored_by_label(config)
    default = LOSS_METRIC if is_scored else stopping.metric if stopping else DEFAULT_METRIC
    metric = sweep.metric or default
    if metric == LOSS_METRIC:
        return metric
    version = resolve_version(find_path(config.dataset))
    manifest = read_manifest(version, config.input.tolerates)
    if not is_validated(config, manifest):
        raise ConfigError(
            "trials are compared by a validation metric, and the dataset has no validation split",
            received=metric,
            allowed=LOSS_METRIC,
            fix="set `metric: loss` in the sweep's file, hold rows of train out by "
            "input.validation, or build the dataset with a validation split",
        )
    names = [LOSS_METRIC]  # Held-out rows with labels are not ranked.
    if not is_scored:
        kinds = ("hit_rate", "recall", "ndcg")
        names += ["mrr", *(f"{kind}@{k}" for kind in kinds for k in config.evaluation.ks)]
    if metric not in names:
        raise ConfigError(
            "the metric of the sweep is not evaluated",
            received=metric,
            allowed=", ".join(names),
            fix=did_you_mean(metric, names),
        )
    return metric


class _Sweep:
    """A sweep while it runs."""

    def __init__(
        self,
        config: TrainConfig,
        sweep: SweepConfig,
        progress: TrainingProgress,
        directory: Path,
        metric: str,
    ) -> None:
        self._config, self._sweep, self._progress = config, sweep, progress
        self._directory, self._metric = directory, metric
        self._study = open_study(directory, sweep, metric)

    def run_next(self) -> bool:
        """Runs a trial; False where none is left."""
        from optuna.trial import TrialState

        trial = next_trial(self._study, self._sweep)
        if trial is None:
            return False
        values = suggest_values(trial, self._sweep)
        told = ", ".join(f"{key} {value}" for key, value in values.items())
        self._progress.message(
            f"trial {trial.number + 1} of {self._sweep.trial_count}: {told}",
            trial=trial.number,
            values=values,
        )
        try:
            run = self._fit(trial, values)
            best = read_json(run / RUN_CARD_FILE)["training"]["best_epoch"]
            value = read_metric(read_history(run)[best - 1], self._metric)
        except TrialPrunedError as error:
            self._end(trial, TrialState.PRUNED, error.what)
        except (TrainingDivergedError, ConfigError, TooFewRowsError) as error:
            self._end(trial, TrialState.FAIL, error.what)
        else:
            trial.set_user_attr("detail", str(run))
            self._study.tell(trial, value)
        return True

    def _end(self, trial: Any, state: Any, why: str) -> None:
        self._progress.message(f"trial {trial.number + 1}: {why}", trial=trial.number)
        trial.set_user_attr("detail", why)
        self._study.tell(trial, state=state)

    def _fit(self, trial: Any, values: dict[str, Any]) -> Path:
        config = self._configure(trial.number, values)
        current = run_paths(config).current
        if current.exists():  # Killed after its last step, before Optuna was told.
            return resolve_run(str(current.parent))
        progress: TrainingProgress = self._progress
        if self._sweep.prune_after_epochs is not None:
            progress = PruningProgress(progress, trial, self._metric)
        return fit_run(config, progress, resume=find_unfinished_run(config) is not None)

    def _configure(self, number: int, values: dict[str, Any]) -> TrainConfig:
        place = {"root": str(self._directory / TRIALS_DIR), "name": f"{number:04d}"}
        return override_config(self._config, {**values, **place}, f"of trial {number}")

    def write(self) -> SweepResult:
        """Writes `trials.json` and `best.yaml`, and returns what they hold."""
        trials = tuple(self._describe(trial) for trial in self._study.get_trials(deepcopy=False))
        complete = [trial for trial in trials if trial.value is not None]
        best = None
        if complete:
            best = trials[self._study.best_trial.number]
            config = override_config(self._config, best.values, f"of trial {best.number}")
            text = yaml.safe_dump(config.resolved(), sort_keys=False)
            write_text_atomic(self._directory / BEST_FILE, text)
        entries = [asdict(trial) for trial in trials]
        content = {
            "metric": self._metric,
            "best": None if best is None else best.number,
            "trials": entries,
        }
        write_json(self._directory / TRIALS_FILE, content)
        return SweepResult(self._directory, self._metric, trials, best)

    def _describe(self, trial: Any) -> TrialRecord:
        return TrialRecord(
            number=trial.number,
            state=trial.state.name.lower(),
            values=read_values(trial.params, self._sweep),
            value=trial.value if trial.state.name == "COMPLETE" else None,
            seconds=trial.duration.total_seconds() if trial.duration else None,
            detail=str(trial.user_attrs.get("detail", "")),
        )
