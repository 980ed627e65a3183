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
from conf.deadline import call_within, repeating
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


def build_client(config: TrainConfig) -> Any:
    """Returns the client of `mlflow.tracking_uri`, or of what MLflow's own settings name."""
    for setting in _SETTINGS.items():
        os.environ.setdefault(*setting)
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise ConfigError("mlflow needs MLflow's client", fix=install_hint("mlflow")) from error
    return MlflowClient(None if config.mlflow is None else config.mlflow.tracking_uri)


class MlflowLog:
    """Sends what a run writes; its `mlflow.json` has MLflow's id, and what MLflow has of it."""

    def __init__(
        self, config: TrainConfig, run: Path, tags: Mapping[str, str], progress: TrainingProgress
    ) -> None:
        self._config, self._run, self._tags = config, run, dict(tags)
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
        records = read_records(self._run, self._config.input.batch_size)
        new = [record for record in records if record[1] > sent.get(record[0], 0)]
        if status == "RUNNING" and "params" in sent and not new:
            return
        metrics = [Metric(*pair, now, step) for _, step, found in new for pair in found.items()]
        params = [] if "params" in sent else [Param(*p) for p in list_params(self._config).items()]
        self._client.log_batch(sent["run_id"], metrics, params)  # In calls of the API's size.
        sent |= {"params": 1, **{kind: step for kind, step, _ in new}}
        write_json(self._run / MLFLOW_FILE, sent)
        ended = () if status == "RUNNING" else (RUN_CARD_FILE, HISTORY_FILE, WARM_START_FILE)
        for file in (self._run / name for name in ended):
            if file.exists():
                self._client.log_artifact(sent["run_id"], str(file))
        mark = self._client.set_terminated if ended else self._client.update_run
        mark(sent["run_id"], status)

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


def read_records(run: Path, batch_size: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yields what a run has recorded: its kind, its step, and its metrics by name."""
    for line in read_steps(run):
        values = asdict(line)
        yield "steps", values.pop("step"), _name("train", values)
    for found in read_step_validations(run):
        yield "validations", found.step, _name("validation", found.validation)
    examples = 0
    for epoch in read_history(run):
        examples += epoch.examples
        about = {"loss": epoch.loss, "seconds": epoch.seconds, "epoch": epoch.epoch}
        metrics = _name("epoch", about) | _name("validation", epoch.validation)
        yield "epochs", examples // batch_size, metrics


def _name(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Names metrics; numbers that are not finite have no place in JSON."""
    found = {f"{group}/{_clean(name)}": float(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def list_params(config: TrainConfig) -> dict[str, str]:
    """Returns a config as MLflow's params: keys by dots, values as text, what is unset left out."""
    return dict(_flatten("", config.model_copy(update={"mlflow": None}).resolved()))


def _flatten(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flatten(f"{key}.{name}", part)
    elif value is not None:
        yield _clean(key[1:]), value if isinstance(value, str) else json.dumps(value)


def _clean(name: str) -> str:
    """A name as MLflow allows it: `ndcg@10` is `ndcg_at_10`, as its own evaluation writes it."""
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
