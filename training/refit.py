"""Runs that choose on held-out rows and then train on all rows: `fit.refit`.

Trials are runs without the rows that `input.validation` holds out. The best one tells the settings
and the epoch; a fresh model is trained with them on all rows and is the run.

<root>/<name>/refits/<UTC time>-<hash>/
    refit.json                   what was asked, the trials that have ended, and the run
    trials/<number>/runs/<id>/   a run as any other
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.artefacts.run import (
    RUN_CARD_FILE,
    read_json,
    update_run_card,
    write_json,
)
from conf.errors import ConfigError, TooFewRowsError
from conf.load import override_config
from conf.manifest import MANIFEST_FILE
from conf.metrics import LOSS_METRIC, is_minimised
from conf.schema import fingerprint
from conf.storage.locations import find_path
from conf.training.refit import RefitConfig
from conf.training.train import TrainConfig
from training.checkpoint.stored_runs import is_stored
from training.evaluation.protocols import HeldOutRows
from training.fit import fit_run
from training.input.batches import build_held_out_dataset, read_batches
from training.loop.plan import RETRIEVAL_METRIC, is_scored_by_label
from training.loop.validation import find_best
from training.monitoring.epoch_records import EpochRecord, read_history
from training.monitoring.progress import TrainingProgress
from training.reader.training_data import (
    TrainingData,
    pin_mixed,
    read_current_data,
    read_current_mixed,
)
from training.run_directory import (
    config_sha256,
    is_trained_on,
    locked,
    make_entry,
    run_paths,
)
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

REFIT_FILE = "refit.json"
_FAR_BEHIND = 0.9
"""Share of the best trial's metric after as many epochs below which a trial is ended."""


@dataclass(frozen=True)
class Trial:
    """A trial that has ended.

    Attributes:
        values: Its value of each key that was tried.
        value: The metric at its best epoch; None where it did not finish.
        epoch: That epoch, from 1; None likewise.
        curve: The metric after each epoch; None where it is not defined (metrics of one's own).
        detail: Directory of its run, or what ended it.
    """

    values: dict[str, Any]
    value: float | None
    epoch: int | None
    curve: list[float | None]
    detail: str


@dataclass
class RefitState:
    """What `refit.json` holds.

    Attributes:
        sha256: Fingerprint of the config that was asked for, and of the order of its keys to try.
        config: That config.
        dataset: The dataset version of all trials and of the run.
        metric: What trials are compared by.
        trials: Those that have ended, in order.
        run: Directory of the run, once it has finished.
        mixed: The versions of the datasets of `input.mix`.
    """

    sha256: str
    config: dict[str, Any]
    dataset: str
    metric: str
    trials: list[Trial] = field(default_factory=list)
    run: str | None = None
    mixed: list[str] | None = None

    @classmethod
    def read(cls, directory: Path) -> RefitState:
        """Reads the file of a directory."""
        found = read_json(directory / REFIT_FILE)
        return cls(**{**found, "trials": [Trial(**trial) for trial in found["trials"]]})

    def write(self, directory: Path) -> None:
        """Writes the file, whole or not at all."""
        write_json(directory / REFIT_FILE, asdict(self))

    def find_best_trial(self, count: int | None = None) -> Trial | None:
        """Returns the first of the best trials that finished, of all or of the first `count`."""
        done = [trial for trial in self.trials[:count] if trial.value is not None]
        sign = -1.0 if is_minimised(self.metric) else 1.0
        return max(done, key=lambda trial: sign * (trial.value or 0.0), default=None)


def check_pace(record: EpochRecord, metric: str, epochs: int, best: Trial | None) -> None:
    """Ends a trial whose second half is far behind the best trial so far.

    Args:
        record: Its newest epoch.
        metric: What trials are compared by.
        epochs: Epochs of the trial.
        best: The best trial so far, if one has finished.

    Raises:
        TrialEndedError: It is far behind.
    """
    if best is None or is_minimised(metric) or 2 * record.epoch < epochs:
        return
    ahead = best.curve[: record.epoch][-1]  # A shorter trial had its rate down by then.
    if ahead is None or ahead <= 0.0:  # A share of less than nothing says nothing.
        return
    if record.value(metric) < _FAR_BEHIND * ahead:
        raise TrialEndedError(
            f"ended after epoch {record.epoch}: {metric} is less than {_FAR_BEHIND:.0%} "
            "of the best trial's at that epoch, or at its last one before"
        )


def fit_chosen(
    config: TrainConfig, progress: TrainingProgress, *, resume: bool = False, once: bool = False
) -> Path:
    """Chooses settings and epoch on held-out rows, and trains on all rows.

    Args:
        config: The resolved config; it has `fit.refit`.
        progress: Shows how it goes.
        resume: Whether to go on where the newest refit of the same config was interrupted, in a
            trial or in the run, on the dataset versions that it began with.
        once: Whether to do so, and to train nothing where it has finished on the same version.

    Returns:
        The directory of the run on all rows, now the current one of its series.

    Raises:
        ConfigError: The space or the metric does not fit, or no trial has finished.
        TrainingInterruptedError: A signal came; the state is saved.
        UpstreamNotReadyError: Another process is at it.
        SluiceError: The dataset does not fit, or training failed.
    """
    refit = config.fit.refit
    if refit is None:
        raise ConfigError("nothing is to be chosen", received="fit.refit: null")
    if is_stored(config):
        raise ConfigError(
            "fit.refit works on a file system, local or mounted",
            received=f"root: {config.root}",
            fix="set root to one, or leave fit.refit out",
        )
    metric = _find_metric(config, refit)
    check_space(config, refit)
    check_users(config)
    unfinished, run = _find_newest(config) if resume or once else (None, None)
    if once and run is not None and _is_trained_on_current(run, config):
        progress.message(f"trained already, nothing to do: run {run}", run=str(run))
        return run
    directory = unfinished or _make_directory(config, metric)
    with locked(directory):
        return _Refit(config, refit, progress, directory, is_resumed=unfinished is not None).fit()


def check_space(config: TrainConfig, refit: RefitConfig) -> None:
    """Refuses keys and values that a config does not take, before anything is trained.

    Raises:
        ConfigError: A key is unknown, or a value is refused.
    """
    base = override_config(config, {"fit.refit": None}, "of fit.refit")
    for key, values in refit.space.items():
        for value in values:
            override_config(base, {key: value}, f"of fit.refit.space, {key}")


def check_users(config: TrainConfig) -> None:
    """Refuses pairs that are held out of users who have no other pair.

    Nothing is learned of such users: what was best on their pairs would be chosen by chance.

    Raises:
        TooFewRowsError: No user of a held-out pair trains.
        InputDataError: A record is damaged.
    """
    data, held_out = read_current_data(config), config.input.validation
    user, where = data.manifest.keys.user, (data.version_dir, data.manifest)
    if held_out is None or user is None or user not in held_out.key or len(held_out.key) == 1:
        return
    met = HeldOutRows.read(*where, config.input, mask_seen=True).met
    rows = build_held_out_dataset(*where, config.input, config.evaluation.batch_size, [user])
    users = [np.asarray(batch[user]) for batch in read_batches(rows, *where, "train")]
    if met is None or not users or np.isin(np.concatenate(users), met.users).any():
        return
    raise TooFewRowsError(
        "input.validation holds pairs out of users who have no other pair: nothing is learned of "
        "them, and nothing can be chosen on their pairs",
        received=f"{sum(map(len, users)):,} held-out rows",
        allowed="users with two pairs or more",
        fix="leave fit.refit out and set what it would choose",
    )


def describe_plan(config: TrainConfig, refit: RefitConfig) -> dict[str, Any]:
    """Returns what a refit costs at most: `trials`, and `epochs` in all, the run's included.

    Raises:
        ConfigError: The space or the metric does not fit.
    """
    metric = _find_metric(config, refit)
    check_space(config, refit)
    longest = config.fit.epochs or 1
    total = 0 if refit.space else longest
    for key, values in refit.space.items():
        lengths = list(map(int, values)) if key == "fit.epochs" else [longest] * len(values)
        total, longest = total + sum(lengths), max(longest, *lengths)
    return {"metric": metric, "trials": refit.most_trials, "epochs": total + longest}


def build_run_config(
    config: TrainConfig, values: dict[str, Any], epoch: int, data: TrainingData
) -> TrainConfig:
    """Returns the config of the run on all rows.

    Its rate follows the trial's schedule up to the chosen epoch, over the steps of all rows.

    Args:
        config: The config that was asked for.
        values: Those of the best trial.
        epoch: Its best epoch, from 1.
        data: The dataset version.

    Raises:
        InputDataError: A shard is damaged.
    """
    alone = {"fit.refit": None, "fit.early_stopping": None, "fit.validation": None}
    every_row = {**values, **alone, "input.validation": None}
    planned = override_config(config, every_row, "of fit.refit")
    epochs, schedule = planned.fit.epochs or epoch, planned.optimizer.schedule
    changes: dict[str, Any] = {"fit.epochs": epoch}
    if epoch < epochs and getattr(schedule, "steps", 1) is None:
        steps = epochs * data.steps_per_epoch(planned.input)
        changes["optimizer.schedule"] = {**schedule.model_dump(mode="json"), "steps": steps}
    return override_config(planned, changes, "of fit.refit")


def _find_metric(config: TrainConfig, refit: RefitConfig) -> str:
    """The metric that trials are compared by; a loss is refused where held-out rows have none."""
    metric = find_metric(config, refit.metric, "fit.refit.metric")
    if metric == LOSS_METRIC and not is_scored_by_label(config):
        raise ConfigError(
            "fit.refit compares trials by held-out rows, which are ranked and have no loss",
            received=f"fit.refit.metric: {metric}",
            allowed=f"metrics of ranking, such as {RETRIEVAL_METRIC}",
            fix=f"set fit.refit.metric={RETRIEVAL_METRIC}, or leave it out",
        )
    return metric


def _find_newest(config: TrainConfig) -> tuple[Path | None, Path | None]:
    """The newest refit of the same config, if its dataset version is still there.

    Returns:
        Its directory where it is unfinished, and its run where it has finished.
    """
    wanted = _refit_sha256(config)
    for file in sorted(_parent(config).glob(f"*/{REFIT_FILE}"), reverse=True):
        state = RefitState.read(file.parent)
        if state.sha256 == wanted:
            versions = [state.dataset, *(state.mixed or ())]
            if not all((find_path(place) / MANIFEST_FILE).is_file() for place in versions):
                break
            return (file.parent, None) if state.run is None else (None, Path(state.run))
    return None, None


def _is_trained_on_current(run: Path, config: TrainConfig) -> bool:
    """Whether a run has been trained on the current version of its dataset."""
    if not (run / RUN_CARD_FILE).is_file():
        return False
    current = read_current_data(config).manifest, read_current_mixed(config)
    return is_trained_on(read_json(run / RUN_CARD_FILE), *current)


def _refit_sha256(config: TrainConfig) -> str:
    """Fingerprint of a config that holds the order of the keys to try, which decides the trials."""
    order = [] if config.fit.refit is None else list(config.fit.refit.space)
    return fingerprint([config_sha256(config), order])


def _parent(config: TrainConfig) -> Path:
    return run_paths(config).base / "refits"


def _make_directory(config: TrainConfig, metric: str) -> Path:
    version = str(read_current_data(config).version_dir.absolute())
    sha256 = _refit_sha256(config)
    directory = make_entry(_parent(config), sha256)
    mixed = [str(data.version_dir.absolute()) for data in read_current_mixed(config)]
    RefitState(sha256, config.resolved(), version, metric, mixed=mixed).write(directory)
    return directory


class _Refit:
    """A refit while it runs."""

    def __init__(
        self,
        config: TrainConfig,
        refit: RefitConfig,
        progress: TrainingProgress,
        directory: Path,
        *,
        is_resumed: bool,
    ) -> None:
        self._state = RefitState.read(directory)
        pinned = {"dataset": self._state.dataset}
        self._config = override_config(config, pinned, "of fit.refit")
        if self._state.mixed is not None:
            self._config = pin_mixed(self._config, self._state.mixed)
        self._refit, self._progress, self._directory = refit, progress, directory
        self._is_resumed = is_resumed

    def fit(self) -> Path:
        plan = describe_plan(self._config, self._refit)
        self._progress.message(
            f"fit.refit: trials without the held-out rows (at most {plan['trials']}), then the "
            f"best settings and epoch on all rows: at most {plan['epochs']} epochs in all",
            **plan,
        )
        for number, values in enumerate(self._list_trials()):
            if number == len(self._state.trials):
                self._state.trials.append(self._try(number, values))
                self._state.write(self._directory)
        return self._fit_best()

    def _list_trials(self) -> Iterator[dict[str, Any]]:
        """Yields the values of each trial, which depend on how those before it have ended."""
        chosen: dict[str, Any] = {}
        if not self._refit.space:
            yield chosen
        tried: set[str] = set()
        for key, values in self._refit.space.items():
            for value in values:
                asked = {**chosen, key: value}
                try:
                    resolved = fingerprint(self._build_trial(0, asked).resolved())
                except ConfigError:  # Values that do not go together: the trial tells it.
                    resolved = fingerprint(asked)
                if resolved not in tried:
                    tried.add(resolved)
                    yield asked
            # A resumed refit knows trials of later keys, which this choice came before.
            best = self._state.find_best_trial(len(tried))
            chosen = chosen if best is None else best.values

    def _build_trial(self, number: int, values: dict[str, Any]) -> TrainConfig:
        alone = {**values, "fit.refit": None}
        return build_trial(self._config, self._directory, number, alone)

    def _try(self, number: int, values: dict[str, Any]) -> Trial:
        label = f"{name_trial(number)} (at most {self._refit.most_trials} in all)"
        self._progress.message(f"{label}: {describe_values(values)}", trial=number, values=values)
        metric = self._state.metric
        try:
            run = self._fit_trial(self._build_trial(number, values))
            epoch, curve = self._read_trial(run)
        except TRIAL_ERRORS as error:
            if not self._refit.space:
                raise
            self._progress.message(f"{label}: {error.what}", trial=number)
            return Trial(values, None, None, [], error.what)
        value = curve[epoch - 1]
        if value is None:
            reason = f"{metric} is not defined on the held-out rows"
            self._progress.message(f"{label}: {reason}", trial=number)
            return Trial(values, None, None, [], reason)
        self._progress.message(
            f"{label}: {metric} {value:.4f} after epoch {epoch}",
            trial=number, value=value, epoch=epoch,
        )  # fmt: skip
        return Trial(values, value, epoch, curve, str(run))

    def _read_trial(self, run: Path) -> tuple[int, list[float | None]]:
        """Returns the epoch whose weights are kept, from 1, and the metric after each epoch.

        Raises:
            ConfigError: A trial of other values, such as another objective, has no such metric.
        """
        history, metric = read_history(run), self._state.metric
        # The last one where nothing stops early.
        epoch = read_json(run / RUN_CARD_FILE)["training"]["best_epoch"]
        if self._config.fit.early_stopping is not None:
            epoch = find_best(history, metric) + 1
        return epoch, [None if math.isnan(v) else v for v in (r.value(metric) for r in history)]

    def _fit_trial(self, config: TrainConfig) -> Path:
        metric, best = self._state.metric, self._state.find_best_trial()
        check = partial(check_pace, metric=metric, epochs=config.fit.epochs or 1, best=best)
        return fit_trial(self._config, config, metric, TrialProgress(self._progress, check))

    def _fit_best(self) -> Path:
        best = self._state.find_best_trial()
        if best is None or best.epoch is None:
            raise ConfigError(
                "no trial of fit.refit has finished",
                received="; ".join(trial.detail for trial in self._state.trials),
                fix="try other values in fit.refit.space"
                if self._refit.space
                else "choose by a metric that the held-out rows have (fit.early_stopping.metric)",
            )
        data = read_current_data(self._config)
        config = build_run_config(self._config, best.values, best.epoch, data)
        shown = describe_values(best.values)
        self._progress.message(
            f"on all rows: {shown}, {best.epoch} epochs", values=best.values, epoch=best.epoch
        )
        if best.epoch == best.values.get("fit.epochs", self._config.fit.epochs):
            self._progress.message(
                "the best trial was best in its last epoch: more epochs may be better (fit.epochs)"
            )
        run = fit_run(config, self._progress, once=self._is_resumed)
        update_run_card(run, refit=self._describe(best))
        self._state.run = str(run)
        self._state.write(self._directory)
        return run

    def _describe(self, best: Trial) -> dict[str, Any]:
        """Returns what the run's card says of how it was chosen."""
        held_out = self._config.input.validation
        return {
            "directory": str(self._directory),
            "held_out": None if held_out is None else held_out.model_dump(mode="json"),
            "metric": self._state.metric,
            "trials": [
                {"values": trial.values, "value": trial.value, "epoch": trial.epoch}
                for trial in self._state.trials
            ],
            "chosen": {"values": best.values, "value": best.value, "epoch": best.epoch},
        }
