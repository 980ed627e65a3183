from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from conf.artefacts.run import read_json, resolve_run
from conf.errors import ConfigError, OwnCodeError, TrainingInterruptedError
from conf.load import override_config
from conf.training.train import TrainConfig
from conf.training.trials import SweepConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training import trials
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history
from training.trials import (
    check_space,
    find_sweep_metric,
    run_sweep,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def config(dataset: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(dataset),
            "name": "s",
            "root": str(tmp_path / "runs"),
            "model": {"name": "mf", "embedding_dim": 4},
            "input": {"batch_size": 128},
            "fit": {"epochs": 2},
            "evaluation": {"ks": [5, 10]},
        }
    )


pytest.importorskip("optuna", reason="needs optuna: pip install 'sluice-recsys[sweep]'")

GRID = {
    "sampler": "grid",
    "space": {"optimizer.learning_rate": [0.001, 0.05], "model.embedding_dim": [2, 4]},
}
RANDOM = {
    "trials": 3,
    "space": {
        "optimizer.learning_rate": {"low": 1e-3, "high": 0.1, "log": True},
        "model.embedding_dim": {"low": 2, "high": 8, "step": 2, "integer": True},
    },
}


def sweep_config(data: dict, **changes: object) -> SweepConfig:
    return SweepConfig.model_validate({**data, **changes})


def test_a_grid_runs_every_point_and_keeps_the_best(config: TrainConfig) -> None:
    result = run_sweep(config, sweep_config(GRID), TrainingProgress())
    points = {tuple(trial.values.values()) for trial in result.trials}
    assert points == {(0.001, 2), (0.001, 4), (0.05, 2), (0.05, 4)}
    assert [trial.state for trial in result.trials] == ["complete"] * 4
    for trial in result.trials:
        run = Path(trial.detail)
        card = read_json(run / "run_card.json")
        assert run.is_relative_to(result.directory / "trials")
        assert card["status"] == "trained"
        assert (
            card["config"]["optimizer"]["learning_rate"] == trial.values["optimizer.learning_rate"]
        )
        best = read_history(run)[card["training"]["best_epoch"] - 1]
        assert trial.value == best.validation["ndcg@10"]
    assert result.best.value == max(trial.value for trial in result.trials)
    again = TrainConfig.model_validate(yaml.safe_load(result.best_config.read_text()))
    assert again.name == config.name
    assert again.root == config.root
    assert again.model.embedding_dim == result.best.values["model.embedding_dim"]
    table = json.loads((result.directory / "trials.json").read_text())
    assert table["best"] == result.best.number
    assert not (Path(config.root) / "s" / "CURRENT").exists()


@pytest.mark.exhaustive
def test_an_interrupted_sweep_resumes_to_the_trials_of_one_that_was_not(
    config: TrainConfig, tmp_path: Path, monkeypatch
) -> None:
    sampler = "tpe"  # Its first ten trials are drawn at random.
    wanted = sweep_config(RANDOM, sampler=sampler)
    elsewhere = config.model_copy(update={"root": str(tmp_path / "whole")})
    whole = run_sweep(elsewhere, wanted, TrainingProgress())
    fit, runs = trials.fit_run, []

    def interrupted(*arguments: object, **options: object) -> Path:
        runs.append(options["resume"])
        if len(runs) == 2:
            raise TrainingInterruptedError("SIGTERM")
        return fit(*arguments, **options)

    monkeypatch.setattr(trials, "fit_run", interrupted)
    with pytest.raises(TrainingInterruptedError):
        run_sweep(config, wanted, TrainingProgress())
    result = run_sweep(config, wanted, TrainingProgress(), resume=True)
    assert len(runs) == 4  # the interrupted trial twice
    assert [t.values for t in result.trials] == [t.values for t in whole.trials]
    assert [t.value for t in result.trials] == [t.value for t in whole.trials]
    assert len({json.dumps(t.values) for t in result.trials}) == 3
    more = run_sweep(
        config, sweep_config(RANDOM, sampler=sampler, trials=4), TrainingProgress(), resume=True
    )
    assert len(runs) == 5
    assert more.directory == result.directory
    assert more.trials[:3] == result.trials
    run_sweep(
        config, sweep_config(RANDOM, sampler=sampler, trials=4), TrainingProgress(), resume=True
    )
    assert len(runs) == 5  # nothing is left


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OwnCodeError("a metric fails")])
def test_a_trial_killed_in_the_middle_goes_on_in_its_run(
    config: TrainConfig, error: BaseException
) -> None:
    class Killed(TrainingProgress):
        def epoch(self, record: object, best: bool, metric: str | None) -> None:
            raise error

    wanted = sweep_config(RANDOM, trials=1)
    with pytest.raises(type(error)):
        run_sweep(config, wanted, Killed())
    result = run_sweep(config, wanted, TrainingProgress(), resume=True)
    (trial,) = result.trials
    assert trial.state == "complete"
    assert len(list((result.directory / "trials" / "0000" / "runs").iterdir())) == 1
    assert len(read_history(resolve_run(trial.detail))) == 2


def test_a_trial_that_cannot_be_trained_or_compared_fails_alone(config: TrainConfig) -> None:
    negatives = {"model.objective.negatives": {"source": "uniform", "count": 64}}
    apart = {"model.objective.negatives.count": [16, 64], "model.objective.negatives.hardest": [32]}
    held_out = {"input.validation": {"hash_of": "user_id", "share": 0.3}}
    kinds = {"model.objective.kind": ["sampled_softmax", "binary"]}
    for changes, space, why in (
        ({}, {"optimizer.learning_rate": [1e38, 0.01]}, "diverged"),
        ({}, {"input.batch_size": [100_000, 128]}, "smaller than one batch"),
        (negatives, apart, "of trial 0"),
        # Ranked rows have no loss: that of training would stand beside one of held-out rows.
        ({**held_out, "model.objective.kind": "binary"}, kinds, "cannot be compared"),
    ):
        changed = override_config(config, changes, "of the test")
        wanted = sweep_config({"sampler": "grid", "space": space})
        result = run_sweep(changed, wanted, TrainingProgress())
        assert [trial.state for trial in result.trials] == ["fail", "complete"]
        assert why in result.trials[0].detail
        assert result.best.number == 1


def test_trials_are_compared_by_the_rows_that_are_held_out(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path / "datasets", config=TinyConfig(validation=False))
    base = {
        "dataset": str(version),
        "name": "s",
        "root": str(tmp_path / "runs"),
        "input": {"batch_size": 128, "validation": {"hash_of": "user_id", "share": 0.3}},
        "fit": {"epochs": 1},
    }
    wanted = sweep_config({"sampler": "grid", "space": {"optimizer.learning_rate": [0.01]}})
    for kind, metric in (("sampled_softmax", "ndcg@10"), ("binary", "loss")):
        model = {"name": "mf", "embedding_dim": 2, "objective": {"kind": kind}}
        config = TrainConfig.model_validate({**base, "name": kind, "model": model})
        result = run_sweep(config, wanted, TrainingProgress())
        (record,) = read_history(result.best.run)
        assert result.metric == metric
        assert result.best.value == record.validation[metric]
    with pytest.raises(ConfigError, match="not evaluated"):
        find_sweep_metric(config, wanted.model_copy(update={"metric": "ndcg@10"}))


def test_trials_far_behind_are_pruned(config: TrainConfig) -> None:
    # Good ones first: five trials are needed before a median counts.
    rates = [0.05, 0.051, 0.052, 0.053, 0.054, 1e-9]
    wanted = sweep_config(
        {"sampler": "grid", "space": {"optimizer.learning_rate": rates}, "prune_after_epochs": 1}
    )
    result = run_sweep(config, wanted, TrainingProgress())
    assert [trial.state for trial in result.trials] == ["complete"] * 5 + ["pruned"]
    assert "ended after epoch 1" in result.trials[-1].detail


def test_keys_that_make_trials_incomparable_are_refused(config: TrainConfig) -> None:
    between = override_config(config, {"fit.validation": {"every_steps": 5}}, "of the test")
    check_space(between, {"fit.validation.batches": [1, 20]})
    by_steps = {"fit.validation": {"every_steps": 5}, "fit.early_stopping": {"by": "steps"}}
    for changes, key in (
        (by_steps, "fit.validation.batches"),
        ({}, "name"),
        ({}, "evaluation.mask_seen"),
    ):
        with pytest.raises(ConfigError, match=r"decides|says"):
            check_space(override_config(config, changes, "of the test"), {key: [1]})
    wrong = {"optimizer.learning_rat": [1], "model.embedding_dim": [4, "many"], "fit.epochs": [0]}
    for key, values in wrong.items():
        with pytest.raises(ConfigError, match=key.partition(".")[2]):
            check_space(config, {key: values})
