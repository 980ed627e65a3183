from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from conf.errors import ConfigError
from tests.training.loopback import find_addresses
from training.parameter_server.cluster import (
    ServerCluster,
    find_silent,
    is_listening,
    read_server_cluster,
)

JOBS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def environment(cluster: Any = JOBS, job: str = "worker", index: int = 1) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def test_reads_all_processes_and_which_this_one_is() -> None:
    cluster = read_server_cluster(environment())
    assert cluster == ServerCluster("a:1", ("b:1", "c:1"), ("d:1",), "worker", 1)
    assert cluster.to_jobs() == JOBS
    assert not cluster.is_chief
    assert read_server_cluster(environment(job="chief", index=0)).is_chief


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "is not set"),
        (environment({"worker": ["b:1"]}), "a cluster of 'chief', 'worker', 'ps'"),
        (environment({**JOBS, "evaluator": ["e:1"]}), "a cluster of 'chief', 'worker', 'ps'"),
        (environment({**JOBS, "ps": []}), "must list its ps processes"),
        (environment({**JOBS, "ps": ["d"]}), "a ps that is not host:port: 'd'"),
        (environment({**JOBS, "ps": ["a:1"]}), "names one twice"),
        (environment({**JOBS, "chief": ["a:1", "a:2"]}), "has one chief"),
        (environment(job="evaluator"), "the task type 'chief' or 'worker' or 'ps'"),
        (environment(job="ps"), "an index from 0 to 0"),
    ],
)
def test_anything_else_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_server_cluster(given)
    assert "TF_CONFIG" in refused.value.render()


def test_a_port_is_seen_as_long_as_somebody_listens() -> None:
    address, silent = find_addresses(2)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        assert is_listening(address)
        assert find_silent([address, silent]) == [silent]
    assert not is_listening(address)


def test_a_probe_that_meets_itself_has_found_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))  # as the system may do, whose choice it is
    probe.connect(probe.getsockname())
    address = "{}:{}".format(*probe.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_: probe)
    assert not is_listening(address)
    assert probe.fileno() == -1  # closed: it had come so far
