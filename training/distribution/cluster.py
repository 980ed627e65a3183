"""Processes of a run, as `TF_CONFIG` names them: workers, or a chief and parameter servers.

Free of TensorFlow: read before it starts.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError

VARIABLE = "TF_CONFIG"
WORKER = "worker"
TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", "index": 0}}'
)
_MULTI_WORKER_STRATEGY = "multi_worker"
_FIX = "or start them by --launcher spark; for one process set devices.strategy=auto"
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
    cluster = read_tf_config(
        TFConfigForm(_MULTI_WORKER_STRATEGY, (WORKER,), TF_CONFIG_EXAMPLE, _FIX), environment
    )
    return Cluster(cluster.jobs[WORKER], cluster.index)


@dataclass(frozen=True)
class TFConfigForm:
    """The form of `TF_CONFIG` that a strategy needs.

    Attributes:
        strategy: Name of the strategy.
        jobs: Types of its processes; there is at least one of each.
        example: A value that would do.
        fix: Remedy that the errors name.
    """

    strategy: str
    jobs: tuple[str, ...]
    example: str
    fix: str

    def refuse(self, what: str, received: str) -> ConfigError:
        """Returns the error of a `TF_CONFIG` that is not so."""
        return ConfigError(
            f"devices.strategy={self.strategy}: the environment variable {VARIABLE} {what}",
            received=received,
            allowed=self.example,
            fix=f"set {VARIABLE} in each process, {self.fix}",
        )


@dataclass(frozen=True)
class TFConfig:
    """The content of `TF_CONFIG`.

    Attributes:
        jobs: `host:port` of each process by its type.
        job: Type of this process.
        index: Its number among those of its type.
    """

    jobs: Mapping[str, tuple[str, ...]]
    job: str
    index: int


def read_tf_config(form: TFConfigForm, environment: Mapping[str, str] | None = None) -> TFConfig:
    """Reads `TF_CONFIG`.

    Args:
        form: Its required form.
        environment: Variables; None takes those of the process.

    Raises:
        ConfigError: It is missing, or is not of this form.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        raise form.refuse("is not set", "nothing")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise form.refuse(f"is not JSON ({error})", text) from error
    if not isinstance(content, dict):
        raise form.refuse("must be a JSON object", text)
    jobs = _read_jobs(form, content.get("cluster"), text)
    task = content.get("task")
    kinds = " or ".join(repr(job) for job in form.jobs)
    if not isinstance(task, dict) or task.get("type") not in form.jobs:
        raise form.refuse(f"must give this process the task type {kinds}", text)
    job, index = task["type"], task.get("index")
    if type(index) is not int or not 0 <= index < len(jobs[job]):
        raise form.refuse(f"must give this process an index from 0 to {len(jobs[job]) - 1}", text)
    return TFConfig(jobs, job, index)


def _read_jobs(form: TFConfigForm, cluster: Any, text: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, dict) or set(cluster) != set(form.jobs):
        if form.jobs == (WORKER,):
            raise form.refuse(
                "must have a cluster of 'worker' alone (the first one is the chief)", text
            )
        kinds = ", ".join(repr(job) for job in form.jobs)
        raise form.refuse(f"must have a cluster of {kinds}, each with its processes", text)
    jobs = {job: _read_addresses(form, job, cluster[job], text) for job in form.jobs}
    addresses = [address for found in jobs.values() for address in found]
    if len(set(addresses)) < len(addresses):
        raise form.refuse("names a worker twice" if len(jobs) == 1 else "names one twice", text)
    return jobs


def _read_addresses(
    form: TFConfigForm, job: str, addresses: Sequence[Any], text: str
) -> tuple[str, ...]:
    if not isinstance(addresses, list) or not addresses:
        raise form.refuse(f"must list its {job} processes", text)
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not (isinstance(address, str) and host and port.isdecimal()):
            raise form.refuse(f"has a {job} that is not host:port: {address!r}", text)
        if not 0 < int(port) <= _LAST_PORT:
            raise form.refuse(f"has a {job} whose port is out of range: {address!r}", text)
    return tuple(addresses)


PARAMETER_SERVER_STRATEGY = "parameter_server"
CHIEF, SERVER = "chief", "ps"
PROBE_TIMEOUT_S = 1.0
_SERVER_FORM = TFConfigForm(
    PARAMETER_SERVER_STRATEGY,
    (CHIEF, WORKER, SERVER),
    '{"cluster": {"chief": ["host0:port"], "worker": ["host1:port", "host2:port"], '
    '"ps": ["host3:port"]}, "task": {"type": "worker", "index": 0}}',
    "in that of the chief with the task type 'chief'; for one process set devices.strategy=auto",
)


@dataclass(frozen=True)
class ServerCluster:
    """All processes and which of them this one is.

    Attributes:
        chief: `host:port` of the process that reads the input, gives out steps and writes the run.
        workers: Of those that compute steps.
        servers: Of those that hold the variables.
        job: Type of this process: `chief`, `worker` or `ps`.
        index: Its number among those of its type.
    """

    chief: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    job: str
    index: int

    @property
    def is_chief(self) -> bool:
        """Whether this process trains; the others serve it."""
        return self.job == CHIEF

    def to_jobs(self) -> dict[str, list[str]]:
        """Returns the addresses by type of process, as TensorFlow's `ClusterSpec` takes them."""
        return {CHIEF: [self.chief], WORKER: list(self.workers), SERVER: list(self.servers)}


def read_server_cluster(environment: Mapping[str, str] | None = None) -> ServerCluster:
    """Reads `TF_CONFIG`.

    Args:
        environment: Variables; None takes those of the process.

    Raises:
        ConfigError: It is missing, or does not name one chief, workers and parameter servers.
    """
    cluster = read_tf_config(_SERVER_FORM, environment)
    chiefs = cluster.jobs[CHIEF]
    if len(chiefs) > 1:
        raise ConfigError(
            f"devices.strategy={PARAMETER_SERVER_STRATEGY} has one chief",
            received=", ".join(chiefs),
            fix="name one address in TF_CONFIG's cluster.chief",
        )
    return ServerCluster(
        chiefs[0], cluster.jobs[WORKER], cluster.jobs[SERVER], cluster.job, cluster.index
    )


def is_listening(address: str) -> bool:
    """Returns whether a process listens on a `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as probe:
            # The system may give the probe the very port that it asks: then nothing listens there.
            return probe.getsockname() != probe.getpeername()
    except OSError:
        return False


def find_silent(addresses: Sequence[str]) -> list[str]:
    """Returns those of the addresses on which no process listens."""
    return [address for address in addresses if not is_listening(address)]
