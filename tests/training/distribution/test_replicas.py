from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.processes import start_forked
from tests.training.replica_steps import train_all

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"sparse": {"kind": "sgd"}, "dense": {"kind": "sgd"}, "learning_rate": 0.1},
    "adagrad": {"sparse": {"kind": "adagrad"}, "dense": {"kind": "adagrad"}, "clip_value": 0.02},
    "adam": {"epsilon": 1e-4, "clip_norm": 0.3, "schedule": "cosine", "warmup_steps": 2},
    "ftrl": {"sparse": {"kind": "ftrl", "l1": 1e-3, "beta": 0.1}, "dense": {"kind": "ftrl"}},
    "parts": {"epsilon": 1e-4, "accumulate_steps": 2},
    # Rules that do not blow up what products of float16 differ by.
    "float16": {"epsilon": 1e-3, "learning_rate": 0.03, "dtype": "float16"},
    "float16 parts": {"epsilon": 1e-2, "accumulate_steps": 2, "dtype": "float16"},
}


def train(replicas: int, folder: Path) -> dict[str, list[list[float]]]:
    """Weights after training by each config, in a process of its own."""
    configs = {name: {"learning_rate": 0.02, **config} for name, config in CASES.items()}
    process = start_forked(train_all, replicas, configs, folder / "weights.json")
    process.join()
    assert process.exitcode == 0  # what it said is with the test's own errors
    return json.loads((folder / "weights.json").read_text())


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> dict[str, list[list[float]]]:
    return train(1, tmp_path_factory.mktemp("one"))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_replicas_train_as_one_does(replicas: int, on_one, tmp_path: Path) -> None:
    found = train(replicas, tmp_path)
    for name in CASES:
        for one, many in zip(on_one[name], found[name], strict=True):
            atol = 1e-3 if "float16" in name else 2e-5
            np.testing.assert_allclose(many, one, rtol=1e-4, atol=atol, err_msg=name)


def test_the_optimizers_do_not_all_do_the_same(on_one) -> None:
    tables = [on_one[name][0] for name in sorted(CASES)]
    for index, table in enumerate(tables):
        for other in tables[index + 1 :]:
            assert not np.allclose(table, other, atol=1e-4)
