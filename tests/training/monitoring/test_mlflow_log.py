"""Runs at MLflow by its own client: a store of files, one that fails, a real server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.artefacts.run import read_json, update_run_card
from conf.errors import ConfigError
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig
from conf.training.train import FitConfig, MlflowConfig, TrainConfig
from training.fit import fit_run
from training.monitoring.mlflow_log import build_client, list_params, send_run
from training.monitoring.progress import build_progress
from training.monitoring.run_logs import EpochRecord, write_history
from training.run_directory import config_sha256

PROGRAM = "SLUICE_MLFLOW"


def configure(dataset: Path, root: Path, uri: str | None) -> TrainConfig:
    return TrainConfig(
        dataset=str(dataset),
        name="t",
        root=str(root),
        model=DSSMConfig(embedding_dim=8),
        input=InputConfig(batch_size=64),
        fit=FitConfig(epochs=2, early_stopping=None, steps_per_loop=1),
        mlflow=MlflowConfig(tracking_uri=uri),
    )


def test_it_is_off_by_default_and_no_part_of_a_runs_identity(tmp_path: Path) -> None:
    tracked = configure(tmp_path, tmp_path, "http://127.0.0.1:5000")
    plain = tracked.model_copy(update={"mlflow": None})
    assert TrainConfig(dataset="d", name="n").mlflow is None
    assert config_sha256(plain) == config_sha256(tracked)
    assert list_params(tracked.resolved())["model.embedding_dim"] == "8"


def test_without_its_client_no_run_is_made(
    tmp_path: Path, tiny_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ConfigError, match="client") as refused:
        fit(configure(tiny_version, tmp_path / "runs", None))
    assert "[mlflow]" in str(refused.value.fix)
    assert not (tmp_path / "runs").exists()


def fit(config: TrainConfig, **options: bool) -> tuple[Path, str]:
    said = io.StringIO()
    return fit_run(config, build_progress("text", 3600, said), **options), said.getvalue()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a store of files."""
    pytest.importorskip("mlflow", reason="needs MLflow: pip install 'sluice-recsys[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server."""
    program = os.environ.get(PROGRAM)
    if not program:
        pytest.skip(f"needs MLflow's server: {PROGRAM} (make services)")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = ["--backend-store-uri", f"sqlite:///{folder}/runs.db",
              "--artifacts-destination", str(folder / "files")]  # fmt: skip
    # Its own programs are beside it.
    path = f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "server", "--port", port, "--workers", "1", *places],
            cwd=folder, env=own, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.5)
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait()


def find_sent(config: TrainConfig, run: Path) -> tuple[Any, str, Any]:
    """The client, MLflow's id of the run, and the run."""
    client, run_id = build_client(config), read_json(run / "mlflow.json")["run_id"]
    return client, run_id, client.get_run(run_id)


def list_points(config: TrainConfig, run: Path, name: str) -> list[tuple[int, float]]:
    client, run_id, _ = find_sent(config, run)
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


@pytest.mark.parametrize("place", ["store", pytest.param("server", marks=pytest.mark.exhaustive)])
def test_a_run_sends_params_metrics_and_artefacts_and_goes_on_as_the_same(
    place: str, tmp_path: Path, tiny_version: Path, request: pytest.FixtureRequest
) -> None:
    config = configure(tiny_version, tmp_path / "runs", request.getfixturevalue(place))
    run, _ = fit(config)
    client, run_id, found = find_sent(config, run)
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.tags["dataset"] == str(tiny_version.resolve())
    assert found.data.params == list_params(config.resolved())
    history = json.loads((run / "history.json").read_text())
    values = [value for _, value in list_points(config, run, "validation/ndcg_at_10")]
    assert values == [epoch["validation"]["ndcg@10"] for epoch in history]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines]
    assert list_points(config, run, "train/loss") == losses
    (run / "report.html").write_text("a report")
    send_run(config, run, pytest.fail)
    sent = {file.path for file in client.list_artifacts(run_id)}
    assert sent == {"run_card.json", "history.json", "mlflow.json", "report.html"}
    update_run_card(run, status="training")  # As if killed before the last line.
    assert fit(config, resume=True)[0] == run
    _, same, found = find_sent(config, run)
    assert (same, found.info.status) == (run_id, "FINISHED")
    assert list_points(config, run, "train/loss") == losses


def test_a_server_that_fails_ends_nothing_and_gets_all_when_it_answers(
    store: str, tmp_path: Path, tiny_version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    log_batch, left = MlflowClient.log_batch, [3]

    def fail_at_first(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] > 0:
            raise OSError("no database")
        return log_batch(*arguments, **options)

    monkeypatch.setattr("training.fit._MLFLOW_EVERY_S", 0.05)
    monkeypatch.setattr(MlflowClient, "log_batch", fail_at_first)
    config = configure(tiny_version, tmp_path / "runs", store)
    run, said = fit(config)
    assert said.count("MLflow fails: no database") == 1
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(list_points(config, run, "train/loss")) == len(lines)


def test_how_a_run_ends_is_sent(store: str, tmp_path: Path) -> None:
    ends = {"training": "RUNNING", "failed": "FAILED", "interrupted": "KILLED"}
    for status, sent in ends.items():
        config = write_card(tmp_path, store, status)
        send_run(config, tmp_path, pytest.fail)
        assert find_sent(config, tmp_path)[2].info.status == sent


def write_card(run: Path, store: str, status: str) -> TrainConfig:
    config = configure(run, run, store)
    dataset, versions = {"path": "d", "version": "1"}, {"sluice": "1"}
    parts = {"name": "t", "config": config.resolved(), "dataset": dataset, "versions": versions}
    update_run_card(run, status=status, **parts)
    return config


def test_lines_that_a_resume_cut_off_are_sent_once(store: str, tmp_path: Path) -> None:
    config = write_card(tmp_path, store, "training")
    rest = {"epoch": 1, "examples_per_s": 1, "input_wait_share": 0}
    lines = [json.dumps({"step": step, "loss": step / 10} | rest) for step in range(1, 6)]
    texts = ("\n".join(lines[:4]) + "\n" + lines[4][:9], "\n".join(lines[:3]), "\n".join(lines))
    for text in ("", *texts):
        (tmp_path / "metrics.jsonl").write_text(f"{text}\n")
        send_run(config, tmp_path, pytest.fail)
    (tmp_path / "validations.jsonl").write_text(
        '{"step": 5, "epoch": 1, "validation": {"auc": 0.9}}'
    )
    write_history(tmp_path, [EpochRecord(1, 0.5, 1.0, 5 * 64, 40.0, 0.0, {"auc": 0.7})])
    send_run(config, tmp_path, pytest.fail)
    assert list_points(config, tmp_path, "validation/auc") == [(5, 0.7)]
    assert list_points(config, tmp_path, "step_validation/auc") == [(5, 0.9)]
    points = list_points(config, tmp_path, "train/loss")
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]
