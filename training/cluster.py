"""The processes of a multi-worker run, as `TF_CONFIG` names them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError

VARIABLE = "TF_CONFIG"
WORKER = "worker"
EXAMPLE = (
    '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", "index": 0}}'
)
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
    """Reads `TF_CONFIG`.

    Args:
        environment: Variables; None takes those of the process.

    Raises:
        ConfigError: It is missing, or is not what multi-worker training needs.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        raise _refused("is not set", "nothing")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _refused(f"is not JSON ({error})", text) from error
    if not isinstance(content, dict):
        raise _refused("must be a JSON object", text)
    workers = _read_workers(content.get("cluster"), text)
    task = content.get("task")
    if not isinstance(task, dict) or task.get("type") != WORKER:
        raise _refused("must give this process the task type 'worker'", text)
    index = task.get("index")
    if type(index) is not int or not 0 <= index < len(workers):
        raise _refused(f"must give this process an index from 0 to {len(workers) - 1}", text)
    return Cluster(workers, index)


def _read_workers(cluster: Any, text: str) -> tuple[str, ...]:
    if not isinstance(cluster, dict) or set(cluster) != {WORKER}:
        raise _refused("must have a cluster of 'worker' alone (the first one is the chief)", text)
    workers = cluster[WORKER]
    if not isinstance(workers, list) or not workers:
        raise _refused("must list the workers", text)
    for address in workers:
        host, _, port = str(address).rpartition(":")
        if not (isinstance(address, str) and host and port.isdecimal()):
            raise _refused(f"has a worker that is not host:port: {address!r}", text)
        if not 0 < int(port) <= _LAST_PORT:
            raise _refused(f"has a worker whose port is out of range: {address!r}", text)
    if len(set(workers)) < len(workers):
        raise _refused("names a worker twice", text)
    return tuple(workers)


def _refused(what: str, received: str) -> ConfigError:
    return ConfigError(
        f"devices.strategy=multi_worker: the environment variable {VARIABLE} {what}",
        received=received,
        allowed=EXAMPLE,
        fix=f"set {VARIABLE} in each process, or start them by --launcher spark; "
        "for one process set devices.strategy=auto",
    )
