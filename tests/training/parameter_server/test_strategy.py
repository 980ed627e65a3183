from __future__ import annotations

import json
import logging

import pytest
import tensorflow as tf

from conf.errors import InternalError
from tests.training.loopback import find_addresses
from training.parameter_server.cluster import ServerCluster
from training.parameter_server.strategy import (
    ShortMessages,
    build_lost_error,
    connect_servers,
    released_servers,
)


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
