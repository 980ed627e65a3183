from __future__ import annotations

import json
from typing import Any

import pytest
import tensorflow as tf

from conf.errors import ConfigError, InternalError
from conf.training.train import DevicesConfig, TrainConfig
from training.distribution.strategy import (
    build_strategy,
    check_devices,
    describe_devices,
)
from training.distribution.workers import Workers, lost_worker_errors

no_gpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@no_gpu
def test_one_and_two_cpu_replicas() -> None:
    one, two = (build_strategy(DevicesConfig(cpu_replicas=n)) for n in (1, 2))
    assert one.num_replicas_in_sync == 1
    assert two.num_replicas_in_sync == 2
    described = describe_devices(one, 64), describe_devices(two, 64)
    assert [(d["strategy"], d["rows_per_replica"], len(set(d["devices"]))) for d in described] == [
        ("none", 64, 1),
        ("mirrored", 32, 2),
    ]


def environment(workers: Any = ("a:1", "b:2"), **task: Any) -> str:
    task = {"type": "worker", "index": 1, **task}
    return json.dumps({"cluster": {"worker": workers}, "task": task})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "nothing"),
        ('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}', "chief"),
        (environment(workers=[]), "cluster.worker"),
        (environment(workers=["a:1", "b"]), "cluster.worker.1"),
        (environment(type="chief"), "task.type"),
        (environment(index=2), "there are 2 workers"),
        (environment(index="1"), "task.index"),
        (environment(type="ps"), "shard: workers"),
    ],
)
def test_other_clusters_are_refused(
    given: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", given)
    with pytest.raises(ConfigError) as refused:
        build_strategy(DevicesConfig(strategy="multi_worker"))
    assert message in refused.value.render()


LOST = tf.errors.UnavailableError(None, None, "Graph\nCollective ops is aborted by: task 1\nmore")


def test_a_lost_worker_says_what_to_do() -> None:
    alone = Workers(tf.distribute.get_strategy())
    with pytest.raises(tf.errors.UnavailableError), lost_worker_errors(alone):
        raise LOST
    alone.count = 2
    message = r"aborted by: task 1\n.*--resume"
    with pytest.raises(InternalError, match=message), lost_worker_errors(alone):
        raise LOST


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": {"batch_size": 13}}, "multiple of optimizer"),
        ({"input": {"batch_size": 10}, "optimizer": {"accumulate_steps": 4}}, "multiples of 8"),
        ({"input": {"bucket_boundaries": [5]}}, "bucket_boundaries"),
    ],
)
def test_what_replicas_cannot_share_is_refused(changes: dict, message: str) -> None:
    config = TrainConfig.model_validate({"dataset": "d", "name": "n", **changes})
    with pytest.raises(ConfigError, match=message):
        check_devices(config, build_strategy(DevicesConfig(cpu_replicas=2)))
