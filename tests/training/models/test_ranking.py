"""Ranking models: built-in networks on a dataset, networks of one's own, bad input."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pydantic import ValidationError

from conf.errors import ConfigError, ExitCode, InputDataError, OwnCodeError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.models import RankingConfig
from conf.training.train import TrainConfig
from tests.training import tiny_dataset
from tests.training.loop.test_trainer import Messages
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import load_run
from training.evaluation.evaluate import evaluate_split
from training.fit import fit_run
from training.input.batches import Batch, build_eval_dataset
from training.models.ranking import RankingModel, find_base_scores, plan_tasks
from training.models.registry import build_model
from training.monitoring.progress import TrainingProgress
from training.networks.registry import NETWORKS

SMALL = {"hidden_units": [4]}
TWO = {"click": {"label": "label"}, "like": {"label": "label", "weight": 0.5}}
CONFIGS: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"params": {"dropout": 0.1}},
    "wide_deep": {"params": SMALL},
    "deepfm": {"params": SMALL},
    "dcn": {"params": {"cross_layers": 1, "projection_dim": 2, **SMALL}},
    "final_net": {"params": {"second_units": [2], **SMALL}},
    "din": {"params": {"attention_units": [3], **SMALL}},
    "bst": {"params": {"heads": 2, **SMALL}},
    "mf": {},
    "shared_bottom": {"params": SMALL, "tasks": TWO},
    "mmoe": {"params": {"experts": 2, **SMALL}, "tasks": TWO},
}


def configure(network: str, **settings: Any) -> RankingConfig:
    own = {**CONFIGS.get(network, {}), **settings}
    data = {"kind": "ranking", "network": network, "embedding_dim": 4, **own}
    return RankingConfig.model_validate(data)


def build(manifest: Manifest, network: str, seed: int = 1, **settings: Any) -> RankingModel:
    model = build_model(configure(network, **settings), manifest, seed)
    assert isinstance(model, RankingModel)
    return model


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    """Eight rows with the longest histories, one of them without any and without genres."""
    rows = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "test", 8)))
    empty = tf.constant([[1]] * 7 + [[0]], tf.int64)
    lists = {name: rows[name] * empty for name in ("history", "genres")}
    return {**rows, **lists}


def score(model: RankingModel, batch: Batch) -> np.ndarray:
    return np.stack(list(model.compute_logits(batch).values()))


@pytest.mark.parametrize("network", NETWORKS)
def test_what_padding_reads_changes_nothing(
    network: str, tiny_manifest: Manifest, batch: Batch
) -> None:
    model = build(tiny_manifest, network)
    expected = score(model, batch)
    assert np.isfinite(expected).all()  # The row that is all padding too.
    for table in model.tables.values():
        table.rows[0].assign(tf.fill([table.dim], float("nan")))
    np.testing.assert_array_equal(score(model, batch), expected)
    wide = {name: tf.pad(batch[name], [[0, 0], [0, 5]]) for name in ("history", "genres")}
    np.testing.assert_allclose(score(model, {**batch, **wide}), expected, rtol=1e-5, atol=1e-6)


def test_factorization_reads_user_and_item_alone_and_starts_at_the_mean(
    tiny_manifest: Manifest, batch: Batch
) -> None:
    rating = {"rating": {"label": "label", "objective": "squared_error"}}
    statistics = {"train": {"label": {"mean": 0.75}}}
    manifest = replace(tiny_manifest, statistics=statistics)
    model = build(manifest, "mf", tasks=rating, embedding_stddev=1e-6)
    assert model.inputs == ("user_id", "movie_id")
    assert model.left_out == ("gender", "history", "genres")
    assert model.describe_inputs()["left_out"] == list(model.left_out)
    assert "gender, history, genres" in model.notes[0]
    assert set(model.tables) == {"user_id", "movie_id", "user_id_bias", "movie_id_bias"}
    np.testing.assert_allclose(score(model, batch), 0.75, atol=1e-6)
    plain = build(manifest, "mf", tasks=rating, biases=False)
    assert set(plain.tables) == {"user_id", "movie_id"}
    assert not plain.network.weights
    vectors = [plain.tables[n].lookup(batch[n]).numpy() for n in ("user_id", "movie_id")]
    np.testing.assert_allclose(score(plain, batch), [(vectors[0] * vectors[1]).sum(1)], 1e-5)
    binary = plan_tasks(configure("mf"), manifest)
    np.testing.assert_allclose(find_base_scores(binary, manifest)["label"], np.log(3.0))
    rate = tiny_manifest.label_rate["train"]
    assert find_base_scores(binary, tiny_manifest)["label"] == pytest.approx(
        np.log(rate / (1 - rate))
    )


def test_rows_with_weights_start_at_the_rate_by_weight(tiny_manifest: Manifest) -> None:
    keys = replace(tiny_manifest.keys, weight="weight")
    found = {"mean": 0.75, "weighted_mean": 0.25}
    manifest = replace(tiny_manifest, keys=keys, statistics={"train": {"label": found}})
    tasks = plan_tasks(configure("lr"), manifest)
    np.testing.assert_allclose(find_base_scores(tasks, manifest)["label"], -np.log(3.0))


@pytest.mark.parametrize("network", NETWORKS)
def test_built_in_networks_start_at_the_rate_of_the_label(
    network: str, tiny_manifest: Manifest, batch: Batch
) -> None:
    manifest = replace(tiny_manifest, statistics={"train": {"label": {"mean": 0.01}}})
    model = build(manifest, network, embedding_stddev=1e-6)
    numbers = [v.numpy() for v in model.network.weights.values() if v.shape == (1,)]
    starts = [value for value in numbers if np.isclose(value, np.log(0.01 / 0.99))]
    assert len(starts) == len(model.tasks) * (2 if network == "final_net" else 1)  # Two blocks.
    if network != "bst":  # Its positions start away from zero.
        np.testing.assert_allclose(score(model, batch), np.log(0.01 / 0.99), atol=1e-3)


@pytest.mark.parametrize(
    ("network", "settings", "error"),
    [
        ("deepmf", {}, "did you mean 'deepfm'"),
        ("din", {"params": {"history": "movie_id"}}, "positions of a list"),
        ("din", {"params": {"history": "histroy"}}, "did you mean 'history'"),
        ("din", {"params": {"target": ["movie_id", "gender"]}}, "vectors of one length"),
        ("din", {"features": ["user_id", "movie_id"]}, "input that the model does not have"),
        ("din", {"pooling": {"history": {"combiner": "sum"}}}, "leave the combiner out"),
        ("din", {"params": {"activation": "dise"}}, "cannot be built.*dise"),
        ("bst", {"params": {"pooling": "max"}}, "concat, target, mean"),
        ("bst", {"params": {"gaps": "genres"}}, "max_len"),
        ("final_net", {"params": {"second_units": [4, 3]}}, "network final_net cannot be built"),
        ("deepfm", {"tasks": TWO}, "shared_bottom or mmoe"),
        ("dcn", {"biases": True}, "reads no weights of ids"),
        ("lr", {"pooling": {"genres": {"combiner": "max"}}}, "leave the combiner out"),
        ("mf", {"features": ["user_id", "movie_id", "gender"]}, "it ignores gender"),
    ],
)
def test_what_a_built_in_network_cannot_do_is_said(
    network: str, settings: dict[str, Any], error: str, tiny_manifest: Manifest
) -> None:
    with pytest.raises((ConfigError, OwnCodeError), match="(?s)" + error):
        build(tiny_manifest, network, **settings)


NETS = """
import keras

def good(inputs, units=4):
    joined = keras.layers.Concatenate()([inputs["user_id"], inputs["movie_id"]])
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(units)(joined))
    return keras.layers.Dense(1)(keras.layers.Dropout(0.1)(hidden))

def misspelt(inputs):
    return keras.layers.Dense(1)(inputs["movie_ids"])

def wide(inputs):
    return keras.layers.Dense(2)(inputs["movie_id"])

def number(inputs):
    return 3.5

def broken(inputs):
    table = {}
    return table["nothing"]

def two(inputs, tasks):
    return {task: keras.layers.Dense(1)(inputs["movie_id"]) for task in (*tasks, "extra")}

def alone(inputs):
    return keras.layers.Dense(1)(keras.Input((3,), name="mine"))
"""
OWN_MODULES = {"own_nets.py": NETS}


def plan(version: Path, root: Path, **model: Any) -> TrainConfig:
    """Returns the config of a short run."""
    settings = {
        "dataset": str(version),
        "name": "own",
        "root": str(root),
        "model": {"kind": "ranking", "embedding_dim": 4, **model},
        "input": {"batch_size": 64},
        "fit": {"epochs": 1},
    }
    return TrainConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("network", "settings", "error"),
    [
        ("own_nets:misspelt", {}, "movie_ids.*did you mean 'movie_id'"),
        ("own_nets:wide", {}, r"shape \(None, 2\).*Dense\(1\)"),
        ("own_nets:number", {}, "float of shape None"),
        ("own_nets:broken", {}, r"KeyError in \S*own_nets\.py:20: 'nothing'"),
        ("own_nets:two", {}, "label, extra.*label"),
        ("own_nets:good", {"tasks": TWO}, "one output.*click, like"),
        ("own_nets:good", {"params": {"unit": 3}}, "unexpected keyword argument 'unit'"),
        ("own_nets:two", {"params": {"tasks": ["label"]}}, "tasks: Sluice sets it"),
        ("own_nets:alone", {}, "mine"),
        ("own_nets:good", {"features": ["user_id", "movie_id", "gender"]}, "it ignores gender"),
    ],
)
def test_faults_of_a_network_of_ones_own_are_said(
    network: str, settings: dict[str, Any], error: str, in_own_folder: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises((ConfigError, OwnCodeError, ValidationError), match="(?s)" + error):
        build(tiny_manifest, network, **settings)
    assert str(in_own_folder) not in sys.path


def test_a_network_of_ones_own_trains_and_is_evaluated_where_its_module_is(
    in_own_folder: Path, tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = Messages()
    run = fit_run(plan(tiny_version, tmp_path, network="own_nets:good"), messages)
    assert any("does not read gender, history, genres" in text for text in messages.texts)
    metrics = evaluate_split(load_run(run), "test")
    assert metrics["tasks"]["label"]["rows"] == 60
    monkeypatch.chdir(tmp_path)  # As another process does that was started elsewhere.
    monkeypatch.delitem(sys.modules, "own_nets")
    with pytest.raises((ConfigError, OwnCodeError), match="cannot be imported") as caught:
        load_run(run)
    assert "PYTHONPATH" in caught.value.render()
    assert str(in_own_folder) not in sys.path


def test_labels_of_a_binary_task_are_0_or_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny_dataset._row

    def row(*args: Any, **options: Any) -> dict[str, Any]:
        made = original(*args, **options)
        return {**made, "label": float(made["user_id"] % 3)}

    monkeypatch.setattr(tiny_dataset, "_row", row)
    version = write_tiny_dataset(tmp_path / "datasets", config=TinyConfig(users=12))
    with pytest.raises(InputDataError, match=r"(?s)label 'label'.*2\.0.*0 or 1") as caught:
        fit_run(plan(version, tmp_path / "runs", network="lr"), TrainingProgress())
    assert caught.value.exit_code == ExitCode.INPUT_REFUSED
    rating = {"label": {"objective": "squared_error"}}
    run = fit_run(plan(version, tmp_path / "runs", network="mf", tasks=rating), TrainingProgress())
    found = evaluate_split(load_run(run), "test")["tasks"]["label"]
    assert 0 < found["rmse"] < 3


def change(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    specs = [replace(s, **changes) if s.name == name else s for s in manifest.schema.features]
    return replace(manifest, schema=FeatureSchema(tuple(specs)))


def test_keys_are_not_read_as_numbers(tiny_manifest: Manifest) -> None:
    bare = {"vocabulary_size": None, "shared_embedding": None}
    keyed = change(tiny_manifest, "movie_id", encoding="hash:movie_id", **bare)
    plain = change(tiny_manifest, "user_id", encoding="identity", **bare)
    for name, manifest in (("movie_id", keyed), ("user_id", plain)):
        with pytest.raises(ConfigError, match=f"(?s){name}.*keys of 64 bits.*{name}.kind=dynamic"):
            build(manifest, "deepfm")
    dynamic, features = {"movie_id": {"kind": "dynamic"}}, ["user_id", "movie_id"]
    assert "movie_id" in build(keyed, "deepfm", embeddings=dynamic, features=features).tables
