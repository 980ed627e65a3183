from __future__ import annotations

import errno
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.artefacts.dataset import read_manifest
from conf.artefacts.run import read_json, resolve_run, update_run_card
from conf.errors import (
    ConfigError,
    InputDataError,
    TrainingDivergedError,
    TrainingInterruptedError,
    UpstreamNotReadyError,
)
from conf.storage.processes import hold_file_lock
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import EarlyStoppingConfig, FitConfig, TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.fit import fit_run
from training.loop.plan import read_plan
from training.monitoring.progress import build_progress
from training.reader import training_data
from training.run_directory import (
    choose_start,
    config_sha256,
    create_run,
    find_finished_run,
    find_unfinished_run,
    locked,
    recorded_status,
    require_same_config,
    run_paths,
)

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(dataset="d", name="n", root=str(tmp_path / "runs"))


def begin(config: TrainConfig, status: str, now: datetime = NOW) -> Path:
    run = create_run(config, now)
    update_run_card(run, status=status, config_sha256=config_sha256(config))
    return run


def test_runs_are_named_by_time_and_config_and_held_by_one_process(config: TrainConfig) -> None:
    run, *others = (create_run(config, NOW) for _ in range(3))
    assert run.parent == run_paths(config).runs
    assert run.name == f"20260304T050607Z-{config_sha256(config)[:8]}"
    assert len({run, *others}) == 3
    with locked(run), pytest.raises(UpstreamNotReadyError, match="another process"), locked(run):
        pass
    with locked(run):
        pass


def one_of_two(chief: TrainConfig | None, *, others_differ: bool = False) -> Any:
    """Stands for a worker whose chief has a config, or for the chief."""
    theirs = {} if chief is None else chief.resolved()
    return SimpleNamespace(
        index=int(chief is not None),
        count=2,
        is_chief=chief is None,
        share=lambda decide: {
            k: theirs.get(k, v) for k, v in json.loads(json.dumps(decide())).items()
        },
        any=lambda flag: flag or others_differ,
    )


def test_workers_with_different_configs_are_refused(config: TrainConfig) -> None:
    elsewhere = config.model_copy(update={"root": "/elsewhere"})
    require_same_config(elsewhere, one_of_two(config))
    other = config.model_copy(update={"seed": 7})
    with pytest.raises(ConfigError, match="different configs") as refused:
        require_same_config(other, one_of_two(config))
    assert "worker 1: seed: 7" in refused.value.received
    with pytest.raises(ConfigError, match="another one differs"):
        require_same_config(config, one_of_two(config, others_differ=True))


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
    with pytest.raises(TrainingInterruptedError), recorded_status(newer):
        raise TrainingInterruptedError("asked to stop")
    assert read_json(newer / "run_card.json")["status"] == "interrupted"
    assert find_unfinished_run(config) == newer
    begin(config, "trained", NOW.replace(hour=10))  # What is older than that is left alone.
    assert find_unfinished_run(config) is None


def configure(dataset: Path, root: Path, **changes) -> TrainConfig:
    return TrainConfig(
        **{
            "dataset": str(dataset),
            "name": "t",
            "root": str(root),
            "model": DSSMConfig(embedding_dim=8),
            "input": InputConfig(batch_size=64),
            "optimizer": OptimizerConfig(learning_rate=0.01),
            "fit": FitConfig(epochs=2, early_stopping=EarlyStoppingConfig(metric="ndcg@10")),
            **changes,
        }
    )


def fit(config: TrainConfig, **options: bool) -> Path:
    return fit_run(config, build_progress("text", 3600), **options)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_version: Path
) -> tuple[Path, TrainConfig]:
    config = configure(tiny_version.parent.parent, tmp_path_factory.mktemp("runs"))
    return fit(config), config


def test_a_failed_run_changes_nothing_that_was_there(finished) -> None:
    run, config = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    wild = config.model_copy(update={"optimizer": OptimizerConfig(learning_rate=1e38)})
    with pytest.raises(TrainingDivergedError):
        fit(wild)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert resolve_run(str(run.parent.parent)) == run
    failed = next(other for other in run.parent.iterdir() if other != run)
    card = read_json(failed / "run_card.json")
    assert card["status"] == "failed"
    assert "diverged" in card["error"]


def test_resume_continues_the_unfinished_run_on_its_own_dataset_version(
    tmp_path: Path, tiny_version: Path
) -> None:
    config = configure(tiny_version, tmp_path, fit=FitConfig(epochs=1, early_stopping=None))
    run = fit(config)
    card = read_json(run / "run_card.json")
    assert fit(config, once=True) == run
    assert read_json(run / "run_card.json") == card
    lock = run.parent.parent / ".once.lock"
    with hold_file_lock(lock), pytest.raises(UpstreamNotReadyError, match="--once"):
        fit(config, once=True)
    changed = {**card["dataset"], "manifest_sha256": "0" * 64}  # as if of an earlier version
    update_run_card(run, dataset=changed)
    assert find_finished_run(config, read_manifest(tiny_version)) is None
    update_run_card(run, dataset=card["dataset"])
    update_run_card(run, status="training")  # as if killed before the last line
    (run.parent.parent / "CURRENT").unlink()
    assert fit(config, once=True) == run
    assert read_json(run / "run_card.json")["status"] == "trained"
    assert len(json.loads((run / "history.json").read_text())) == 1
    current = run.parent.parent / "CURRENT"
    current.write_text("20260101T000000Z-00000000\n")  # as if of another config, trained since
    assert fit(config, once=True) == run
    assert current.read_text().strip() == run.name
    other = fit(config, resume=True)  # nothing is unfinished now
    assert other != run
    assert (run / "run_card.json").exists()


def test_resume_refuses_a_changed_dataset_and_a_busy_run(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=20))
    config = configure(version, tmp_path, fit=FitConfig(epochs=1, early_stopping=None))
    run = fit(config)
    update_run_card(run, status="training")
    with locked(run), pytest.raises(UpstreamNotReadyError, match="another process"):
        fit(config, resume=True)
    write_tiny_dataset(tmp_path, config=TinyConfig(users=20, own_group=0.1))
    with pytest.raises(InputDataError, match="not the one"):
        fit(config, resume=True)
    write_tiny_dataset(tmp_path, config=TinyConfig(users=20, max_len=5))
    with pytest.raises(InputDataError, match=r"'history'[\s\S]*max_len 5[\s\S]*max_len 8"):
        fit(config, resume=True)


def test_resume_starts_anew_where_the_dataset_version_is_gone(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=20))
    root, once = tmp_path / "runs", FitConfig(epochs=1, early_stopping=None)
    config = configure(version.parent.parent, root, fit=once)
    run = fit(config)
    update_run_card(run, status="training")
    newer = version.with_name("20260202T000000Z-tiny")
    version.rename(newer)
    (version.parent.parent / "CURRENT").write_text(newer.name + "\n")
    stream = io.StringIO()
    other = fit_run(config, build_progress("text", 3600, stream), resume=True)
    assert other != run
    assert "is gone" in stream.getvalue()
    assert resolve_run(str(root / "t")) == other


def publish_other_lists(mixed: Path, folder: Path) -> None:
    """Makes a version with shorter lists the current one of a dataset."""
    newer = mixed.with_name("20260202T000000Z-tiny")
    write_tiny_dataset(folder, "other", TinyConfig(users=20, max_len=5)).rename(newer)
    (mixed.parent.parent / "CURRENT").write_text(newer.name + "\n")


def test_a_run_goes_on_with_the_versions_that_it_mixed_in(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=20))
    mixed = write_tiny_dataset(tmp_path, "other", TinyConfig(users=20))
    mix = [{"dataset": str(mixed.parent.parent), "weight": 0.25}]
    settings = InputConfig.model_validate({"batch_size": 64, "mix": mix})
    once = FitConfig(epochs=1, early_stopping=None)
    config = configure(version, tmp_path / "runs", input=settings, fit=once)
    run = fit(config)
    card = read_json(run / "run_card.json")
    assert [part["path"] for part in card["mixed"]] == [str(mixed.resolve())]
    assert card["config"] == config.resolved()
    assert fit(config, once=True) == run
    publish_other_lists(mixed, tmp_path / "newer")
    update_run_card(run, status="training")
    assert fit(config, resume=True) == run
    with pytest.raises(InputDataError, match="max_len 5"):  # Not trained on the newer one yet.
        fit(config, once=True)
    changed = [{**card["mixed"][0], "manifest_sha256": "0" * 64}]
    update_run_card(run, status="training", mixed=changed)
    with pytest.raises(InputDataError, match="not the one"):
        fit(config, resume=True)
    mixed.rename(tmp_path / "gone")
    stream = io.StringIO()
    with pytest.raises(InputDataError, match="max_len 5"):
        fit_run(config, build_progress("text", 3600, stream), resume=True)
    assert "is gone" in stream.getvalue()


def test_workers_take_the_versions_of_the_chief(tmp_path: Path, tiny_version: Path) -> None:
    mix = [{"dataset": str(tiny_version.parent.parent), "weight": 0.25}]
    settings = InputConfig.model_validate({"batch_size": 64, "mix": mix})
    config = configure(tiny_version.parent.parent, tmp_path / "runs", input=settings)
    start = choose_start(config, build_progress("text", 3600), one_of_two(None))
    assert start.data.version_dir == tiny_version
    assert [data.version_dir for data in start.mixed] == [tiny_version]
    pinned = start.pin()
    assert pinned.input.mix[0].dataset == str(tiny_version)
    assert pinned.dataset == config.dataset


def test_a_run_is_current_before_it_counts_as_trained(
    tmp_path: Path, tiny_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = configure(tiny_version, tmp_path, fit=FitConfig(epochs=1, early_stopping=None))
    monkeypatch.setattr("training.fit.publish_run", full)
    with pytest.raises(OSError, match="No space"):
        fit(config)
    (run,) = (tmp_path / "t" / "runs").iterdir()
    assert read_json(run / "run_card.json")["status"] == "failed"
    monkeypatch.undo()
    assert fit(config, resume=True) == run
    assert resolve_run(str(tmp_path / "t")) == run


def test_a_plan_writes_nothing_and_refuses_a_split_smaller_than_a_batch(
    tmp_path: Path, tiny_version: Path
) -> None:
    plan = read_plan(configure(tiny_version, tmp_path / "runs")).to_json()
    assert plan["rows"]["train"] == 780
    assert plan["steps_per_epoch"] == 12
    assert plan["steps"] == 24
    assert plan["tables"]["movie_id"] == [42, 8]
    assert plan["selected_by"] == "ndcg@10"
    json.dumps(plan)
    config = configure(tiny_version, tmp_path / "runs", input=InputConfig(batch_size=781))
    for run in (read_plan, fit):
        with pytest.raises(InputDataError, match="smaller than one batch"):
            run(config)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_keeps_the_number_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_version: Path
) -> None:
    some = InputConfig.model_validate(
        {"batch_size": 64, "filter": [{"feature": "history", "op": ">", "value": 2}]}
    )
    once = FitConfig(epochs=1, early_stopping=None)
    config = configure(tiny_version, tmp_path, input=some, fit=once)
    run = fit(config)
    update_run_card(run, status="training")
    monkeypatch.setattr(training_data, "_COUNTED", {})  # as in another process
    monkeypatch.setattr(training_data, "_read_through", None)
    assert fit(config, resume=True) == run
    assert json.loads((run / "history.json").read_text())[0]["left_out"].keys() == {"filtered_rows"}
