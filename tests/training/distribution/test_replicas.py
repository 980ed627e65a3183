from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machine import IS_EXHAUSTIVE
from tests.training.processes import start_forked
from tests.training.replica_steps import train_all, train_objectives

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"sparse": {"kind": "sgd"}, "dense": {"kind": "sgd"}, "learning_rate": 0.1},
    "adagrad": {"sparse": {"kind": "adagrad"}, "dense": {"kind": "adagrad"}},
    "adam": {"epsilon": 1e-4, "clip_norm": 0.3, "schedule": "cosine", "warmup_steps": 2},
    "ftrl": {"sparse": {"kind": "ftrl", "l1": 1e-3}, "dense": {"kind": "ftrl"}},
    "parts": {"epsilon": 1e-4, "accumulate_steps": 2},
    # Rules that do not blow up what products of half precision differ by.
    "bfloat16": {"dense": {"kind": "sgd"}, "sparse": {"kind": "sgd"}, "dtype": "bfloat16"},
}
# What differs most; `make test-all` tries all.
NAMES = CASES if IS_EXHAUSTIVE else ("adagrad", "adam", "parts")
TRIED = {name: {"learning_rate": 0.02, **CASES[name]} for name in NAMES}


def train(target: Callable[..., None], replicas: int, *arguments: Any) -> dict[str, list[Any]]:
    """What a function of `replica_steps` finds, in a process of its own; its file comes last."""
    process = start_forked(target, replicas, *arguments)
    process.join()
    assert process.exitcode == 0  # what it said is with the test's own errors
    return json.loads(arguments[-1].read_text())


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> dict[str, list[Any]]:
    return train(train_all, 1, TRIED, tmp_path_factory.mktemp("one") / "weights.json")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_replicas_train_as_one_does(replicas: int, on_one, tmp_path: Path) -> None:
    found = train(train_all, replicas, TRIED, tmp_path / "weights.json")
    for name in TRIED:
        for one, many in zip(on_one[name], found[name], strict=True):
            atol = 1e-3 if name == "bfloat16" else 2e-5
            np.testing.assert_allclose(many, one, rtol=1e-4, atol=atol, err_msg=name)


def test_the_optimizers_do_not_all_do_the_same(on_one) -> None:
    for name, other in itertools.combinations(TRIED, 2):
        assert not np.allclose(on_one[name][0], on_one[other][0], atol=1e-4)


MF: dict[str, Any] = {"name": "mf", "embedding_dim": 4}
SASREC: dict[str, Any] = {
    "name": "sasrec", "embedding_dim": 4, "blocks": 1, "heads": 1, "dropout": None,
}  # fmt: skip
SEQUENCES = "positions of sequences"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "adaptive negatives in two parts": {
        **MF,
        "objective": {"negatives": {"source": "adaptive", "count": 8}, "mask": "user_items"},
        "parts": 2,
    },
    "mixed negatives by frequency": {
        **MF,
        "objective": {"negatives": {"source": "mixed", "count": 8, "distortion": 0.5}},
    },
    "the catalogue": {**MF, "objective": {"kind": "softmax", "mask": "user_items"}},
    "items drawn for a row": {
        **MF,
        "objective": {"kind": "bpr", "negatives": {"source": "frequency", "count": 3}},
    },
    "the hardest of the batch": {**MF, "objective": {"negatives": {"hardest": 4}}},
    "normalized layers": {
        "name": "dssm",
        "embedding_dim": 4,
        "user_hidden_units": [6],
        "item_hidden_units": [6],
        "batch_normalization": True,
        "objective": {"kind": "binary", "negatives": {"count": 2}},
    },
    SEQUENCES: {
        **SASREC,
        "objective": {"negatives": {"source": "mixed", "count": 8}},
    },
    "positions against the batch": {**SASREC, "objective": {"mask": "user_items"}},
    "positions against the catalogue": {**SASREC, "objective": "softmax"},
    "positions with items drawn": {**SASREC, "name": "hstu", "objective": "bpr"},
}
# The positions of replicas differ in number; `make test-all` tries all.
TRIED_OBJECTIVES = OBJECTIVES if IS_EXHAUSTIVE else {SEQUENCES: OBJECTIVES[SEQUENCES]}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_objectives_are_the_same_on_replicas(
    replicas: int, tiny_version: Path, tmp_path: Path
) -> None:
    """Losses, weights, moving statistics, and counts of what was met."""
    one, many = (
        train(train_objectives, n, TRIED_OBJECTIVES, str(tiny_version), tmp_path / f"{n}.json")
        for n in (1, replicas)
    )
    for name in TRIED_OBJECTIVES:
        for expected, found in zip(one[name], many[name], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5, err_msg=name)
    if IS_EXHAUSTIVE:
        counts = one["adaptive negatives in two parts"][-1]
        assert sum(counts) == 40 + 5 * 16  # Each of 40 items once before, and rows of five steps.
