"""A run at an MLflow tracking server, by MLflow's own client: params, metrics, artefacts.

A thread follows the run's own records and sends what is new, so training never waits for the
server. What could not be sent is sent later; a resumed run goes on as the same run of MLflow.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from conf.artefacts.run import MLFLOW_FILE, read_json, write_json
from conf.deadline import call_within, repeating
from conf.errors import ConfigError, TrainingInterruptedError, install_hint
from conf.training.train import TrainConfig
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history, read_step_validations, read_steps

_EVERY_S, _CALL_S = 5.0, 30.0


def build_client(config: TrainConfig) -> Any:
    """Returns the client of `mlflow.tracking_uri`, or of what MLflow's own settings name."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # What fails is sent again here.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise ConfigError("mlflow needs MLflow's client", fix=install_hint("mlflow")) from error
    return MlflowClient(config.mlflow.tracking_uri if config.mlflow else None)


class MlflowLog:
    """Sends what a run writes; its `mlflow.json` has MLflow's id, and what MLflow has of it."""

    def __init__(
        self, config: TrainConfig, run: Path, tags: Mapping[str, str], progress: TrainingProgress
    ) -> None:
        self._config, self._run, self._tags = config, run, tags
        self._client, self._say = build_client(config), cache(progress.message)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Sends what comes while the block runs, and all that is left at its end."""
        status, later = "FAILED", "training goes on, and sends it later"
        try:
            with repeating(_EVERY_S, lambda: self._try("RUNNING", later)):
                yield
            status = "FINISHED"
        except (TrainingInterruptedError, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            self._try(status, "it does not have all of this run")

    def _try(self, status: str, otherwise: str) -> None:
        try:
            call_within(_CALL_S, lambda: self._send(status))
        except Exception as error:  # Stores and plugins of MLflow raise what they like.
            self._say(f"MLflow fails ({str(error)[:200]}): {otherwise}")

    def _send(self, status: str) -> None:
        from mlflow.entities import Metric, Param

        sent, now = self._find_sent(), int(time.time() * 1000)
        steps, metrics = dict(sent.get("steps", {})), []
        for step, name, value in list_metrics(self._run, self._config.input.batch_size):
            if step > steps.get(name, 0):
                metrics.append(Metric(name, value, now, step))
                steps[name] = step
        unsent = {} if "steps" in sent else {**self._config.resolved(), "mlflow": None}
        params = [Param(*param) for param in list_params(unsent).items()]
        if status == "RUNNING" and not metrics and not params:
            return
        run_id = sent["run_id"]  # The client makes calls of the size that the API allows.
        self._client.log_batch(run_id, metrics, params)
        write_json(self._run / MLFLOW_FILE, {"run_id": run_id, "steps": steps})
        if status == "RUNNING":
            self._client.update_run(run_id, status)
            return
        for file in self._run.glob("*.json"):
            self._client.log_artifact(run_id, str(file))
        self._client.set_terminated(run_id, status)

    def _find_sent(self) -> dict[str, Any]:
        """Returns what the server has, at first nothing but the run."""
        name, file = self._config.name, self._run / MLFLOW_FILE
        if not file.exists():
            found = self._client.get_experiment_by_name(name)
            place = found.experiment_id if found else self._client.create_experiment(name)
            made = self._client.create_run(place, tags=self._tags, run_name=self._run.name)
            write_json(file, {"run_id": made.info.run_id})
            self._say(f"run {made.info.run_id} of {name!r} at MLflow")
        return read_json(file)


def send_artefact(config: TrainConfig, run: Path, file: Path) -> None:
    """Adds a file to what MLflow has of a run; a run that it does not have gets none."""
    if (run / MLFLOW_FILE).exists():
        run_id, client = read_json(run / MLFLOW_FILE)["run_id"], build_client(config)
        call_within(_CALL_S, lambda: client.log_artifact(run_id, str(file)))


def list_metrics(run: Path, batch_size: int) -> Iterator[tuple[int, str, float]]:
    """Yields step, name and value of what a run has recorded; JSON has only finite numbers."""
    found: list[tuple[int, str, Mapping[str, float]]]
    found = [(line.step, "train", asdict(line)) for line in read_steps(run)]
    found += [(one.step, "validation", one.validation) for one in read_step_validations(run)]
    examples = 0
    for epoch in read_history(run):
        step = (examples := examples + epoch.examples) // batch_size
        found += [(step, "validation", epoch.validation), (step, "epoch", {"loss": epoch.loss})]
    for step, group, values in sorted(found, key=itemgetter(0)):
        for name, value in values.items():
            if name != "step" and math.isfinite(value):
                yield step, f"{group}/{_clean(name)}", float(value)


def list_params(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns a config as MLflow's params: keys by dots, values as text, what is unset left out."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= list_params(value, f"{prefix}{name}.")
        elif value is not None:
            found[_clean(prefix + name)] = value if isinstance(value, str) else json.dumps(value)
    return found


def _clean(name: str) -> str:
    """A name as MLflow allows it: `ndcg@10` is `ndcg_at_10`, as its own evaluation writes it."""
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
