from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
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


def train(replicas: int) -> dict[str, list[list[float]]]:
    """Weights after training by each config, in a process of its own."""
    configs = {name: {"learning_rate": 0.02, **config} for name, config in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.replica_steps", str(replicas), json.dumps(configs)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_one() -> dict[str, list[list[float]]]:
    return train(1)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_train_as_one_does(replicas: int, on_one) -> None:
    found = train(replicas)
    for name in CASES:
        for one, many in zip(on_one[name], found[name], strict=True):
            atol = 1e-3 if "float16" in name else 2e-5
            np.testing.assert_allclose(many, one, rtol=1e-4, atol=atol, err_msg=name)


def test_the_optimizers_do_not_all_do_the_same(on_one) -> None:
    tables = [on_one[name][0] for name in sorted(CASES)]
    for index, table in enumerate(tables):
        for other in tables[index + 1 :]:
            assert not np.allclose(table, other, atol=1e-4)
