"""Every model and network: a run that is broken off goes on as if it were not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.training.train import TrainConfig
from tests.training.every_model import (
    RANKING_MODELS,
    RETRIEVAL_MODELS,
    list_retrieval_names,
)
from training.checkpoint.restore import TrainedModel, load_run
from training.fit import fit_run
from training.monitoring.progress import NoProgress
from training.monitoring.run_logs import read_steps
from training.networks.registry import NETWORKS

PAIR = {"features": ["user_id", "movie_id"]}
MODELS = {**RANKING_MODELS, **RETRIEVAL_MODELS, "mf_score": {**RANKING_MODELS["mf"], **PAIR}}
BROKEN_AFTER = 17  # of 24 steps; saved at step 14
# Shuffling, draws of negatives and a rate that depends on the step.
RUN = {
    "input": {"batch_size": 64, "shuffle_buffer": 300},
    "optimizer": {"learning_rate": 0.02, "schedule": "cosine"},
    "evaluation": {"sampled_negatives": 10},
    "fit": {
        "epochs": 2,
        "early_stopping": None,
        "steps_per_loop": 5,
        "checkpoint": {"every_steps": 7},
    },
}


def test_no_model_and_no_network_is_left_out() -> None:
    assert sorted(NETWORKS) == sorted(set(RANKING_MODELS) - {"own"})
    assert list_retrieval_names() == sorted({str(m["name"]) for m in RETRIEVAL_MODELS.values()})


class BrokenOffError(Exception):
    """Stands for the process being killed between two calls."""


class BreaksOff(NoProgress):
    """Ends the run after a number of steps."""

    def step(self, status: Any) -> None:
        if (status.epoch - 1) * status.steps + status.step >= BROKEN_AFTER:
            raise BrokenOffError


@dataclass(frozen=True)
class Twins:
    """Runs of one config."""

    quiet: Path
    resumed: Path


class Runs:
    """Runs of each model, made at their first use."""

    def __init__(self, version: Path, folder: Path) -> None:
        self._version, self._folder = version, folder
        self._made: dict[str, Twins] = {}

    def get(self, name: str) -> Twins:
        if name not in self._made:
            quiet = fit_run(self._configure(name, "quiet"), NoProgress())
            broken = self._configure(name, "broken")
            with pytest.raises(BrokenOffError):
                fit_run(broken, BreaksOff())
            self._made[name] = Twins(quiet, fit_run(broken, NoProgress(), resume=True))
        return self._made[name]

    def _configure(self, name: str, root: str) -> TrainConfig:
        model = MODELS[name]
        return TrainConfig.model_validate(
            {
                **RUN,
                "dataset": str(self._version.parent.parent),
                "name": name,
                "root": str(self._folder / root),
                "model": model,
            }
        )


@pytest.fixture(scope="module")
def runs(tiny_version: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_version, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_run_that_was_broken_off_has_the_losses_of_one_that_was_not(
    runs: Runs, name: str
) -> None:
    _assert_alike(runs.get(name))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_in_groups_of_like_length_is_resumed_alike(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.models.sequence.plan_groups", lambda *_: 4)
    _assert_alike(Runs(tiny_version, tmp_path).get("sasrec"))


def _assert_alike(twins: Twins) -> None:
    losses = [[(r.step, r.epoch, r.loss) for r in read_steps(run)] for run in vars(twins).values()]
    assert losses[0] == losses[1]
    assert losses[0][-1][:2] == (24, 2)
    weights = [_read_weights(load_run(run)) for run in vars(twins).values()]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


def _read_weights(trained: TrainedModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in trained.model.trainable_variables]
