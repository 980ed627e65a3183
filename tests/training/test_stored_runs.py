"""Runs in stores: trained here, gone on with and used elsewhere, and never by two at a time."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.artefacts.run import read_json
from conf.errors import ConfigError, TrainingInterruptedError, UpstreamNotReadyError
from conf.publication.holds import hold_lease
from conf.publication.working_copy import WorkingCopy, describe_place
from conf.training.models import DSSMConfig
from conf.training.train import TrainConfig
from jobs.cli import main
from tests.fake_store import FakeStore
from training.checkpoint.restore import load_run
from training.checkpoint.stored_runs import find_run
from training.fit import fit_run
from training.loop.epochs import StopRequest
from training.monitoring.progress import TrainingProgress

Machine = Callable[[str], None]


def plan(version: Path, epochs: int = 2, **settings: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "dataset": str(version),
            "name": "t",
            "root": "s3://bucket/runs",
            "model": DSSMConfig(embedding_dim=8).model_dump(),
            "input": {"batch_size": 64, "shuffle_buffer": 100},
            "fit": {"epochs": epochs},
            **settings,
        }
    )


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in json.loads((run / "history.json").read_text())]


def test_a_run_is_used_where_it_was_not_trained(
    store: FakeStore, machine: Machine, tiny_version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fit_run(plan(tiny_version), TrainingProgress())
    uri = f"s3://bucket/runs/t/runs/{run.name}"
    assert describe_place(run) == uri
    assert {"CURRENT", f"runs/{run.name}/run_card.json"} <= store.objects("bucket/runs/t")
    machine("second")
    found = find_run("s3://bucket/runs/t")
    assert found != run
    assert found.name == run.name
    assert read_json(found / "run_card.json") == read_json(run / "run_card.json")
    assert load_run(uri).run_dir == found
    assert main(["evaluate", "--run", "s3://bucket/runs/t"]) == 0
    assert main(["report", "--run", uri]) == 0
    machine("third")
    used = find_run(uri)
    assert read_json(used / "metrics.json")["split"] == "test"
    assert "metrics" in read_json(used / "run_card.json")
    assert (used / "report.html").is_file()
    assert capsys.readouterr().err == ""


def interrupted(
    config: TrainConfig, checks: int, monkeypatch: pytest.MonkeyPatch, **options: bool
) -> None:
    """Trains until a signal is looked for so many times, as if it had come then."""
    asked = 0

    def requested(self: StopRequest) -> bool:
        nonlocal asked
        asked += 1
        if asked == checks:
            self.request(signal.SIGTERM)
        return asked >= checks

    with monkeypatch.context() as patched:
        patched.setattr(StopRequest, "requested", property(requested))
        with pytest.raises(TrainingInterruptedError):
            fit_run(config, TrainingProgress(), **options)


@pytest.mark.slow
def test_other_machines_go_on_where_one_was_lost(
    store: FakeStore,
    machine: Machine,
    tiny_version: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = plan(tiny_version)
    whole = fit_run(config.model_copy(update={"root": str(tmp_path / "whole")}), TrainingProgress())
    interrupted(config, 2, monkeypatch)
    assert "CURRENT" not in store.objects("bucket/runs/t")
    machine("second")
    interrupted(config, 2, monkeypatch, resume=True)
    machine("first")  # Its own state is old by now.
    run = fit_run(config, TrainingProgress(), resume=True)
    assert losses(run) == losses(whole)
    assert len(list(run.parent.iterdir())) == 1
    assert find_run("s3://bucket/runs/t") == run
    machine("third")
    assert fit_run(config, TrainingProgress(), once=True).name == run.name
    assert fit_run(config, TrainingProgress()).name != run.name


@pytest.mark.parametrize("whole", [0, 1])
def test_a_checkpoint_that_was_brought_in_part_is_left_out(
    store: FakeStore,
    machine: Machine,
    tiny_version: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: int,
) -> None:
    """The history came before them, and may be epochs ahead."""
    config = plan(tiny_version, epochs=4)
    interrupted(config, 3, monkeypatch)
    found = store.objects("bucket/runs/t")
    last = sorted(k for k in found if "/last/" in k and k.endswith("checkpoint.json"))
    for key in last[whole:]:
        store.delete(f"runs/t/{key}", "")
    machine("second")
    run = fit_run(config, TrainingProgress(), resume=True)
    assert len(json.loads((run / "history.json").read_text())) == config.fit.epochs
    for key in store.objects("bucket/runs/t"):
        if "/last/" in key:  # What is there is whole.
            assert key.rpartition("/")[0] + "/checkpoint.json" in store.objects("bucket/runs/t")


def test_a_run_that_is_trained_elsewhere_is_left_alone(
    store: FakeStore, machine: Machine, tiny_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan(tiny_version, epochs=1)
    interrupted(config, 1, monkeypatch)
    [run_id] = {key.split("/")[1] for key in store.objects("bucket/runs/t") if "/" in key}
    place = WorkingCopy.at(f"s3://bucket/runs/t/runs/{run_id}")
    before = store.objects("bucket/runs/t")
    machine("second")
    with (
        hold_lease(place.remote, "first"),
        pytest.raises(UpstreamNotReadyError, match="another process is working"),
    ):
        fit_run(config, TrainingProgress(), resume=True)
    assert store.objects("bucket/runs/t") == before


def test_a_store_that_fails_meanwhile_loses_nothing(
    store: FakeStore, machine: Machine, tiny_version: Path
) -> None:
    config = plan(tiny_version, epochs=1)

    def refuse(name: str) -> None:
        if name.startswith("put") and "checkpoints" in name:
            raise OSError("503 Slow Down")

    store.hook = refuse
    with pytest.raises(ConfigError, match="cannot be reached"):
        fit_run(config, TrainingProgress())
    assert "CURRENT" not in store.objects("bucket/runs/t")
    store.hook = lambda name: None
    run = fit_run(config, TrainingProgress(), once=True)  # Nothing is trained again: it is brought.
    machine("second")
    assert losses(find_run("s3://bucket/runs/t")) == losses(run)


def test_a_run_starts_from_one_in_a_store(
    store: FakeStore, machine: Machine, tiny_version: Path
) -> None:
    fit_run(plan(tiny_version, epochs=1), TrainingProgress())
    machine("second")
    config = plan(tiny_version, fit={"epochs": 1, "warm_start": "s3://bucket/runs/t"})
    second = fit_run(config, TrainingProgress())
    rows = read_json(second / "warm_start.json")["rows"]["movie_id"]
    assert rows["transferred"] == rows["rows"] > 0
