"""The processes of a run with parameter servers, as `TF_CONFIG` names them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.errors import ConfigError
from training.cluster import WORKER, TFConfigForm, read_tf_config

STRATEGY = "parameter_server"
CHIEF, SERVER = "chief", "ps"
PROBE_TIMEOUT_S = 1.0
_FORM = TFConfigForm(
    STRATEGY,
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
    found = read_tf_config(_FORM, environment)
    chiefs = found.jobs[CHIEF]
    if len(chiefs) > 1:
        raise ConfigError(
            f"devices.strategy={STRATEGY} has one chief",
            received=", ".join(chiefs),
            fix="name one address in TF_CONFIG's cluster.chief",
        )
    return ServerCluster(chiefs[0], found.jobs[WORKER], found.jobs[SERVER], found.job, found.index)


def is_listening(address: str) -> bool:
    """Returns whether a process listens on a `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as probe:
            # Where nobody listens the system may give the probe that very port: it meets itself.
            return probe.getsockname() != probe.getpeername()
    except OSError:
        return False


def find_silent(addresses: Sequence[str]) -> list[str]:
    """Returns those of the addresses on which no process listens."""
    return [address for address in addresses if not is_listening(address)]
