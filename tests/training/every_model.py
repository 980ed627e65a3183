"""A config of every model and every network that there is, and how the trainer scores rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from conf.training.models import RetrievalConfig
from tests.training.export import bare_client
from training.checkpoint.restore import TrainedModel
from training.input.batches import build_eval_dataset
from training.models.ranking import RankingModel
from training.networks.registry import NETWORKS

OWN_NETWORK = "tests.training.toy_models:build_own_network"
OWN_TOWER = "tests.training.toy_models:build_own_tower"
_RANKING = {"kind": "ranking", "embedding_dim": 4, "embedding_stddev": 1.0}
_TWO_TASKS = {"a": {"label": "label"}, "b": {"label": "label", "objective": "squared_error"}}
_MANY = {"shared_bottom", "mmoe"}
RANKING_MODELS: dict[str, dict[str, Any]] = {
    **{
        name: {**_RANKING, "network": name, **({"tasks": _TWO_TASKS} if name in _MANY else {})}
        for name in NETWORKS
    },
    "own": {
        **_RANKING,
        "network": OWN_NETWORK,
        "params": {"units": 8},
        "pooling": {"history": {"combiner": "none"}},
    },
}
RETRIEVAL_MODELS: dict[str, dict[str, Any]] = {
    "mf": {"name": "mf", "embedding_dim": 4},
    "dssm": {"name": "dssm", "embedding_dim": 4, "user_hidden_units": [8]},
    "own_tower": {
        "name": "dssm",
        "embedding_dim": 4,
        "user_tower": {"function": OWN_TOWER},
        "pooling": {"history": {"combiner": "none"}},
    },
    "youtube_dnn": {"name": "youtube_dnn", "embedding_dim": 4, "user_hidden_units": [8]},
    "sasrec": {"name": "sasrec", "embedding_dim": 4},
    "sasrec_ligr": {"name": "sasrec", "embedding_dim": 4, "block": "ligr"},
    "hstu": {"name": "hstu", "embedding_dim": 4, "heads": 2},
    "gru": {"name": "gru", "embedding_dim": 4},
    "bst_tower": {"name": "bst", "embedding_dim": 8, "heads": 2},
    "comirec": {"name": "comirec", "embedding_dim": 4, "interests": 3, "dropout": 0.2},
}


def list_retrieval_names() -> list[str]:
    """Names of the retrieval models that a config can have."""
    members = get_args(get_args(RetrievalConfig)[0])
    assert all(issubclass(member, BaseModel) for member in members)
    return sorted(str(member.model_fields["name"].default) for member in members)


def predict_test_split(trained: TrainedModel) -> dict[str, np.ndarray]:
    """What the trainer computes of the whole test split, named as `bare_client` names it."""
    model = trained.model
    where = (trained.version_dir, trained.manifest)
    [batch] = build_eval_dataset(*where, "test", 1000, model.inputs)
    if isinstance(model, RankingModel):
        found = model.predict(batch)
        return {f"serving_default/{task}": value.numpy() for task, value in found.items()}
    return {
        "user_embedding/embedding": model.embed_users(batch).numpy(),
        "item_embedding/embedding": model.embed_items(batch).numpy(),
    }


def ask_bare_process(
    exports: Mapping[str, str], rows: list[dict[str, Any]], folder: Path
) -> dict[str, dict[str, list[Any]]]:
    """Scores of raw rows by a process that has TensorFlow and no Sluice.

    Args:
        exports: Directories of exported versions by name.
        rows: Values by raw column.
        folder: The process' working directory.
    """
    done = subprocess.run(
        [sys.executable, bare_client.__file__],
        input=json.dumps({"exports": dict(exports), "rows": rows}),
        text=True, capture_output=True, check=False, cwd=folder,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: dict[str, dict[str, list[Any]]] = json.loads(done.stdout)
    return answers


def assert_scores_alike(
    expected: Mapping[str, Mapping[str, np.ndarray]],
    answers: Mapping[str, Mapping[str, list[Any]]],
) -> None:
    """Outputs of models by name are those of the trainer, and not all rows have the same."""
    for name, outputs in expected.items():
        assert set(answers[name]) == set(outputs), name
        for output, values in outputs.items():
            # Normalized sums of small numbers, as HSTU's, differ in float32's last digits.
            np.testing.assert_allclose(
                np.float32(answers[name][output]), values, rtol=1e-6, atol=5e-6, err_msg=name
            )
            assert np.ptp(values, axis=0).max() > 1e-3, f"{name}: {output}"
