"""A run at an MLflow tracking server: its params, metrics and artefacts.

A thread follows the run's own records (`metrics.jsonl`, `validations.jsonl`, `history.json`) and
sends what is new, so training never waits for the server. What could not be sent is sent later; a
resumed run goes on as the same run of MLflow. Calls and limits are those of MLflow's REST API 2.0
(mlflow.org/docs/latest/rest-api.html).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import requests

from conf.artefacts.run import (
    HISTORY_FILE,
    MLFLOW_FILE,
    RUN_CARD_FILE,
    STEPS_FILE,
    WARM_START_FILE,
    read_json,
    write_json,
)
from conf.deadline import call_within
from conf.errors import ConfigError, SluiceError, TrainingInterruptedError
from conf.training.train import TrainConfig
from training.monitoring.epoch_records import read_history
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import StepRecord, read_step_validations

_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_ARTEFACTS = (RUN_CARD_FILE, HISTORY_FILE, WARM_START_FILE)
_EVERY_S = 5.0
_TIMEOUT_S = (5.0, 30.0)  # To connect, to read some bytes.
_CALL_S = 30.0  # A call as a whole.
_MAX_ANSWER_BYTES = 1 << 20
# Bounds of one call of the API.
_METRICS_PER_CALL, _PARAMS_PER_CALL, _PARAM_CHARACTERS = 1000, 100, 6000
_NOT_IN_NAMES = re.compile(r"[^\w.\- /]")


class TrackingError(Exception):
    """The tracking server cannot be reached, or refuses; the message says why."""


def find_tracking_uri(config: TrainConfig) -> str | None:
    """Returns the address of the tracking server, None where nothing is to be tracked.

    Raises:
        ConfigError: No address is given, or not one of a server.
    """
    if config.mlflow is None:
        return None
    uri = config.mlflow.tracking_uri or os.environ.get(_URI_VARIABLE, "")
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        raise ConfigError(
            "mlflow needs the address of a tracking server",
            received=shown or f"no mlflow.tracking_uri, and no {_URI_VARIABLE}",
            allowed="http://… or https://…, without user and password",
            fix="start one (`mlflow server`) and set mlflow.tracking_uri=http://127.0.0.1:5000; "
            "credentials go into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN",
        )
    return uri.rstrip("/")


class TrackingServer:
    """Calls of one tracking server.

    Args:
        uri: Its address.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._session = requests.Session()
        self._session.auth = _find_credentials()
        certificates = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
        if certificates:
            self._session.verify = certificates

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> dict[str, Any]:
        """Makes a run, and its experiment where there is none; returns what describes the run."""
        tag_list = [{"key": key, "value": value} for key, value in tags.items()]
        body = {
            "experiment_id": self._find_experiment(experiment),
            "run_name": name,
            "start_time": _now_ms(),
            "tags": tag_list,
        }
        info: dict[str, Any] = self._call("POST", "runs/create", json=body)["run"]["info"]
        return info

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Sets params; those that are there already must be the same."""
        pairs = [{"key": key, "value": value} for key, value in params.items()]
        for first in range(0, len(pairs), _PARAMS_PER_CALL):
            part = pairs[first : first + _PARAMS_PER_CALL]
            self._call("POST", "runs/log-batch", json={"run_id": run_id, "params": part})

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Adds metrics, at most as many as one call takes."""
        self._call("POST", "runs/log-batch", json={"run_id": run_id, "metrics": list(metrics)})

    def set_status(self, run_id: str, status: str) -> None:
        """Sets a run's status: RUNNING, FINISHED, FAILED or KILLED."""
        end = {} if status == "RUNNING" else {"end_time": _now_ms()}
        self._call("POST", "runs/update", json={"run_id": run_id, "status": status, **end})

    def put_artefact(self, place: str, file: Path) -> None:
        """Writes a file through the server.

        Args:
            place: The run's `artifact_uri`.
            file: The file, which keeps its name.

        Raises:
            TrackingError: The server does not give artefacts out itself, or refuses.
        """
        scheme, path = urlsplit(place).scheme, urlsplit(place).path
        if scheme != "mlflow-artifacts":
            raise TrackingError(
                f"artefacts lie in {place}, which the server does not write itself (`mlflow "
                "server --serve-artifacts` does)"
            )
        to = quote(f"{path.strip('/')}/{file.name}")
        with file.open("rb") as content:
            self._send("PUT", f"mlflow-artifacts/artifacts/{to}", data=content)

    def _find_experiment(self, name: str) -> str:
        try:
            asked = {"experiment_name": name}
            answer = self._call("GET", "experiments/get-by-name", params=asked)
            return str(answer["experiment"]["experiment_id"])
        except _NotThereError:
            made = self._call("POST", "experiments/create", json={"name": name})
            return str(made["experiment_id"])

    def _call(self, method: str, path: str, **content: Any) -> Any:
        return self._send(method, f"mlflow/{path}", **content)

    def _send(self, method: str, path: str, **content: Any) -> Any:
        url = f"{self.uri}/api/2.0/{path}"

        def ask() -> tuple[bytes, int]:
            with self._session.request(
                method, url, timeout=_TIMEOUT_S, stream=True, **content
            ) as answer:
                return next(answer.iter_content(_MAX_ANSWER_BYTES), b""), answer.status_code

        try:
            text, status = call_within(_CALL_S, ask)
        except (requests.RequestException, OSError) as error:
            raise TrackingError(_shorten(error)) from error
        try:
            found = json.loads(text or b"{}")
        except ValueError as error:
            raise TrackingError(f"status {status}, and no JSON, from {url}") from error
        if status == HTTPStatus.NOT_FOUND:
            raise _NotThereError(f"status {status}: {url}")
        if status >= HTTPStatus.BAD_REQUEST:
            said = found.get("message", "") if isinstance(found, dict) else ""
            raise TrackingError(f"status {status}: {said[:300]}")
        return found


class _NotThereError(TrackingError):
    pass


@dataclass(frozen=True)
class Sent:
    """What a server has of a run: `mlflow.json`.

    Attributes:
        tracking_uri: The server.
        run_id: MLflow's id of the run.
        artifact_uri: Where its artefacts are.
        has_params: Whether its params are there.
        steps: Last step whose records are there.
        validations: Last step between epochs whose validation is there.
        epochs: Epochs that are there.
    """

    tracking_uri: str
    run_id: str
    artifact_uri: str
    has_params: bool = False
    steps: int = 0
    validations: int = 0
    epochs: int = 0


class MlflowLog:
    """Sends a run's records as they come.

    Args:
        config: The run's config, with `mlflow`.
        run: Directory of the run.
        tags: What else describes it, by name.
        progress: Shows when the server fails, and when it answers again.
    """

    def __init__(
        self, config: TrainConfig, run: Path, tags: Mapping[str, str], progress: TrainingProgress
    ) -> None:
        self._config, self._run, self._tags, self._progress = config, run, tags, progress
        self._server = TrackingServer(find_tracking_uri(config) or "")
        self._sent: Sent | None = None
        self._offset, self._is_down = 0, False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True)

    def start(self) -> None:
        """Begins to follow the run."""
        self._thread.start()

    def end(self, status: str) -> None:
        """Sends the rest, the artefacts and the status; says what the server lacks."""
        self._ended.set()
        self._thread.join()  # Its call ends within the timeouts.
        try:
            sent = self._send_new()
            for name in _ARTEFACTS:
                if (self._run / name).exists():
                    self._server.put_artefact(sent.artifact_uri, self._run / name)
            self._server.set_status(sent.run_id, status)
        except (TrackingError, SluiceError) as error:
            self._progress.message(
                f"MLflow at {self._server.uri} does not have all of this run ({error}); the run "
                f"does: {self._run}"
            )

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self._send_new()
            except (TrackingError, SluiceError) as error:
                self._tell_down(error)
            else:
                self._tell_up()
            self._ended.wait(_EVERY_S)

    def _tell_down(self, error: Exception) -> None:
        if not self._is_down:
            self._progress.message(
                f"MLflow at {self._server.uri} fails ({error}): training goes on, and what it "
                "lacks is sent when it answers"
            )
        self._is_down = True

    def _tell_up(self) -> None:
        if self._is_down:
            self._progress.message(f"MLflow at {self._server.uri} has all records so far")
        self._is_down = False

    def _send_new(self) -> Sent:
        sent = self._sent or self._begin()
        if not sent.has_params:
            self._server.log_params(sent.run_id, list_params(self._config))
            sent = replace(sent, has_params=True)
            self._keep(sent)
        for metrics, state in self._list_new(sent):
            for first in range(0, len(metrics), _METRICS_PER_CALL):
                part = metrics[first : first + _METRICS_PER_CALL]
                self._server.log_metrics(sent.run_id, part)
            self._keep(state)
            sent = state
        return sent

    def _begin(self) -> Sent:
        """Makes the run at the server, or takes up the one that an earlier process made there."""
        uri, file = self._server.uri, self._run / MLFLOW_FILE
        known = read_sent(self._run) if file.exists() else None
        if known is not None and known.tracking_uri == uri:
            self._server.set_status(known.run_id, "RUNNING")
            self._sent = known
            return known
        experiment = getattr(self._config.mlflow, "experiment", None)
        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._config.name
        info = self._server.create_run(name, self._run.name, self._tags)
        made = Sent(uri, info["run_id"], info["artifact_uri"])
        self._keep(made)
        self._progress.message(f"run {made.run_id} of {name!r} at MLflow: {uri}")
        return made

    def _keep(self, sent: Sent) -> None:
        write_json(self._run / MLFLOW_FILE, asdict(sent))
        self._sent = sent

    def _list_new(self, sent: Sent) -> Iterator[tuple[list[dict[str, Any]], Sent]]:
        """What the server lacks, and what it has once it has that."""
        steps = [record for record in self._read_new_steps() if record.step > sent.steps]
        for first in range(0, len(steps), _METRICS_PER_CALL):
            part = steps[first : first + _METRICS_PER_CALL]
            sent = replace(sent, steps=part[-1].step)
            yield [metric for record in part for metric in _describe_steps(record)], sent
        for found in read_step_validations(self._run):
            if found.step > sent.validations:
                sent = replace(sent, validations=found.step)
                yield _name_metrics(found.step, "validation", found.validation), sent
        examples = 0
        for epoch in read_history(self._run):
            examples += epoch.examples
            if epoch.epoch > sent.epochs:
                step = examples // self._config.input.batch_size
                about = {"loss": epoch.loss, "seconds": epoch.seconds, "epoch": epoch.epoch}
                metrics = _name_metrics(step, "epoch", about)
                metrics += _name_metrics(step, "validation", epoch.validation)
                sent = replace(sent, epochs=epoch.epoch)
                yield metrics, sent

    def _read_new_steps(self) -> list[StepRecord]:
        """Whole lines of `metrics.jsonl` after those read before.

        A resumed run cuts the file: then it is read from its start again.
        """
        file = self._run / STEPS_FILE
        if not file.exists():
            return []
        self._offset = self._offset if file.stat().st_size >= self._offset else 0
        with file.open("rb") as lines:
            lines.seek(self._offset)
            whole = lines.read().rpartition(b"\n")[0]
        try:
            records = [StepRecord(**json.loads(line)) for line in whole.splitlines()]
        except (ValueError, TypeError):
            self._offset = 0
            return []
        self._offset += len(whole) + 1 if whole else 0
        return records


@contextmanager
def tracked(
    config: TrainConfig, run: Path, tags: Mapping[str, str], progress: TrainingProgress
) -> Iterator[None]:
    """Sends what a run writes inside the block to `mlflow`'s server, where there is one.

    Args:
        config: The run's config.
        run: Directory of the run.
        tags: What else describes it, by name.
        progress: Shows when the server fails.
    """
    if config.mlflow is None:
        yield
        return
    log = MlflowLog(config, run, tags, progress)
    log.start()
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except (TrainingInterruptedError, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        log.end(status)


def send_artefact(run: Path, file: Path) -> None:
    """Adds a file to what MLflow has of a run; a run that it does not have gets none.

    Raises:
        TrackingError: The server cannot be reached, or refuses.
    """
    if (run / MLFLOW_FILE).exists():
        sent = read_sent(run)
        TrackingServer(sent.tracking_uri).put_artefact(sent.artifact_uri, file)


def read_sent(run: Path) -> Sent:
    """Reads a run's `mlflow.json`.

    Raises:
        SluiceError: The file is damaged.
    """
    try:
        return Sent(**read_json(run / MLFLOW_FILE))
    except TypeError as error:
        raise ConfigError(
            f"{run / MLFLOW_FILE} is damaged",
            received=str(error),
            fix="remove it: MLflow then gets the run anew",
        ) from error


def list_params(config: TrainConfig) -> dict[str, str]:
    """Returns a config as MLflow's params: keys by dots, values as text, what is unset left out."""
    flat = dict(_flatten(config.resolved()))
    return {
        _clean(key): (value if isinstance(value, str) else json.dumps(value))[:_PARAM_CHARACTERS]
        for key, value in flat.items()
        if value is not None and not key.startswith("mlflow.")
    }


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flatten(part, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _describe_steps(record: StepRecord) -> list[dict[str, Any]]:
    about = {
        "loss": record.loss,
        "examples_per_s": record.examples_per_s,
        "input_wait_share": record.input_wait_share,
        "epoch": record.epoch,
    }
    return _name_metrics(record.step, "train", about)


def _name_metrics(step: int, group: str, values: Mapping[str, float]) -> list[dict[str, Any]]:
    """Metrics as the API takes them; numbers that are not finite have no place in JSON."""
    now = _now_ms()
    return [
        {"key": f"{group}/{_clean(name)}", "value": float(value), "timestamp": now, "step": step}
        for name, value in values.items()
        if math.isfinite(value)
    ]


def _clean(name: str) -> str:
    """A name as MLflow allows it: `ndcg@10` is `ndcg_at_10`, as its own evaluation writes it."""
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def _find_credentials() -> Any:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return _TokenAuth(token)
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    return (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None


class _TokenAuth(requests.auth.AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _shorten(error: Exception) -> str:
    """The innermost reason: errors of connections hold each other, and the address again."""
    match = re.search(r"\[Errno -?\d+\] [^'\"()]+|timed out", str(error))
    return match[0] if match else f"{type(error).__name__}: {str(error)[:200]}"


def _now_ms() -> int:
    return int(time.time() * 1000)
