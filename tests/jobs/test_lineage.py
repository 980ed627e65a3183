"""Events of runs: valid by the standard's schema, off by default, and never in the way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from conf.errors import InputDataError, TrainingInterruptedError
from conf.etl.build import BuildConfig
from conf.load import load_config
from jobs import export
from jobs.build_dataset import _list_read
from jobs.support.lineage import LineageRun, describe
from jobs.train import train
from tests.jobs.runs import write_tiny_run
from tests.lineage import file_transport, read_events
from training.checkpoint.restore import load_run


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("OPENLINEAGE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "events.jsonl"
    for name, value in file_transport(file).items():
        monkeypatch.setenv(name, value)
    return file


def test_without_the_clients_own_settings_no_client_is_loaded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = "openlineage" in sys.modules
    with LineageRun("build.demo"):
        pass
    assert ("openlineage" in sys.modules) == before
    assert capfd.readouterr() == ("", "")


def test_events_are_valid_and_tell_what_came_from_what(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = "0196f3e4-92a1-7b0c-9d5e-aabbccddeeff"
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", f"airflow/a/b/daily.build/{parent}")
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
    with LineageRun("build.demo") as told:
        columns = {"user_id": "int64", "price": "float64"}
        told.inputs = {"logs/clicks": columns}
        told.outputs = {"s3://bucket/runs/demo/versions/7": {}}
    start, end = read_events(events)
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == end["run"]["runId"]
    assert end["job"]["namespace"] == "shop"
    facet = end["run"]["facets"]["parent"]
    assert (facet["job"]["name"], facet["run"]["runId"]) == ("daily.build", parent)
    (read,), (made,) = end["inputs"], end["outputs"]
    assert (read["namespace"], read["name"]) == ("file", str(Path.cwd() / "logs" / "clicks"))
    fields = read["facets"]["schema"]["fields"]
    assert [(field["name"], field["type"]) for field in fields] == [*columns.items()]
    assert (made["namespace"], made["name"]) == ("s3://bucket", "runs/demo")
    assert made["facets"]["version"]["datasetVersion"] == "7"


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("/data/logs", ("file", "/data/logs")),
        ("file:///data/logs", ("file", "/data/logs")),
        ("s3a://bucket/a/b", ("s3://bucket", "a/b")),
        ("gs://bucket/a", ("gs://bucket", "a")),
        ("hdfs://node:8020/a", ("hdfs://node:8020", "/a")),
        ("postgresql://db:5432/shop.sales", ("postgres://db:5432", "shop.sales")),
    ],
)
def test_places_are_named_as_the_standard_names_them(place: str, found: tuple[str, str]) -> None:
    pytest.importorskip("openlineage.client")
    assert tuple(describe(place, {}).values()) == (*found, {})


@pytest.mark.parametrize(
    ("error", "state"),
    [(InputDataError("it is empty"), "FAIL"), (TrainingInterruptedError("asked to stop"), "ABORT")],
)
def test_how_a_run_fails_is_told(events: Path, error: Exception, state: str) -> None:
    with pytest.raises(type(error)), LineageRun("train.demo"):
        raise error
    end = read_events(events)[-1]
    assert end["eventType"] == state
    assert str(error.args[0]) in end["run"]["facets"]["errorMessage"]["message"]


def test_what_cannot_be_sent_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(tmp_path / "no" / "such" / "f"))
    with LineageRun("build.demo"):
        pass
    assert "the lineage event COMPLETE of build.demo was not sent" in caplog.text
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    with LineageRun("build.demo"):
        pass
    assert "openlineage.client" in caplog.text
    monkeypatch.setattr("jobs.support.lineage._SECONDS", 0.2)
    monkeypatch.setattr(LineageRun, "_send", lambda *_: time.sleep(30))
    with LineageRun("build.slow"):
        pass
    assert "COMPLETE of build.slow was not sent" in caplog.text
    assert "no whole answer within 0.2 s" in caplog.text


def test_a_sources_place_is_the_same_on_each_day() -> None:
    config = load_config(BuildConfig, "etl", "demo", ["data_dir=/logs"])
    source = config.sources["ratings"].model_copy(update={"path": "clicks/{date}/part-*.csv"})
    config = config.model_copy(update={"sources": {**config.sources, "ratings": source}})
    assert "/logs/clicks" in _list_read(config)


def test_training_and_exports_name_the_versions(events: Path, tmp_path: Path) -> None:
    run = write_tiny_run(tmp_path, {"kind": "retrieval"})
    trained = load_run(run)
    again = train(trained.config)
    export.export(again)
    names = [(event["job"]["name"], event["eventType"]) for event in read_events(events)]
    name = trained.config.name
    assert names == [
        (f"{job}.{name}", state) for job in ("train", "export") for state in ("START", "COMPLETE")
    ]
    _, of_training, _, of_export = read_events(events)
    (read,), (made,) = of_training["inputs"], of_training["outputs"]
    assert read["facets"]["version"]["datasetVersion"] == trained.manifest.dataset_version
    assert made["name"] == str(again.parent.parent)
    assert made["facets"]["version"]["datasetVersion"] == again.name
    from_run, from_dataset = of_export["inputs"]
    assert (from_run["name"], from_dataset["name"]) == (made["name"], read["name"])
    (model,) = of_export["outputs"]
    assert model["name"].startswith(str(again))
    assert model["facets"]["version"]["datasetVersion"] == "1"
