from __future__ import annotations

import json
from typing import Any

import pytest

from conf.errors import ConfigError
from training.distribution.strategy import Cluster, read_cluster

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
        ({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}'}, "'worker' alone"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["b:1"]}}'}, "the task type 'worker'"),
        (environment(workers=[]), "must list its worker processes"),
        (environment(workers="a:1"), "must list its worker processes"),
        (environment(workers=["a:1", "b"]), "not host:port: 'b'"),
        (environment(workers=["a:1", 7]), "not host:port: 7"),
        (environment(workers=["a:1", "b:70000"]), "not host:port: 'b:70000'"),
        (environment(workers=["a:1", "a:1"]), "names a worker twice"),
        (environment(type="chief"), "the task type 'worker'"),
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


@pytest.mark.parametrize(
    "given",
    [
        {"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}}'},
        environment(type="ps"),
    ],
)
def test_parameter_servers_are_refused_with_what_to_write(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="names parameter servers") as refused:
        read_cluster(given)
    assert refused.value.received == given["TF_CONFIG"]
    assert "shard: workers" in refused.value.fix
    assert "docs/guide/training-dynamic.md" in refused.value.fix
