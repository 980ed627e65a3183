"""The trials of a sweep in an SQLite file, which Optuna reads and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conf.training.sweep import SweepConfig
from training.history import LOSS_METRIC
from training.sweep.space import list_grid

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
