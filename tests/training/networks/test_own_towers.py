"""Towers of one's own: what they are given, what is refused, a run with the guide's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml
from pydantic import ValidationError

from conf.errors import SluiceError
from conf.manifest import Manifest
from conf.training.models import DSSMConfig, YouTubeDNNConfig
from conf.training.train import TrainConfig
from training.checkpoint.restore import load_run
from training.evaluation.evaluate import evaluate_split
from training.export.saved_model import write_export
from training.fit import fit_run
from training.models.registry import build_model
from training.monitoring.progress import NoProgress

TOWERS = """
import keras
import numpy as np

def mean(inputs, output_dim):
    joined = keras.layers.Average()([inputs[name] for name in inputs])
    return keras.layers.Dense(output_dim, use_bias=False, kernel_initializer="identity")(joined)

def positions(inputs):
    mask = keras.ops.cast(inputs["history_mask"], "float32")[..., None]
    return keras.ops.sum(inputs["history"] * mask, axis=1)

def narrow(inputs):
    return keras.layers.Dense(1)(inputs["gender"])

def number(inputs):
    return 3.0

def broken(inputs):
    return inputs["gender"]["no"]

def drawn(inputs, output_dim):
    return mean(inputs, output_dim) * np.random.standard_normal(output_dim)
"""
USERS = {
    "user_id": tf.constant([2, 3], tf.int64),
    "gender": tf.constant([2, 3], tf.int64),
    "history": tf.constant([[5, 6, 7], [8, 0, 0]], tf.int64),
}
NONE = {"history": {"combiner": "none"}}
GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"
OWN_MODULES = {"own_towers.py": TOWERS}
pytestmark = pytest.mark.usefixtures("in_own_folder")


def own(function: str, **params: Any) -> dict[str, Any]:
    return {"function": f"own_towers:{function}", "params": params}


def test_a_tower_makes_the_vectors_of_users(tiny_manifest: Manifest) -> None:
    features = ("user_id", "gender")
    tower = {"user_tower": own("mean"), "normalize": False}
    model = build_model(
        DSSMConfig(embedding_dim=4, user_features=features, **tower), tiny_manifest, 1
    )
    rows = {name: table.rows.numpy() for name, table in model.tables.items()}
    expected = (rows["user_id"][[2, 3]] + rows["gender"][[2, 3]]) / 2
    np.testing.assert_allclose(model.embed_users(USERS), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [DSSMConfig, YouTubeDNNConfig])
def test_a_tower_reads_each_position(kind: Any, tiny_manifest: Manifest) -> None:
    config = kind(
        embedding_dim=4,
        user_features=("history",),
        pooling=NONE,
        user_tower=own("positions"),
        normalize=False,
    )
    model = build_model(config, tiny_manifest, 1)
    rows = model.tables["movie_id"].rows.numpy()
    expected = np.stack([rows[[5, 6, 7]].sum(axis=0), rows[8]])
    np.testing.assert_allclose(model.embed_users(USERS), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"user_tower": own("narrow")}, r"shape \(None, 1\).*Dense\(output_dim\)"),
        ({"user_tower": own("number")}, "float of shape None"),
        ({"user_tower": own("broken")}, r"own_towers\.py:\d+"),
        ({"user_tower": own("positions")}, "history_mask.*combiner=none"),
        ({"user_tower": own("positions"), "pooling": NONE}, "ignores user_id, gender"),
        ({"user_tower": own("mean", units=3)}, "units"),
        ({"pooling": NONE}, "a tower of one's own"),
    ],
)
def test_faults_of_a_tower_are_said(
    settings: dict[str, Any], error: str, tiny_manifest: Manifest
) -> None:
    config = DSSMConfig.model_validate({"embedding_dim": 4, **settings})
    with pytest.raises(SluiceError, match="(?s)" + error):
        build_model(config, tiny_manifest, 1)


def test_what_numpy_draws_is_the_same_in_each_command(tiny_manifest: Manifest) -> None:
    features = ("user_id", "gender")
    config = DSSMConfig(embedding_dim=4, user_features=features, user_tower=own("drawn"))
    before = np.random.get_state()[1].copy()
    first, second = (build_model(config, tiny_manifest, 1).embed_users(USERS) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_a_side_has_one_tower() -> None:
    with pytest.raises(ValidationError, match="in the place of the layers of user_hidden_units"):
        DSSMConfig(user_tower=own("mean"), user_hidden_units=(8,))
    with pytest.raises(ValidationError, match="output_dim: Sluice sets it"):
        DSSMConfig(user_tower=own("mean", output_dim=3))


def test_the_tower_of_the_guide_trains_and_is_served_without_its_module(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GUIDE.read_text("utf-8").split("## A tower")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [model] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "towers.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "towers", raising=False)
    settings = {
        "dataset": str(tiny_version), "name": "own", "root": str(tmp_path / "runs"),
        "fit": {"epochs": 1}, "input": {"batch_size": 64}, **yaml.safe_load(model),
    }  # fmt: skip
    run = fit_run(TrainConfig.model_validate(settings), NoProgress())
    trained = load_run(run)
    assert evaluate_split(trained, "test")["rows"] == 60
    exported = write_export(trained)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "towers")
    assert "user_embedding" in tf.saved_model.load(str(exported)).signatures
    assert "towers" not in sys.modules
    with pytest.raises(SluiceError, match=r"user.tower.* cannot be imported"):
        load_run(run)
