"""A run at an MLflow tracking server, by MLflow's own client: params, metrics, artefacts.

What fails is sent by the next call, and a resumed run goes on as the same run of MLflow.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conf.artefacts.run import MLFLOW_FILE, REPORT_FILE, RUN_CARD_FILE, read_json, write_json
from conf.deadline import call_within
from conf.errors import ConfigError, install_hint
from conf.json_text import flatten
from conf.publication.working_copy import describe_place
from conf.training.train import TrainConfig
from training.monitoring.run_logs import read_history, read_step_validations, read_steps

_STATUSES = {"trained": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


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


def send_run(config: TrainConfig, run: Path, tell: Callable[[str], object]) -> None:
    """Sends what MLflow lacks of a run; what fails is told, and left to the next call."""
    call_within(30.0, lambda: _send(config, run), lambda why: tell(f"MLflow fails: {why}"))


def _send(config: TrainConfig, run: Path) -> None:
    from mlflow.entities import Metric, Param

    client, card = build_client(config), read_json(run / RUN_CARD_FILE)
    run_id, steps = _find_sent(client, run, card).values()
    params = [] if steps else [Param(*param) for param in list_params(card["config"]).items()]
    metrics, now = [], int(time.time() * 1000)
    for step, name, value in _list_metrics(run, config.input.batch_size):
        if step > steps.get(name, 0):
            metrics.append(Metric(name, value, now, step))
            steps[name] = step
    client.log_batch(run_id, metrics, params)  # In calls of the size that the API allows.
    write_json(run / MLFLOW_FILE, {"run_id": run_id, "steps": steps})
    if (status := _STATUSES.get(card["status"])) is None:
        client.update_run(run_id, "RUNNING")
        return
    for file in (*run.glob("*.json"), *run.glob(REPORT_FILE)):
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id, status)


def _find_sent(client: Any, run: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """Returns MLflow's id of the run, and the last step that it has of each metric."""
    name, file, dataset = card["name"], run / MLFLOW_FILE, card["dataset"]
    if not file.exists():
        found = client.get_experiment_by_name(name)
        place = found.experiment_id if found else client.create_experiment(name)
        tags = {"dataset": dataset["path"], "dataset_version": dataset["version"]}
        tags |= {"run": describe_place(run), "code_version": card["versions"]["sluice"]}
        made = client.create_run(place, tags=tags, run_name=run.name)
        write_json(file, {"run_id": made.info.run_id, "steps": {}})
    return read_json(file)


def _list_metrics(run: Path, batch_size: int) -> Iterator[tuple[int, str, float]]:
    found = [(line.step, "train", vars(line)) for line in read_steps(run)]
    between = [(one.step, dict(one.validation)) for one in read_step_validations(run)]
    found += [(step, "step_validation", values) for step, values in between]
    examples = 0
    for epoch in read_history(run):
        step = (examples := examples + epoch.examples) // batch_size
        found.append((step, "validation", dict(epoch.validation)))
        found.append((step, "epoch", {"loss": epoch.loss}))
    for step, group, values in sorted(found, key=lambda one: one[0]):
        for name, value in values.items():
            if name != "step" and math.isfinite(value):
                yield step, _clean(f"{group}/{name}"), float(value)


def list_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a config as MLflow's params: keys by dots, values as text, what is unset left out."""
    keys = flatten({**config, "mlflow": None})
    return {_clean(k): v if isinstance(v, str) else json.dumps(v) for k, v in keys if v is not None}


def _clean(name: str) -> str:
    """A name as MLflow allows it: `ndcg@10` is `ndcg_at_10`, as its own evaluation writes it."""
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
