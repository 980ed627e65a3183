"""Every model and network: a run that is broken off goes on as if it were not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.training.train import TrainConfig
from tests.training.every_model import RANKING_MODELS, RETRIEVAL_MODELS, list_retrieval_names
from tests.training.killed_run import ActsAfter, KilledError, break_off
from training.checkpoint.restore import load_run
from training.fit import fit_run
from training.monitoring.progress import TrainingProgress
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


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*sorted(MODELS), "sasrec in groups of like length"])
def test_a_run_that_was_broken_off_has_the_losses_of_one_that_was_not(
    name: str, tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if " in groups" in name:
        monkeypatch.setattr("training.models.sequence.plan_groups", lambda *_: 4)
    settings = {**RUN, "dataset": str(tiny_version), "model": MODELS[name.split()[0]]}
    quiet, broken = (
        TrainConfig.model_validate({**settings, "name": which, "root": str(tmp_path)})
        for which in ("quiet", "broken")
    )
    with pytest.raises(KilledError):
        fit_run(broken, ActsAfter(BROKEN_AFTER, break_off))
    runs = [fit_run(quiet, TrainingProgress()), fit_run(broken, TrainingProgress(), resume=True)]
    losses = [[(r.step, r.epoch, r.loss) for r in read_steps(run)] for run in runs]
    assert losses[0] == losses[1]
    assert losses[0][-1][:2] == (24, 2)
    weights = [load_run(run).model.trainable_variables for run in runs]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
