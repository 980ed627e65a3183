"""Towers of one's own: what they are given, what is refused, what a run with one does."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml
from pydantic import ValidationError
from starlette.testclient import TestClient

from conf.artefacts.export import ExportOptions, IndexOptions
from conf.errors import ConfigError, ExitCode, OwnCodeError
from conf.manifest import Manifest
from conf.training.models import DSSMConfig, YouTubeDNNConfig
from conf.training.train import TrainConfig
from tests.training import tiny_dataset
from tests.training.predictions import write_lists
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import load_run
from training.evaluation.evaluate import evaluate_split
from training.export.saved_model import write_export
from training.fit import fit_run, plan_run
from training.index.index_build import add_items
from training.models.registry import build_model
from training.monitoring.progress import NoProgress
from training.monitoring.run_logs import read_history
from training.serving.app import build_app
from training.serving.server import Server
from training.serving.server_config import ServerConfig

TOWERS = """
import keras
import numpy as np
import tensorflow as tf

def mean(inputs, output_dim):
    joined = keras.layers.Average()([inputs[name] for name in inputs])
    return keras.layers.Dense(output_dim, use_bias=False, kernel_initializer="identity")(joined)

def projected(inputs, output_dim):
    joined = keras.layers.Concatenate()([inputs[name] for name in inputs])
    return keras.layers.Dense(output_dim)(joined)

def positions(inputs):
    mask = keras.ops.cast(inputs["history_mask"], "float32")[..., None]
    return keras.ops.sum(inputs["history"] * mask, axis=1)

def narrow(inputs):
    return keras.layers.Dense(1)(inputs["gender"])

def number(inputs):
    return 3.0

def broken(inputs):
    return inputs["gender"]["no"]

def whole(inputs, output_dim):
    return keras.ops.cast(mean(inputs, output_dim), "int32")

def zero(inputs, output_dim):
    return 0.0 * mean(inputs, output_dim)

def flipped(inputs, output_dim):
    return keras.ops.flip(projected(inputs, output_dim), axis=0)

def shared(inputs, output_dim):
    return keras.ops.softmax(projected(inputs, output_dim), axis=0)

def normal(inputs, output_dim):
    vector = projected(inputs, output_dim)
    return keras.layers.LayerNormalization(center=False, scale=False)(vector)

class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scales = tf.Variable(tf.ones(shape[-1:]))
    def call(self, x):
        return x * self.scales

def drawn(inputs, output_dim):
    return projected(inputs, output_dim) * np.random.standard_normal(output_dim)

def untracked(inputs, output_dim):
    return Scaled()(projected(inputs, output_dim))

class Measured(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.size = keras.metrics.Mean(name="size")
    def call(self, x):
        self.size.update_state(keras.ops.abs(x))
        return x

def measured(inputs, output_dim):
    return Measured()(projected(inputs, output_dim))

class Python(keras.layers.Layer):
    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(lambda v: 0 * v, [x], x.dtype), x.shape)
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

def python(inputs, output_dim):
    return Python()(projected(inputs, output_dim))

class Anew(keras.layers.Layer):
    def call(self, x):
        return keras.layers.Dense(x.shape[-1])(x)

def anew(inputs, output_dim):
    return Anew()(projected(inputs, output_dim))

class Trained(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            raise ValueError("not in training")
        return x

def trained(inputs, output_dim):
    return Trained()(projected(inputs, output_dim))

class Late(keras.layers.Layer):
    def call(self, x):
        if x.shape[0] not in (None, 8, 16):
            raise ValueError("not these")
        return x

def late(inputs, output_dim):
    return Late()(projected(inputs, output_dim))

def rounded(inputs, output_dim):
    return keras.ops.round(mean(inputs, output_dim))

def twice(inputs, output_dim):
    vector = mean(inputs, output_dim)
    return keras.ops.concatenate([vector, vector], axis=0)

def logarithm(inputs, output_dim):
    return keras.ops.log(mean(inputs, output_dim))

def softmax(inputs):
    mask = keras.ops.cast(inputs["history_mask"], "float32")[..., None]
    scores = keras.layers.Dense(1)(inputs["history"])
    scores = keras.ops.where(mask > 0, scores, -float("inf"))
    return keras.ops.sum(keras.ops.softmax(scores, axis=1) * inputs["history"], axis=1)

class Failing(keras.layers.Layer):
    def call(self, x):
        if x.shape[0] is not None:
            raise ValueError("not these")
        return x

def failing(inputs, output_dim):
    return Failing()(mean(inputs, output_dim))

def unmasked(inputs):
    return inputs["history_mask"]
"""
USERS = {
    "user_id": tf.constant([2, 3], tf.int64),
    "gender": tf.constant([2, 3], tf.int64),
    "history": tf.constant([[5, 6, 7], [8, 0, 0]], tf.int64),
}
GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"
OWN_MODULES = {"own_towers.py": TOWERS}
pytestmark = pytest.mark.usefixtures("in_own_folder")


def own(function: str, **params: Any) -> dict[str, Any]:
    return {"function": f"own_towers:{function}", "params": params}


def copy_without_histories(version: Path, root: Path) -> Path:
    """A version whose rows of train have empty lists."""
    original = tiny_dataset._row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "_row", lambda *a, **o: {**original(*a, **o), "history": []})
        return write_tiny_dataset(root / "cold", config=TinyConfig(users=20))


def plan(version: Path, root: Path, model: dict[str, Any]) -> TrainConfig:
    settings = {"dataset": str(version), "name": "own", "root": str(root), "fit": {"epochs": 1}}
    return TrainConfig.model_validate({**settings, "model": model, "input": {"batch_size": 64}})


def test_towers_make_the_vectors_of_both_sides(tiny_manifest: Manifest) -> None:
    config = DSSMConfig(
        embedding_dim=4,
        user_features=("user_id", "gender"),
        user_tower=own("mean"),
        item_tower=own("mean"),
        normalize=False,
    )
    model = build_model(config, tiny_manifest, 1)
    rows = {name: table.rows.numpy() for name, table in model.tables.items()}
    expected = (rows["user_id"][[2, 3]] + rows["gender"][[2, 3]]) / 2
    np.testing.assert_allclose(model.embed_users(USERS), expected, rtol=1e-5)
    items = {"movie_id": tf.constant([2, 9]), "genres": tf.constant([[2, 0], [4, 0]])}
    expected = (rows["movie_id"][[2, 9]] + rows["genres"][[2, 4]]) / 2
    np.testing.assert_allclose(model.embed_items(items), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [DSSMConfig, YouTubeDNNConfig])
def test_a_tower_reads_each_position(kind: Any, tiny_manifest: Manifest) -> None:
    config = kind(
        embedding_dim=4,
        user_features=("history",),
        pooling={"history": {"combiner": "none"}},
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
        ({"user_tower": own("broken")}, r"in \S*own_towers\.py:\d+"),
        ({"user_tower": own("positions")}, "history_mask.*combiner=none"),
        (
            {"user_tower": own("positions"), "pooling": {"history": {"combiner": "none"}}},
            r"ignores user_id, gender.*user_features=\[history\]",
        ),
        ({"user_tower": own("whole")}, "user tower own_towers:whole.*floating-point.*int32"),
        ({"item_tower": own("rounded")}, "item tower own_towers:rounded has no gradient"),
        ({"item_tower": own("flipped")}, "other numbers beside other rows"),
        ({"user_tower": own("shared")}, "other numbers beside other rows"),
        ({"user_tower": own("untracked")}, r"variables that Keras does not know.*\(\d+,\)"),
        ({"user_tower": own("measured")}, "Keras metrics in its layers.*received: size"),
        ({"item_tower": own("python")}, "calls Python in each step"),
        (
            {"item_tower": own("anew")},
            "own_towers:anew fails on the first 16 rows.*tf.Variable is only created once",
        ),
        ({"user_tower": own("trained")}, r"first 16 rows.*own_towers\.py:\d+.*not in training"),
        ({"item_tower": own("zero")}, "item tower own_towers:zero has no gradient"),
        ({"item_tower": own("twice")}, "received: 32 of 16 rows"),
        ({"item_tower": own("logarithm")}, "outputs that are no numbers"),
        ({"user_tower": own("failing")}, r"first 16 rows.*ValueError.*own_towers\.py:\d+"),
        (
            {
                "user_tower": own("softmax"),
                "user_features": ["history"],
                "pooling": {"history": {"combiner": "none"}},
            },
            "outputs that are no numbers.*lists are empty.*-1e9",
        ),
        ({"user_tower": own("mean", units=3)}, r"model\.user_tower\.params\.units"),
        ({"item_tower": own("means")}, "did you mean 'mean'"),
        ({"item_tower": {"function": "own_tower:mean"}}, "No module named.*PYTHONPATH"),
        ({"item_tower": {"function": "training:mean"}}, "Sluice's own"),
        ({"pooling": {"history": {"combiner": "none"}}}, "a tower of one's own"),
    ],
)
def test_faults_of_a_tower_are_said_before_anything_is_written(
    settings: dict[str, Any], error: str, tiny_version: Path, tmp_path: Path
) -> None:
    config = plan(tiny_version, tmp_path / "runs", {"name": "dssm", "embedding_dim": 4, **settings})
    with pytest.raises(ConfigError, match="(?s)" + error) as caught:
        plan_run(config)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"user_tower": own("normal"), "item_tower": own("normal")}},
        {"devices": {"cpu_replicas": 2}},
        {"compute": {"mixed_precision": True}},
        {"model": {"embeddings": {"user_id": {"kind": "dynamic"}}}},
    ],
)
def test_a_tower_is_tried_in_the_way_that_it_trains(
    settings: dict[str, Any], tiny_version: Path, tmp_path: Path
) -> None:
    towers = {"user_tower": own("projected"), "item_tower": own("projected")}
    model = {"name": "dssm", "embedding_dim": 4, **towers, **settings.pop("model", {})}
    plain = plan(tiny_version, tmp_path, model)
    run = fit_run(TrainConfig.model_validate({**plain.model_dump(), **settings}), NoProgress())
    assert np.isfinite(read_history(run)[0].loss)


def test_what_numpy_draws_is_the_same_in_each_command(tiny_manifest: Manifest) -> None:
    config = DSSMConfig(embedding_dim=4, user_tower=own("drawn"))
    before = np.random.get_state()[1].copy()
    first, second = (build_model(config, tiny_manifest, 1).embed_users(USERS) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_a_tower_is_tried_where_all_its_lists_are_empty(tiny_version: Path, tmp_path: Path) -> None:
    """As on a log of new users: their vectors move nothing, and those of others will."""
    cold = copy_without_histories(tiny_version, tmp_path)
    model = {
        "name": "dssm", "embedding_dim": 4, "user_features": ["history"],
        "pooling": {"history": {"combiner": "none"}}, "user_tower": own("positions"),
    }  # fmt: skip
    plan_run(plan(cold, tmp_path, model))


def test_a_layer_that_fails_in_the_step_is_told_with_its_line(
    tiny_version: Path, tmp_path: Path
) -> None:
    model = {"name": "dssm", "embedding_dim": 4, "user_tower": own("late")}
    with pytest.raises(OwnCodeError, match=r"(?s)own_towers\.py:\d+.*not these"):
        fit_run(plan(tiny_version, tmp_path, model), NoProgress())


def test_a_side_has_one_tower() -> None:
    with pytest.raises(ValidationError, match="in the place of the layers of user_hidden_units"):
        DSSMConfig(user_tower=own("mean"), user_hidden_units=(8,))
    with pytest.raises(ValidationError, match="output_dim: Sluice sets it"):
        DSSMConfig(user_tower=own("mean", output_dim=3))


def test_the_tower_of_the_guide_trains_and_is_evaluated_where_its_module_is(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GUIDE.read_text("utf-8").split("## A tower")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [model] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "towers.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "towers", raising=False)
    run = fit_run(
        plan(tiny_version, tmp_path / "runs", yaml.safe_load(model)["model"]), NoProgress()
    )
    assert evaluate_split(load_run(run), "test")["rows"] == 60
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "towers")
    with pytest.raises(ConfigError, match=r"(?s)user_tower cannot be imported.*PYTHONPATH"):
        load_run(run)


def test_index_and_server_give_the_lists_of_own_towers_without_their_module(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {
        "name": "dssm", "embedding_dim": 4, "normalize": False, "embedding_stddev": 1.0,
        "user_features": ["history"], "pooling": {"history": {"combiner": "none"}},
        "user_tower": own("positions"), "item_tower": own("mean"),
    }  # fmt: skip
    run = fit_run(plan(tiny_version, tmp_path / "runs", model), NoProgress())
    trained = load_run(run)
    file = tmp_path / "lists.json.gz"
    write_lists(trained, file, 6)
    version = write_export(trained, ExportOptions(tmp_path / "models", index=IndexOptions()))
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        expected = {row["user"]: row for row in map(json.loads, lines)}
    monkeypatch.delitem(sys.modules, "own_towers")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    news = tmp_path / "news.csv"
    news.write_text("movie_id,genres\n900,genre_1\n901,genre_1|genre_all\n")
    for new in (False, True):
        if new:
            assert add_items(version, news)[1] == 2
        app = build_app(Server(ServerConfig(tmp_path / "models", 60.0)))
        with TestClient(app, "http://localhost") as client:
            for user, row in list(expected.items())[:20]:
                asked = {"user": user, "k": 8 if new else 6}
                items = client.post("/v1/recommend", json=asked).json()["items"]
                found = {one["item"]: one["retrieval_score"] for one in items}
                kept = [item for item in found if item < 900][:6]
                assert kept == row["items"][: len(kept)]
                assert len(kept) >= 6
                scores = [found[item] for item in kept]
                np.testing.assert_allclose(scores, row["scores"], rtol=1e-5)
    assert "own_towers" not in sys.modules
