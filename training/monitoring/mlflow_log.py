"""A run at an MLflow tracking server, by MLflow's own client: params, metrics, artefacts.

A thread follows the run's own records and sends what is new, so training never waits for the
server. What could not be sent is sent later; a resumed run goes on as the same run of MLflow.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.artefacts.run import (
    HISTORY_FILE,
    MLFLOW_FILE,
    RUN_CARD_FILE,
    WARM_START_FILE,
    read_json,
    write_json,
)
from conf.deadline import call_within
from conf.errors import ConfigError, TrainingInterruptedError, install_hint
from conf.training.train import TrainConfig
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history, read_step_validations, read_steps

_EVERY_S, _CALL_S = 5.0, 30.0
# Unless the user's own say otherwise: what fails is sent again here, and standard output is ours.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MlflowLog:
    """Sends a run's records as they come; `mlflow.json` has MLflow's id, and what it was sent."""

    def __init__(
        self, config: TrainConfig, run: Path, tags: Mapping[str, str], progress: TrainingProgress
    ) -> None:
        self._config, self._run, self._tags, self._progress = config, run, tags, progress
        self._client, self._sent = build_client(config), dict[str, Any]()
        self._said, self._ended = "", threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True)
        self._thread.start()

    def end(self, status: str) -> None:
        """Sends the rest, the artefacts and the status; says what the server lacks."""
        self._ended.set()
        self._thread.join()  # Its call ends within its time.
        self._try(lambda: self._send_rest(status), "it does not have all of this run")

    def _follow(self) -> None:
        while not self._ended.is_set():
            self._try(self.send_new, "training goes on, and sends it later")
            self._ended.wait(_EVERY_S)

    def _try(self, send: Callable[[], Any], consequence: str) -> None:
        try:
            call_within(_CALL_S, send)
        except Exception as error:  # Stores and plugins of MLflow raise what they like.
            said = f"MLflow fails ({str(error)[:200]}): {consequence}"
            if said != self._said:
                self._progress.message(said)
            self._said = said

    def _send_rest(self, status: str) -> None:
        run_id = self.send_new()
        for name in (RUN_CARD_FILE, HISTORY_FILE, WARM_START_FILE):
            if (self._run / name).exists():
                self._client.log_artifact(run_id, str(self._run / name))
        self._client.set_terminated(run_id, status)

    def send_new(self) -> str:
        """Sends what the server lacks; returns MLflow's id of the run."""
        from mlflow.entities import Metric

        sent = self._sent = self._sent or self._begin()
        records = read_records(self._run, self._config.input.batch_size)
        new = [record for record in records if record[1] > sent.get(record[0], 0)]
        now = int(time.time() * 1000)
        metrics = [Metric(*pair, now, step) for _, step, found in new for pair in found.items()]
        self._client.log_batch(sent["run_id"], metrics=metrics)  # In calls of the API's size.
        sent |= {kind: step for kind, step, _ in new}
        write_json(self._run / MLFLOW_FILE, sent)
        return str(sent["run_id"])

    def _begin(self) -> dict[str, Any]:
        """Makes the run at the server, or takes up the one that is there; sets its params."""
        from mlflow.entities import Param

        sent, file = dict[str, Any](), self._run / MLFLOW_FILE
        if file.exists():
            sent = read_json(file)
            self._client.update_run(sent["run_id"], status="RUNNING")
        else:
            name, tags = self._config.name, dict(self._tags)
            found = self._client.get_experiment_by_name(name)
            place = found.experiment_id if found else self._client.create_experiment(name)
            made = self._client.create_run(place, tags=tags, run_name=self._run.name)
            sent["run_id"] = made.info.run_id
            write_json(file, sent)
            self._progress.message(f"run {sent['run_id']} of {name!r} at MLflow")
        params = [Param(*pair) for pair in list_params(self._config).items()]
        self._client.log_batch(sent["run_id"], params=params)
        return sent


def build_client(config: TrainConfig) -> Any:
    """Returns the client of `mlflow.tracking_uri`, or of what MLflow's own settings name."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise ConfigError("mlflow needs MLflow's client", fix=install_hint("mlflow")) from error
    return MlflowClient(config.mlflow and config.mlflow.tracking_uri)


@contextmanager
def tracked(
    config: TrainConfig, run: Path, tags: Mapping[str, str], progress: TrainingProgress
) -> Iterator[None]:
    """Sends what a run writes inside the block to `mlflow`'s server, where there is one."""
    if config.mlflow is None:
        yield
        return
    log, status = MlflowLog(config, run, tags, progress), "FAILED"
    try:
        yield
        status = "FINISHED"
    except (TrainingInterruptedError, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        log.end(status)


def send_artefact(config: TrainConfig, run: Path, file: Path) -> None:
    """Adds a file to what MLflow has of a run; a run that it does not have gets none."""
    if (run / MLFLOW_FILE).exists():
        run_id, client = read_json(run / MLFLOW_FILE)["run_id"], build_client(config)
        call_within(_CALL_S, lambda: client.log_artifact(run_id, str(file)))


def read_records(run: Path, batch_size: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yields what a run has recorded: its kind, its step, and its metrics by name."""
    shown = ("loss", "examples_per_s", "input_wait_share", "epoch")
    for line in read_steps(run):
        yield "steps", line.step, _name("train", {name: getattr(line, name) for name in shown})
    for found in read_step_validations(run):
        yield "validations", found.step, _name("validation", found.validation)
    examples = 0
    for epoch in read_history(run):
        examples += epoch.examples
        about = {"loss": epoch.loss, "seconds": epoch.seconds, "epoch": epoch.epoch}
        metrics = _name("epoch", about) | _name("validation", epoch.validation)
        yield "epochs", examples // batch_size, metrics


def list_params(config: TrainConfig) -> dict[str, str]:
    """Returns a config as MLflow's params: keys by dots, values as text, what is unset left out."""
    return {
        _clean(key): value if isinstance(value, str) else json.dumps(value)
        for key, value in _flatten(config.resolved())
        if value is not None and not key.startswith("mlflow.")
    }


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flatten(part, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _name(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Names metrics; numbers that are not finite have no place in JSON."""
    pairs = {f"{group}/{_clean(name)}": float(value) for name, value in values.items()}
    return {name: value for name, value in pairs.items() if math.isfinite(value)}


def _clean(name: str) -> str:
    """A name as MLflow allows it: `ndcg@10` is `ndcg_at_10`, as its own evaluation writes it."""
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
