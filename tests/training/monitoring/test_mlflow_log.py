"""Runs at a tracking server: a real one, one that comes late, none."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from conf.artefacts.run import read_json, update_run_card
from conf.errors import ConfigError, TrainingDivergedError, TrainingInterruptedError
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import FitConfig, MlflowConfig, TrainConfig
from training.fit import fit_run
from training.loop.parts import build
from training.loop.plan import read_plan
from training.monitoring import mlflow_log
from training.monitoring.mlflow_log import find_tracking_uri, list_params, send_artefact
from training.monitoring.progress import build_progress
from training.run_directory import config_sha256

PROGRAM = "SLUICE_MLFLOW"


def configure(dataset: Path, root: Path, uri: str | None, **changes: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "dataset": str(dataset),
            "name": "t",
            "root": str(root),
            "model": DSSMConfig(embedding_dim=8),
            "input": InputConfig(batch_size=64),
            "fit": FitConfig(epochs=2, early_stopping=None),
            "mlflow": MlflowConfig(tracking_uri=uri),
            **changes,
        }
    )


def fit(config: TrainConfig, **options: bool) -> tuple[Path, str]:
    said = io.StringIO()
    return fit_run(config, build_progress("text", 3600, said), **options), said.getvalue()


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RecordingServer(ThreadingHTTPServer):
    """Answers as a tracking server does, and keeps what it was sent.

    `broken` calls are answered by status 503; `taken` are the bodies by path.
    """

    broken = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def list(self, path: str) -> list[Any]:
        return [body for name, body in self.taken if name == path]

    def metrics(self, name: str) -> list[tuple[int, float]]:
        batches = [body.get("metrics", ()) for body in self.list("runs/log-batch")]
        return [(m["step"], m["value"]) for batch in batches for m in batch if m["key"] == name]


class _Handler(BaseHTTPRequestHandler):
    server: RecordingServer

    def do_GET(self) -> None:
        self.answer(404, {"message": "no such experiment"})

    def do_POST(self) -> None:
        self.take()

    def do_PUT(self) -> None:
        self.take()

    def take(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.broken:
            self.server.broken -= 1
            self.answer(503, {"message": "no database"})
            return
        path = self.path.partition("/api/2.0/")[2].removeprefix("mlflow/")
        body = content if self.command == "PUT" else json.loads(content)
        self.server.taken.append((path, body))
        self.server.headers.append(dict(self.headers))
        info = {"run_id": "r1", "artifact_uri": "mlflow-artifacts:/1/r1/artifacts"}
        answers = {
            "experiments/create": {"experiment_id": "1"},
            "runs/create": {"run": {"info": info}},
        }
        self.answer(200, answers.get(path, {}))

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as running:
        thread = Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


def test_a_run_sends_params_metrics_and_artefacts(
    tmp_path: Path, tiny_version: Path, server: RecordingServer
) -> None:
    config = configure(tiny_version, tmp_path, server.uri)
    run, said = fit(config)
    assert f"run r1 of 't' at MLflow: {server.uri}" in said
    (made,) = server.list("runs/create")
    tags = {tag["key"]: tag["value"] for tag in made["tags"]}
    assert made["run_name"] == run.name
    assert tags["dataset"] == str(tiny_version.resolve())
    params = {
        p["key"]: p["value"] for b in server.list("runs/log-batch") for p in b.get("params", ())
    }
    assert params == list_params(config)
    assert params["model.embedding_dim"] == "8"
    assert not any(name.startswith("mlflow") for name in params)
    history = json.loads((run / "history.json").read_text())
    found = [value for _, value in server.metrics("validation/ndcg_at_10")]
    assert found == [epoch["validation"]["ndcg@10"] for epoch in history]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert server.metrics("train/loss") == [(line["step"], line["loss"]) for line in steps]
    sent = {path.rpartition("/")[2] for path, _ in server.taken if "artifacts/1/r1" in path}
    assert sent == {"run_card.json", "history.json"}
    assert server.taken[-1][1]["status"] == "FINISHED"
    send_artefact(run, run / "history.json")
    assert server.taken[-1][1] == (run / "history.json").read_bytes()


def test_a_resumed_run_goes_on_as_the_same(
    tmp_path: Path, tiny_version: Path, server: RecordingServer
) -> None:
    config = configure(tiny_version, tmp_path, server.uri)
    run, _ = fit(config)
    update_run_card(run, status="training")  # as if killed before the last line
    before = server.metrics("train/loss")
    assert fit(config, resume=True)[0] == run
    assert len(server.list("runs/create")) == 1
    assert server.metrics("train/loss") == before
    assert [body["status"] for body in server.list("runs/update")] == [
        "FINISHED",
        "RUNNING",
        "FINISHED",
    ]


def test_a_server_that_answers_late_gets_all(
    tmp_path: Path, tiny_version: Path, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_log, "_EVERY_S", 0.05)
    server.broken = 4
    run, said = fit(configure(tiny_version, tmp_path, server.uri))
    assert said.count("fails (status 503: no database): training goes on") == 1
    assert "has all records so far" in said
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(server.metrics("train/loss")) == len(lines)


def test_training_goes_on_without_a_server_and_says_so(tmp_path: Path, tiny_version: Path) -> None:
    with socket.socket() as unused:  # Nobody listens there.
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        run, said = fit(configure(tiny_version, tmp_path, uri))
    assert read_json(run / "run_card.json")["status"] == "trained"
    refused = f"[Errno {errno.ECONNREFUSED}] Connection refused"
    assert f"MLflow at {uri} fails ({refused}): training goes on" in said
    assert f"MLflow at {uri} does not have all of this run" in said
    assert not (run / "mlflow.json").exists()
    send_artefact(run, run / "history.json")  # nothing to add to


def test_a_server_that_answers_byte_by_byte_holds_nothing_up(
    tmp_path: Path, tiny_version: Path, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(handler: _Handler, status: int, _: dict[str, Any]) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(600):
                handler.wfile.write(b" ")
                time.sleep(0.1)

    monkeypatch.setattr(_Handler, "answer", drip)
    monkeypatch.setattr("training.monitoring.mlflow_log._CALL_S", 0.5)
    server.daemon_threads = True
    run, said = fit(configure(tiny_version, tmp_path, server.uri))
    assert read_json(run / "run_card.json")["status"] == "trained"
    assert "no whole answer within 0.5 s" in said


@pytest.mark.parametrize(
    ("error", "status"),
    [(TrainingDivergedError("x"), "FAILED"), (TrainingInterruptedError("x"), "KILLED")],
)
def test_how_a_run_ends_is_sent(
    tmp_path: Path, server: RecordingServer, error: Exception, status: str
) -> None:
    config = configure(tmp_path, tmp_path, server.uri)
    progress = build_progress("text", 3600, io.StringIO())
    with pytest.raises(type(error)), mlflow_log.tracked(config, tmp_path, {}, progress):
        raise error
    assert server.list("runs/update")[-1]["status"] == status


def test_credentials_come_from_the_environment(
    tmp_path: Path, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    config = configure(tmp_path, tmp_path, None)
    progress = build_progress("text", 3600, io.StringIO())
    with mlflow_log.tracked(config, tmp_path, {}, progress):
        pass
    assert server.headers[-1]["Authorization"].startswith("Basic ")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    with mlflow_log.tracked(config, tmp_path, {}, progress):
        pass
    assert server.headers[-1]["Authorization"] == "Bearer t0ken"
    assert "t0ken" not in (tmp_path / "mlflow.json").read_text()


@pytest.mark.parametrize("uri", ["", "sqlite:///mlflow.db", "http://", "http://me:secret@host"])
def test_only_a_servers_address_is_taken(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = configure(tmp_path, tmp_path / "runs", None)
    with pytest.raises(ConfigError, match="tracking server") as caught:
        build(read_plan(config))
    assert "secret" not in caught.value.render()
    with pytest.raises(ConfigError, match="tracking server"):
        fit(config)
    assert not (tmp_path / "runs").exists()


def test_it_is_off_by_default_and_no_part_of_a_runs_identity(tmp_path: Path) -> None:
    tracked = configure(tmp_path, tmp_path, "http://127.0.0.1:5000")
    plain = tracked.model_copy(update={"mlflow": None})
    assert TrainConfig(dataset="d", name="n").mlflow is None
    assert find_tracking_uri(plain) is None
    assert config_sha256(plain) == config_sha256(tracked)


def test_lines_that_a_resume_cut_off_are_sent_once(tmp_path: Path, server: RecordingServer) -> None:
    config = configure(tmp_path, tmp_path, server.uri)
    log = mlflow_log.MlflowLog(config, tmp_path, {}, build_progress("text", 3600, io.StringIO()))
    speed = {"examples_per_s": 1, "input_wait_share": 0}
    lines = [
        json.dumps({"step": step, "epoch": 1, "loss": step / 10} | speed) for step in range(1, 6)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines[:4]) + "\n" + lines[4][:9])
    log._send_new()
    file.write_text("\n".join(lines[:3]) + "\n")
    log._send_new()
    file.write_text("\n".join(lines) + "\n")
    log._send_new()
    assert server.metrics("train/loss") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = os.environ.get(PROGRAM)
    if not program:
        pytest.skip(f"needs MLflow: {PROGRAM} (make services)")
    folder, port = tmp_path_factory.mktemp("mlflow"), find_port()
    uri = f"http://127.0.0.1:{port}"
    places = [
        "--backend-store-uri",
        f"sqlite:///{folder}/runs.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    # Its own programs are beside it.
    path = f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "server", "--port", str(port), "--workers", "1", *places],
            cwd=folder, env=own, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
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


def call(uri: str, path: str) -> Any:
    with urllib.request.urlopen(f"{uri}/api/2.0/{path}", timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.exhaustive
def test_a_real_server_has_the_run(tmp_path: Path, tiny_version: Path, mlflow_server: str) -> None:
    config = configure(
        tiny_version, tmp_path, mlflow_server,
        fit=FitConfig(epochs=2, early_stopping=None, steps_per_loop=1),
    )  # fmt: skip
    run, _ = fit(config)
    run_id = read_json(run / "mlflow.json")["run_id"]
    found = call(mlflow_server, f"mlflow/runs/get?run_id={run_id}")["run"]
    assert found["info"]["status"] == "FINISHED"
    params = {param["key"]: param["value"] for param in found["data"]["params"]}
    assert params == list_params(config)
    assert "validation/ndcg_at_10" in {metric["key"] for metric in found["data"]["metrics"]}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    asked = f"mlflow/metrics/get-history?run_id={run_id}&metric_key=train/loss"
    assert len(call(mlflow_server, asked)["metrics"]) == len(lines)
    send_artefact(run, run / "history.json")
    files = call(mlflow_server, f"mlflow/artifacts/list?run_id={run_id}")["files"]
    assert {file["path"] for file in files} == {"run_card.json", "history.json"}
    with urllib.request.urlopen(
        f"{mlflow_server}/get-artifact?run_id={run_id}&path=history.json", timeout=30
    ) as file:
        assert file.read() == (run / "history.json").read_bytes()
    other, _ = fit(config.model_copy(update={"optimizer": OptimizerConfig(learning_rate=0.1)}))
    first, second = (
        call(mlflow_server, f"mlflow/runs/get?run_id={read_json(r / 'mlflow.json')['run_id']}")
        for r in (run, other)
    )
    assert first["run"]["info"]["experiment_id"] == second["run"]["info"]["experiment_id"]
