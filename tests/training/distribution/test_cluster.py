from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest
import tensorflow as tf

from conf.errors import ConfigError, InternalError
from tests.training.processes import find_addresses
from training.distribution.cluster import (
    Cluster,
    ServerCluster,
    find_silent,
    is_listening,
    read_cluster,
    read_server_cluster,
)
from training.distribution.parameter_server import (
    ShortMessages,
    build_lost_error,
    connect_servers,
    released_servers,
)

WORKERS = ["a:1", "b:2"]


def environment(workers: Any = WORKERS, **task: Any) -> dict[str, str]:
    task = {"type": "worker", "index": 1, **task}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def test_reads_the_workers_and_which_this_one_is() -> None:
    assert read_cluster(environment()) == Cluster(("a:1", "b:2"), 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "is not set"),
        ({"TF_CONFIG": ""}, "is not set"),
        ({"TF_CONFIG": "{"}, "is not JSON"),
        ({"TF_CONFIG": "[]"}, "must be a JSON object"),
        ({"TF_CONFIG": "{}"}, "a cluster of 'worker' alone"),
        ({"TF_CONFIG": '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}'}, "'worker' alone"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["b:1"]}}'}, "the task type 'worker'"),
        (environment(workers=[]), "must list its worker processes"),
        (environment(workers="a:1"), "must list its worker processes"),
        (environment(workers=["a:1", "b"]), "not host:port: 'b'"),
        (environment(workers=["a:1", 7]), "not host:port: 7"),
        (environment(workers=["a:1", "b:70000"]), "out of range"),
        (environment(workers=["a:1", "a:1"]), "names a worker twice"),
        (environment(type="ps"), "the task type 'worker'"),
        (environment(index=2), "an index from 0 to 1"),
        (environment(index=-1), "an index from 0 to 1"),
        (environment(index="1"), "an index from 0 to 1"),
        (environment(index=True), "an index from 0 to 1"),
    ],
)
def test_anything_else_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_cluster(given)
    assert '"cluster"' in refused.value.render()  # shows what it should look like


JOBS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def cluster_environment(cluster: Any = JOBS, job: str = "worker", index: int = 1) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def test_reads_all_processes_and_which_this_one_is() -> None:
    cluster = read_server_cluster(cluster_environment())
    assert cluster == ServerCluster("a:1", ("b:1", "c:1"), ("d:1",), "worker", 1)
    assert cluster.to_jobs() == JOBS
    assert not cluster.is_chief
    assert read_server_cluster(cluster_environment(job="chief", index=0)).is_chief


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "is not set"),
        (cluster_environment({"worker": ["b:1"]}), "a cluster of 'chief', 'worker', 'ps'"),
        (
            cluster_environment({**JOBS, "evaluator": ["e:1"]}),
            "a cluster of 'chief', 'worker', 'ps'",
        ),
        (cluster_environment({**JOBS, "ps": []}), "must list its ps processes"),
        (cluster_environment({**JOBS, "ps": ["d"]}), "a ps that is not host:port: 'd'"),
        (cluster_environment({**JOBS, "ps": ["a:1"]}), "names one twice"),
        (cluster_environment({**JOBS, "chief": ["a:1", "a:2"]}), "has one chief"),
        (cluster_environment(job="evaluator"), "the task type 'chief' or 'worker' or 'ps'"),
        (cluster_environment(job="ps"), "an index from 0 to 0"),
    ],
)
def test_cluster_anything_else_is_refused(given: dict[str, str], message: str) -> None:
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


def test_the_chief_says_for_whom_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    chief, worker, server = find_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
    task = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    before = list(tf.get_logger().filters)
    with pytest.raises(InternalError, match=f"{server}, {worker}") as refused:
        connect_servers(1)
    assert "within devices.worker_timeout_s = 1" in refused.value.render()
    assert tf.get_logger().filters == before


def test_a_lost_process_is_named() -> None:
    chief, worker, server = find_addresses(3)
    error = build_lost_error(ServerCluster(chief, (worker,), (server,), "chief", 0), "reset")
    assert f"worker 0 ({worker}), ps 0 ({server}): reset" in error.render()


def test_without_servers_nobody_is_told() -> None:
    with pytest.raises(tf.errors.AbortedError), released_servers(tf.distribute.get_strategy()):
        raise tf.errors.AbortedError(None, None, "mine")


def test_messages_of_lost_processes_are_short(caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("sluice.training.parameter_server")
    ours.addHandler(caplog.handler)
    theirs = logging.getLogger("test_short_messages")
    theirs.addFilter(ShortMessages())
    for message in ("gone\nmore", "gone\nand more", "another"):
        theirs.error("worker %s", message)
    ours.removeHandler(caplog.handler)
    found = {record.getMessage() for record in caplog.records}
    assert found == {"worker gone", "worker another"}
