from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError
from conf.training import EarlyStoppingConfig
from training.history import (
    EpochRecord,
    find_best_epoch,
    latest_metric,
    read_history,
    read_resumed_history,
    should_stop,
    write_history,
)


def records(values: list[float], losses: list[float] | None = None) -> list[EpochRecord]:
    losses = losses or [1.0] * len(values)
    return [
        EpochRecord(i + 1, loss, 1.0, 10, 10.0, 0.1, {"ndcg@10": value})
        for i, (value, loss) in enumerate(zip(values, losses, strict=True))
    ]


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([0.1, 0.3, 0.2], 2),
        ([0.3, 0.3, 0.1], 1),  # the first of equals
        ([float("nan"), 0.1], 2),
        ([0.1], 1),
    ],
)
def test_best_epoch(values: list[float], best: int) -> None:
    assert find_best_epoch(records(values), "ndcg@10") == best


def test_without_a_metric_the_last_epoch_is_kept() -> None:
    assert find_best_epoch(records([0.3, 0.1]), None) == 2


def test_a_lower_loss_is_better() -> None:
    assert find_best_epoch(records([0, 0, 0], [3.0, 1.0, 2.0]), "loss") == 2


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ndcg@10"):
        find_best_epoch(records([0.1]), "ndcg@5")


@pytest.mark.parametrize(
    ("values", "stop"),
    [
        ([], False),
        ([0.3, 0.2], False),
        ([0.3, 0.2, 0.1], True),
        ([0.3, 0.2, 0.4], False),
    ],
)
def test_patience(values: list[float], stop: bool) -> None:
    config = EarlyStoppingConfig(metric="ndcg@10", patience=2)
    assert should_stop(records(values), config) is stop
    assert not should_stop(records(values), None)


def test_round_trip(tmp_path: Path) -> None:
    history = records([0.1, 0.2, 0.3])
    assert read_history(tmp_path) == []
    write_history(tmp_path, history)
    assert read_history(tmp_path) == history


@pytest.mark.parametrize(("finished", "newest"), [(3, 3), (2, 2), (1, 2)])
def test_a_resumed_history_ends_where_the_weights_do(
    tmp_path: Path, finished: int, newest: int
) -> None:
    history = records([0.1, 0.2, 0.3])
    write_history(tmp_path, history)
    assert read_resumed_history(tmp_path, finished, newest) == history[:finished]


@pytest.mark.parametrize(
    ("epochs", "checkpoint"), [([], 2), ([1], 2), ([1, 2], 0), ([1, 3], 3), ([2, 3], 2)]
)
def test_a_history_that_does_not_fit_the_checkpoint_is_refused(
    tmp_path: Path, epochs: list[int], checkpoint: int
) -> None:
    every = records([0.1, 0.2, 0.3])
    write_history(tmp_path, [every[epoch - 1] for epoch in epochs])
    with pytest.raises(InputDataError, match="does not fit its checkpoints"):
        read_resumed_history(tmp_path, checkpoint, checkpoint)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text('[{"epoch": 1')
    with pytest.raises(InputDataError, match=r"history\.json"):
        read_history(tmp_path)


def test_the_latest_metric_is_that_of_the_last_epoch() -> None:
    history = records([0.1, 0.3, 0.2])
    assert latest_metric(history, "ndcg@10") == ("ndcg@10", 0.2)
    assert latest_metric(history, "loss") is None
    assert latest_metric(history, None) is None
    assert latest_metric([], "ndcg@10") is None
