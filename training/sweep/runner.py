"""Runs the trials of a sweep, one after the other; each is a run of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.dataset import write_text_atomic
from conf.errors import ConfigError, TooFewRowsError, TrainingDivergedError, did_you_mean
from conf.load import override_config
from conf.run import RUN_CARD_FILE, read_json, resolve_run, write_json
from conf.training import TrainConfig
from conf.training.sweep import SweepConfig
from etl.tfrecord.places import read_manifest, resolve_version
from training.fit import fit_run
from training.history import LOSS_METRIC, read_history
from training.progress import TrainingProgress
from training.run_directory import find_unfinished_run, locked, run_paths
from training.sweep.directory import BEST_FILE, TRIALS_DIR, TRIALS_FILE, open_sweep
from training.sweep.pruning import PruningProgress, TrialPrunedError, read_metric
from training.sweep.space import check_space, read_values, suggest_values
from training.sweep.study import next_trial, open_study
from training.validation import is_scored_by_label, is_validated

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
    manifest = read_manifest(resolve_version(config.dataset), config.input.passes_over)
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
