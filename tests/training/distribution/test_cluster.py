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
        ({}, "nothing"),
        ({"TF_CONFIG": "{"}, "Invalid JSON"),
        ({"TF_CONFIG": "{}"}, "cluster"),
        ({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}'}, "chief"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["b:1"]}}'}, "task"),
        (environment(workers=[]), "cluster.worker"),
        (environment(workers=["a:1", "b"]), "cluster.worker.1"),
        (environment(workers=["a:1", 7]), "cluster.worker.1"),
        (environment(workers=["a:1", "a:1"]), "named twice"),
        (environment(type="chief"), "task.type"),
        (environment(index=2), "there are 2 workers"),
        (environment(index=-1), "task.index"),
        (environment(index="1"), "task.index"),
        (environment(type="ps"), "shard: workers"),
    ],
)
def test_anything_else_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_cluster(given)
    assert message in refused.value.render()
    assert '"cluster"' in refused.value.render()  # shows what it should look like
