from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conf.artefacts.run import read_json, resolve_run
from conf.errors import ConfigError, TrainingInterruptedError, UpstreamNotReadyError
from conf.load import override_config
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.fit import fit_run
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import EpochRecord, read_history
from training.reader.training_data import read_current_data
from training.refit import (
    describe_plan,
    fit_chosen,
    propose_values,
    tell_far_behind,
)
from training.run_directory import locked
from training.trials import Study, Trial

PAIRS = {"hash_of": ["user_id", "movie_id"], "share": 0.2}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    return write_tiny_dataset(folder, config=TinyConfig(validation=False))


@pytest.fixture
def config(dataset: Path, tmp_path: Path) -> TrainConfig:
    return build_config(dataset, tmp_path / "runs")


def build_config(dataset: Path, root: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(dataset),
            "name": "r",
            "root": str(root),
            "model": {"name": "mf", "embedding_dim": 4},
            "input": {"batch_size": 128, "validation": PAIRS},
            "optimizer": {"learning_rate": 0.05, "schedule": "cosine"},
            "fit": {"epochs": 3, "refit": True},
            "evaluation": {"ks": [5, 10]},
        }
    )


def with_space(config: TrainConfig, **changes: object) -> TrainConfig:
    space = {"optimizer.learning_rate": [0.001, 0.05], "model.temperature": [0.05, 0.2]}
    return override_config(config, {"fit.refit": {"space": space}, **changes}, "of the test")


PATIENT = {"fit.early_stopping.patience": 9}


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a choice among four trials that nothing disturbed."""
    config = build_config(dataset, tmp_path_factory.mktemp("whole"))
    return fit_chosen(with_space(config, **PATIENT), TrainingProgress())


def read_losses(run: Path) -> list[float]:
    return [record.loss for record in read_history(run)]


def test_the_run_is_one_from_scratch_on_all_rows_for_as_many_epochs_as_were_best(
    config: TrainConfig,
) -> None:
    run = fit_chosen(config, TrainingProgress())
    card = read_json(run / "run_card.json")
    state = read_json(Path(card["refit"]["directory"]) / "trials.json")
    (trial,) = state["trials"]
    history = read_history(Path(trial["detail"]))
    values = [record.validation["ndcg@10"] for record in history]
    epoch = int(np.argmax(values)) + 1
    assert (trial["epoch"], trial["value"]) == (epoch, max(values))
    assert card["refit"]["chosen"] == {"values": {}, "value": max(values), "epoch": epoch}
    assert state["run"] == str(run) == str(resolve_run(str(Path(config.root) / "r")))
    # By hand, and without a word of held-out rows.
    steps = read_current_data(config).steps_per_epoch(
        config.input.model_copy(update={"validation": None})
    )
    plain = {
        **config.model_dump(mode="json"),
        "name": "plain",
        "input": {"batch_size": 128},
        "optimizer": {"learning_rate": 0.05, "schedule": {"kind": "cosine", "steps": 3 * steps}},
        "fit": {"epochs": epoch, "early_stopping": None},
    }
    union = fit_run(TrainConfig.model_validate(plain), TrainingProgress())
    assert read_losses(run) == read_losses(union)
    assert read_history(run)[0].examples > history[0].examples
    assert card["config"]["input"]["validation"] is None
    assert card["training"]["best_epoch"] == epoch


def test_keys_are_tried_one_after_the_other_each_with_the_best_so_far(
    config: TrainConfig, whole: Path
) -> None:
    config = with_space(config, **PATIENT)
    cost = {"metric": "ndcg@10", "trials": 4, "epochs": 15}
    assert describe_plan(config, config.fit.refit) == cost
    space = {"model.temperature": [0.1, 0.2], "fit.epochs": [7], "model.embedding_dim": [2]}
    other = override_config(config, {"fit.refit": {"space": space}}, "of the test")
    # Two trials of 3 epochs, one of 7, one more, and the run.
    assert describe_plan(other, other.fit.refit)["epochs"] == 2 * 3 + 7 + 7 + 7
    found = read_json(whole / "run_card.json")
    trials = found["refit"]["trials"]
    rate, temperature = "optimizer.learning_rate", "model.temperature"
    finished = [trial for trial in trials if trial["value"] is not None]
    best_rate = max(finished[:2], key=lambda trial: trial["value"])["values"]
    assert [trial["values"] for trial in trials[:2]] == [{rate: 0.001}, {rate: 0.05}]
    assert [trial["values"] for trial in trials[2:]] == [
        {**best_rate, temperature: value} for value in (0.05, 0.2)
    ]
    best = max(finished, key=lambda trial: trial["value"])
    assert found["refit"]["chosen"] == best
    assert found["config"]["optimizer"]["learning_rate"] == best["values"][rate]


def test_trials_and_run_mix_in_one_version(config: TrainConfig, tmp_path: Path) -> None:
    other = write_tiny_dataset(tmp_path, "other", TinyConfig(validation=False))
    mix = [{"dataset": str(other.parent.parent), "weight": 0.2}]
    run = fit_chosen(
        override_config(config, {"input.mix": mix, "fit.epochs": 1}, "of the test"),
        TrainingProgress(),
    )
    (state,) = run.parent.parent.glob("refits/*/trials.json")
    assert read_json(state)["mixed"] == [str(other.absolute())]
    trained = [run, *map(Path, (trial["detail"] for trial in read_json(state)["trials"]))]
    assert len(trained) == 2
    for one in trained:
        card = read_json(one / "run_card.json")
        assert card["config"]["input"]["mix"][0]["dataset"] == str(other.absolute())
        assert card["mixed"][0]["version"] == other.name


class Interrupts(TrainingProgress):
    """Progress that ends the process, as a signal would, after so many epochs of all runs."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        self.left -= 1
        if not self.left:
            raise TrainingInterruptedError("SIGTERM")


@pytest.mark.parametrize("epochs", [1, 5, 13])  # In the first trial, the second, the run itself.
def test_what_was_interrupted_goes_on_to_the_same_run(
    epochs: int, config: TrainConfig, whole: Path
) -> None:
    config = with_space(config, **PATIENT)
    with pytest.raises(TrainingInterruptedError):
        fit_chosen(config, Interrupts(epochs))
    run = fit_chosen(config, TrainingProgress(), resume=True)
    assert read_losses(run) == read_losses(whole)
    cards = [read_json(path / "run_card.json")["refit"] for path in (run, whole)]
    assert cards[0]["trials"] == cards[1]["trials"]
    base = Path(config.root) / "r"
    assert len(list(base.glob("refits/*"))) == len(list(base.glob("runs/*"))) == 1
    assert all(len(list(path.iterdir())) == 1 for path in base.glob("refits/*/trials/*/runs"))


def test_what_has_finished_is_trained_again_but_not_with_once(config: TrainConfig) -> None:
    config = override_config(config, {"fit.epochs": 1}, "of the test")
    first = fit_chosen(config, TrainingProgress(), once=True)
    assert fit_chosen(config, TrainingProgress(), once=True) == first
    (directory,) = (Path(config.root) / "r" / "refits").iterdir()
    # Killed after the run was published and before that was noted.
    state = {**read_json(directory / "trials.json"), "run": None}
    (directory / "trials.json").write_text(json.dumps(state))
    with locked(directory), pytest.raises(UpstreamNotReadyError):
        fit_chosen(config, TrainingProgress(), resume=True)
    other = fit_run(override_config(config, {"fit.refit": None}, "of the test"), TrainingProgress())
    series = str(Path(config.root) / "r")
    assert resolve_run(series) == other
    assert fit_chosen(config, TrainingProgress(), resume=True) == first == resolve_run(series)
    assert fit_chosen(config, TrainingProgress(), resume=True) != first


def test_a_trial_that_cannot_be_trained_is_passed_over(config: TrainConfig) -> None:
    negatives = {"model.objective.negatives": {"source": "uniform", "count": 64}}
    apart = {"model.objective.negatives.count": [16], "model.objective.negatives.hardest": [32]}
    # Trained by the label it has a loss alone.
    by_label, ranked = {"model.objective.kind": ["binary", "softmax"]}, "fit.early_stopping.metric"
    for changes, space, failed in (
        ({}, {"optimizer.learning_rate": [1e38, 0.05]}, [True, False]),
        (negatives, apart, [False, True]),
        ({ranked: "ndcg@10"}, by_label, [True, False]),
    ):
        changed = override_config(config, {**changes, "fit.refit.space": space}, "of the test")
        card = read_json(fit_chosen(changed, TrainingProgress()) / "run_card.json")
        assert [trial["value"] is None for trial in card["refit"]["trials"]] == failed
    few = {"input.batch_size": 700, "fit.refit.space": {"model.embedding_dim": [2]}}
    nothing = override_config(config, few, "of the test")
    with pytest.raises(ConfigError, match=r"no trial of fit\.refit has finished"):
        fit_chosen(nothing, TrainingProgress())


@pytest.mark.parametrize("best", ["0.3", "0.2", "0.1"])
def test_keys_are_tried_in_the_same_order_however_many_trials_are_known(
    best: str, config: TrainConfig
) -> None:
    rate, dim, temperature = "optimizer.learning_rate", "model.embedding_dim", "model.temperature"
    space = {temperature: [0.1, 0.2], dim: [8, 2], rate: [0.3, 0.1, 0.2]}
    config = override_config(config, {"fit.refit": {"space": space}}, "of the test")
    study = Study(Path("x"), "ndcg@10")
    while (values := propose_values(config, config.fit.refit, study)) is not None:
        value = values[temperature] + 0.01 * values.get(dim, 4) + (str(values.get(rate)) == best)
        study.trials.append(Trial(len(study.trials), "complete", values, "", 1.0, value, 1))
    tried = [trial.values for trial in study.trials]
    assert [tuple(values.values()) for values in tried] == [
        (0.1,), (0.2,), (0.2, 8), (0.2, 2), (0.2, 8, 0.3), (0.2, 8, 0.1), (0.2, 8, 0.2),
    ]  # fmt: skip
    for number, values in enumerate(tried):
        known = Study(Path("x"), "ndcg@10", study.trials[:number])
        assert propose_values(config, config.fit.refit, known) == values


def test_a_trial_far_behind_is_ended_in_its_second_half() -> None:
    def end(curve: list, values: list[float], epochs: int = 4, metric: str = "ndcg@10") -> bool:
        best = Trial(0, "complete", {}, "x", 1.0, curve[-1] or 0.1, len(curve), curve)
        return tell_far_behind(Study(Path("x"), metric, [best]), values, epochs) is not None

    curve = [0.1, 0.2, 0.3, 0.4]
    assert not end(curve, [0.0])
    assert not end(curve, [0.0, 0.181])
    assert end(curve, [0.0, 0.0, 0.269])
    assert not end(curve, [0.0] * 3, epochs=8)  # The best one lasted half as long.
    assert end(curve, [0.0] * 4 + [0.359], epochs=8)
    assert not end(curve, [9.0] * 4, metric="loss")
    for unknown in ([-0.5, -0.5], [None, None]):  # No share of these says anything.
        assert not end(unknown, [-0.47, -0.47], epochs=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input.validation": None}, r"input\.validation"),
        ({"fit.max_steps": 10}, "max_steps"),
        ({"fit.early_stopping": None}, "nothing to choose"),
        ({"model": {"kind": "ranking", "calibration": "isotonic"}}, "do not train"),
        ({"devices.strategy": "multi_worker"}, "several runs"),
        ({"fit.refit": {"space": {"dataset": ["x"]}}}, "same for all"),
        ({"fit.refit": {"space": {"input.validation.share": [0.1]}}}, "decides which rows"),
        ({"fit.refit": {"space": {"input": [{"batch_size": 64}]}}}, "decides which rows"),
        ({"fit.refit": {"space": {"optimizer.learning_rat": [1]}}}, "learning_rate"),
        ({"fit.refit": {"metric": "ndcg@7"}}, r"fit\.refit\.metric is not evaluated"),
        ({"fit.refit": {"metric": "loss"}}, "ranked and have no loss"),
        ({"root": "s3://bucket/runs"}, "file system"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_trained(
    changes: dict, message: str, config: TrainConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_chosen(override_config(config, changes, "of the test"), TrainingProgress())
    assert not (Path(config.root) / "r" / "runs").exists()
