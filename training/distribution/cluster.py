"""Processes of a run, as `TF_CONFIG` names them. Free of TensorFlow: read before it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError
from conf.training.train import PARAMETER_SERVER_FIX

VARIABLE = "TF_CONFIG"
WORKER = "worker"
TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", "index": 0}}'
)
_FIX = (
    f"set {VARIABLE} in each process, or start them by --launcher spark; for one process set "
    "devices.strategy=auto"
)
_SERVER = "ps"
_SERVER_FIX = f"name workers alone; {PARAMETER_SERVER_FIX}"
_LAST_PORT = 65535


@dataclass(frozen=True)
class Cluster:
    """All workers and which of them this process is.

    Attributes:
        workers: `host:port` of each; the first is the chief, which writes the run.
        index: Number of this process.
    """

    workers: tuple[str, ...]
    index: int


def read_cluster(environment: Mapping[str, str] | None = None) -> Cluster:
    """Reads the cluster of a multi-worker run from `TF_CONFIG`.

    Args:
        environment: Variables; None takes those of the process.

    Raises:
        ConfigError: It is missing, or is not what multi-worker training needs.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        raise _refuse("is not set", "nothing")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _refuse(f"is not JSON ({error})", text) from error
    if not isinstance(content, dict):
        raise _refuse("must be a JSON object", text)
    task = content.get("task")
    workers = _read_workers(content.get("cluster"), task, text)
    if not isinstance(task, dict) or task.get("type") != WORKER:
        raise _refuse(f"must give this process the task type {WORKER!r}", text)
    index = task.get("index")
    if type(index) is not int or not 0 <= index < len(workers):
        raise _refuse(f"must give this process an index from 0 to {len(workers) - 1}", text)
    return Cluster(workers, index)


def _refuse(what: str, received: str, fix: str = _FIX) -> ConfigError:
    """Returns the error of a `TF_CONFIG` that is not what it should be."""
    return ConfigError(
        f"devices.strategy=multi_worker: the environment variable {VARIABLE} {what}",
        received=received,
        allowed=TF_CONFIG_EXAMPLE,
        fix=fix,
    )


def _read_workers(cluster: Any, task: Any, text: str) -> tuple[str, ...]:
    jobs = set(cluster) if isinstance(cluster, dict) else set()
    if _SERVER in jobs or (isinstance(task, dict) and task.get("type") == _SERVER):
        raise _refuse("names parameter servers ('ps'), which are gone", text, _SERVER_FIX)
    if jobs != {WORKER}:
        raise _refuse("must have a cluster of 'worker' alone (the first one is the chief)", text)
    addresses = cluster[WORKER]
    if not isinstance(addresses, list) or not addresses:
        raise _refuse(f"must list its {WORKER} processes", text)
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not (isinstance(address, str) and host and port.isdecimal()):
            raise _refuse(f"has a {WORKER} that is not host:port: {address!r}", text)
        if not 0 < int(port) <= _LAST_PORT:
            raise _refuse(f"has a {WORKER} whose port is out of range: {address!r}", text)
    if len(set(addresses)) < len(addresses):
        raise _refuse("names a worker twice", text)
    return tuple(addresses)
