"""Runs that choose on held-out rows and then train on all rows: `fit.refit`.

Trials are runs without the rows that `input.validation` holds out; keys are tried one after the
other. The best trial tells the settings and the epoch; a fresh model is trained with them on all
rows and is the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from conf.artefacts.run import RUN_CARD_FILE, read_json, update_run_card
from conf.errors import ConfigError
from conf.load import override_config
from conf.metrics import LOSS_METRIC
from conf.schema import fingerprint
from conf.storage.locations import is_remote
from conf.training.train import TrainConfig
from conf.training.trials import RefitConfig
from training.fit import fit_run
from training.loop.plan import RETRIEVAL_METRIC, is_scored_by_label
from training.loop.validation import find_best
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history
from training.reader.training_data import TrainingData, read_current_data, read_current_mixed
from training.run_directory import config_sha256, is_trained_on, locked
from training.trials import (
    Study,
    Trial,
    Trials,
    build_trial,
    check_space,
    describe_values,
    find_metric,
)

_FAR_BEHIND = 0.9
"""Share of the best trial's metric after as many epochs below which a trial is ended."""


def tell_far_behind(study: Study, values: list[float], epochs: int) -> str | None:
    """Ends a trial whose second half is far behind the best trial so far."""
    epoch, best = len(values), study.best
    if best is None or study.is_minimised or 2 * epoch < epochs:
        return None
    ahead = best.curve[:epoch][-1]  # A shorter trial had its rate down by then.
    if ahead is None or ahead <= 0.0:  # A share of less than nothing says nothing.
        return None
    if not values[-1] < _FAR_BEHIND * ahead:
        return None
    share = f"less than {_FAR_BEHIND:.0%} of the best trial's"
    return f"{study.metric} is {share} at that epoch, or at its last one before"


def fit_chosen(
    config: TrainConfig, progress: TrainingProgress, *, resume: bool = False, once: bool = False
) -> Path:
    """Chooses settings and epoch on held-out rows, trains on all rows, and returns that run.

    With `resume` the newest refit of the same config goes on where it was interrupted, on the
    dataset versions that it began with; with `once` too, but one that has finished on the current
    version is returned as it is.
    """
    refit = config.fit.refit
    if refit is None:
        raise ConfigError("nothing is to be chosen", received="fit.refit: null")
    if is_remote(config.root):
        raise ConfigError(
            "fit.refit works on a file system, local or mounted",
            received=f"root: {config.root}",
            fix="set root to one, or leave fit.refit out",
        )
    plan = describe_plan(config, refit)
    asked = fingerprint([config_sha256(config), list(refit.space)])  # Their order decides.
    study = Study.find(config, "refits", asked) if resume or once else None
    if study is not None and study.run is not None:
        if once and _is_trained_on_current(Path(study.run), config):
            progress.message(f"trained already, nothing to do: run {study.run}", run=study.run)
            return Path(study.run)
        study = None
    is_resumed = study is not None
    study = study or Study.open(config, "refits", asked, plan["metric"])
    with locked(study.directory):
        progress.message(
            f"fit.refit: trials without the held-out rows (at most {plan['trials']}), then the "
            f"best settings and epoch on all rows: at most {plan['epochs']} epochs in all",
            **plan,
        )
        pinned = study.pin(config)
        measure = partial(_measure_best, pinned)
        trials = Trials(study, pinned, measure, tell_far_behind, progress)
        for _ in trials.run(partial(propose_values, pinned, refit), refit.most_trials):
            pass
        return _fit_best(study, pinned, progress, is_resumed=is_resumed)


def describe_plan(config: TrainConfig, refit: RefitConfig) -> dict[str, Any]:
    """Returns what a refit costs at most: `trials`, and `epochs` in all, the run's included."""
    metric = find_metric(config, refit.metric, "fit.refit.metric")
    if metric == LOSS_METRIC and not is_scored_by_label(config):
        raise ConfigError(
            "fit.refit compares trials by held-out rows, which are ranked and have no loss",
            received=f"fit.refit.metric: {metric}",
            fix=f"set fit.refit.metric={RETRIEVAL_METRIC}, or leave it out",
        )
    check_space(config, refit.space)
    longest = config.fit.epochs or 1
    total = 0 if refit.space else longest
    for key, values in refit.space.items():
        lengths = list(map(int, values)) if key == "fit.epochs" else [longest] * len(values)
        total, longest = total + sum(lengths), max(longest, *lengths)
    return {"metric": metric, "trials": refit.most_trials, "epochs": total + longest}


def _is_trained_on_current(run: Path, config: TrainConfig) -> bool:
    """Whether a run has been trained on the current version of its dataset."""
    if not (run / RUN_CARD_FILE).is_file():
        return False
    current = read_current_data(config).manifest, read_current_mixed(config)
    return is_trained_on(read_json(run / RUN_CARD_FILE), *current)


def propose_values(config: TrainConfig, refit: RefitConfig, study: Study) -> dict[str, Any] | None:
    """Returns what the next trial of a refit tries; None: all are done."""
    listed = _list_values(config, refit, study)
    return next(islice(listed, len(study.trials), None), None)


def _list_values(config: TrainConfig, refit: RefitConfig, study: Study) -> Iterator[dict[str, Any]]:
    """Yields the values of each trial, which depend on how those before it have ended."""
    chosen: dict[str, Any] = {}
    if not refit.space:
        yield chosen
    tried: set[str] = set()
    for key, values in refit.space.items():
        for value in values:
            asked = {**chosen, key: value}
            try:
                resolved = build_trial(config, study.directory, 0, asked).resolved()
            except ConfigError:  # Values that do not go together: the trial tells it.
                resolved = asked
            if (found := fingerprint(resolved)) not in tried:
                tried.add(found)
                yield asked
        # Trials of later keys are known, too, where a refit goes on.
        best = study.find_best(len(tried))
        chosen = chosen if best is None else best.values


def _measure_best(config: TrainConfig, run: Path, metric: str) -> tuple[float, int]:
    """The metric of a trial at its best epoch; at the last one where nothing stops early."""
    history = read_history(run)
    epoch = read_json(run / RUN_CARD_FILE)["training"]["best_epoch"]
    if config.fit.early_stopping is not None:
        epoch = find_best(history, metric) + 1
    return history[epoch - 1].value(metric), epoch


def _fit_best(
    study: Study, pinned: TrainConfig, progress: TrainingProgress, *, is_resumed: bool
) -> Path:
    """Trains the run of a refit, and notes in its card how it was chosen."""
    best = study.best
    if best is None or best.epoch is None:
        raise ConfigError(
            "no trial of fit.refit has finished",
            received="; ".join(trial.detail for trial in study.trials),
            fix="try other values in fit.refit.space, or another fit.early_stopping.metric",
        )
    planned = build_run_config(pinned, best.values, best.epoch, read_current_data(pinned))
    shown = f"on all rows: {describe_values(best.values)}, {best.epoch} epochs"
    progress.message(shown, values=best.values, epoch=best.epoch)
    if best.epoch == best.values.get("fit.epochs", pinned.fit.epochs):
        progress.message(
            "the best trial was best in its last epoch: more epochs may be better (fit.epochs)"
        )
    run = fit_run(planned, progress, once=is_resumed)
    card = {
        "directory": str(study.directory),
        "held_out": pinned.resolved()["input"]["validation"],
        "metric": study.metric,
        "trials": [_describe_trial(trial) for trial in study.trials],
        "chosen": _describe_trial(best),
    }
    update_run_card(run, refit=card)
    study.run = str(run)
    study.write()
    return run


def _describe_trial(trial: Trial) -> dict[str, Any]:
    return {"values": trial.values, "value": trial.value, "epoch": trial.epoch}


def build_run_config(
    config: TrainConfig, values: dict[str, Any], epoch: int, data: TrainingData
) -> TrainConfig:
    """Returns the config of the run on all rows, with the values and the epoch of the best trial.

    Its rate follows the trial's schedule up to the chosen epoch, over the steps of all rows.
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
