from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from conf.errors import (
    ConfigError,
    InternalError,
    TrainingDivergedError,
    TrainingInterruptedError,
    UpstreamNotReadyError,
)
from conf.run import read_json, update_run_card
from conf.training import TrainConfig
from training.run_directory import (
    config_sha256,
    create_run,
    describe_versions,
    find_unfinished_run,
    locked,
    publish_run,
    recorded_status,
)

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(dataset="d", name="n", root=str(tmp_path / "runs"))


def begin(config: TrainConfig, status: str, now: datetime = NOW) -> Path:
    run = create_run(config, now)
    update_run_card(run, status=status, config_sha256=config_sha256(config))
    return run


def test_a_run_is_named_by_time_and_config(config: TrainConfig) -> None:
    run = create_run(config, NOW)
    assert run.is_dir()
    assert run.name == f"20260304T050607Z-{config_sha256(config)[:8]}"
    assert run.parent.name == "runs"


def test_two_runs_of_one_second_are_two_directories(config: TrainConfig) -> None:
    assert len({create_run(config, NOW) for _ in range(3)}) == 3


def test_the_newest_run_of_the_same_config_is_resumed_if_it_is_unfinished(
    config: TrainConfig,
) -> None:
    assert find_unfinished_run(config) is None
    begin(config, "trained")
    begin(config, "training", NOW.replace(hour=6))
    newer = begin(config, "failed", NOW.replace(hour=7))
    begin(config.model_copy(update={"seed": 1}), "trained", NOW.replace(hour=8))
    create_run(config, NOW.replace(hour=9))  # killed before its card was written
    assert find_unfinished_run(config) == newer


def test_an_unfinished_run_older_than_a_finished_one_is_left_alone(config: TrainConfig) -> None:
    begin(config, "training")
    begin(config, "trained", NOW.replace(hour=7))
    assert find_unfinished_run(config) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_damaged_card_of_another_run_is_passed_over(config: TrainConfig, content: bytes) -> None:
    unfinished = begin(config, "training")
    damaged = begin(config, "trained", NOW.replace(hour=7))
    (damaged / "run_card.json").write_bytes(content)
    assert find_unfinished_run(config) == unfinished


def test_a_run_is_held_by_one_process(config: TrainConfig) -> None:
    run = create_run(config, NOW)
    with locked(run), pytest.raises(UpstreamNotReadyError, match="another process"), locked(run):
        pass
    with locked(run):
        pass


def test_a_failure_is_noted_in_the_card(config: TrainConfig) -> None:
    run = begin(config, "training")
    with pytest.raises(TrainingDivergedError), recorded_status(run):
        raise TrainingDivergedError("the loss is infinite")
    card = read_json(run / "run_card.json")
    assert (card["status"], card["error"]) == ("failed", "the loss is infinite")


def test_an_interruption_is_no_failure_and_is_resumed(config: TrainConfig) -> None:
    run = begin(config, "training")
    with pytest.raises(TrainingInterruptedError), recorded_status(run):
        raise TrainingInterruptedError("asked to stop")
    assert read_json(run / "run_card.json")["status"] == "interrupted"
    assert find_unfinished_run(config) == run


def test_publishing_names_the_run(config: TrainConfig) -> None:
    run = create_run(config, NOW)
    publish_run(config, run)
    assert (run.parent.parent / "CURRENT").read_text() == run.name + "\n"


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TrainConfig(dataset="d", name="n", root=str(tmp_path / "file"))
    with pytest.raises(InternalError, match="root"):
        create_run(config, NOW)


def test_a_name_cannot_leave_the_root() -> None:
    with pytest.raises((ConfigError, ValueError)):
        create_run(TrainConfig(dataset="d", name="../n"), NOW)


def test_versions_are_named() -> None:
    versions = describe_versions()
    assert versions["python"]
    assert versions["tensorflow"]
