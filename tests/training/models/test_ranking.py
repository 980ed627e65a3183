"""Ranking models: built-in networks on a dataset, networks of one's own, bad input."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError, ExitCode, InputDataError, OwnCodeError, TrainingDivergedError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.models import DSSMConfig, RankingConfig
from conf.training.train import TrainConfig
from tests.training import tiny_dataset
from tests.training.loop.test_trainer import Messages
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import load_run
from training.evaluation.evaluate import evaluate_split
from training.fit import fit_run
from training.input.batches import Batch, build_eval_dataset
from training.loop import parts
from training.loop.plan import read_plan
from training.models.ranking import RankingModel, find_base_scores, plan_tasks
from training.models.registry import build_model
from training.monitoring.progress import NoProgress
from training.networks.network import StepContext
from training.networks.registry import NETWORKS
from training.objectives.objective import TaskLosses, Weighted

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


@pytest.mark.parametrize("network", NETWORKS)
def test_saves_and_loads(
    network: str, tiny_manifest: Manifest, batch: Batch, tmp_path: Path
) -> None:
    model, other = build(tiny_manifest, network), build(tiny_manifest, network, seed=2)
    for variable in model.named_variables.values():
        variable.assign_add(tf.random.stateless_uniform(variable.shape, [3, 4]))
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    assert not np.array_equal(score(other, batch), score(model, batch))
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(score(other, batch), score(model, batch))


def test_first_weights_depend_on_the_seed_alone(tiny_manifest: Manifest, batch: Batch) -> None:
    first, same, other = (score(build(tiny_manifest, "din", seed), batch) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_history_and_target_are_the_datasets_unless_named(tiny_manifest: Manifest) -> None:
    model = build(tiny_manifest, "din")
    assert model.network.input_names == (
        "user_id", "gender", "history", "history_mask", "movie_id", "genres"
    )  # fmt: skip
    renamed = build(tiny_manifest, "din", params={"history": "genres", "target": "gender"})
    assert "genres_mask" in renamed.network.input_names
    assert "history_mask" not in renamed.network.input_names
    joined = {"history": ["history", "history"], "target": ["movie_id", "movie_id"], **SMALL}
    positions = build(tiny_manifest, "bst", params=joined).network.weights
    assert positions["add_positions/positions"].shape == (9, 8)  # The target's and 8 of two items.


@pytest.mark.parametrize("network", ["dcn", "final_net", "shared_bottom", "mmoe"])
def test_biases_that_no_network_reads_are_refused(network: str, tiny_manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"reads no weights of ids[\s\S]*deepfm"):
        build(tiny_manifest, network, biases=True)
    assert not any(name.endswith("_bias") for name in build(tiny_manifest, network).tables)
    assert any(n.endswith("_bias") for n in build(tiny_manifest, "lr", biases=True).tables)


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


def test_rows_with_weights_start_at_the_rate_by_weight_and_say_where_it_is_not_known(
    tiny_manifest: Manifest,
) -> None:
    keys = replace(tiny_manifest.keys, weight="weight")
    found = {"mean": 0.75, "weighted_mean": 0.25}
    manifest = replace(tiny_manifest, keys=keys, statistics={"train": {"label": found}})
    tasks = plan_tasks(configure("lr"), manifest)
    np.testing.assert_allclose(find_base_scores(tasks, manifest)["label"], -np.log(3.0))
    assert not any("without weights" in note for note in build(manifest, "lr").notes)
    old = replace(manifest, statistics={"train": {"label": {"mean": 0.75}}})
    np.testing.assert_allclose(find_base_scores(tasks, old)["label"], np.log(3.0))
    assert any("mean of label by the rows' weights" in note for note in build(old, "lr").notes)


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
        ("din", {"params": {"softmaxed": True}}, "unexpected keyword argument 'softmaxed'"),
        ("din", {"params": {"activation": "dise"}}, "cannot be built.*dise"),
        ("bst", {"params": {"pooling": "max"}}, "concat, target, mean"),
        ("bst", {"params": {"gaps": "genres"}}, "max_len"),
        ("final_net", {"params": {"second_units": [4, 3]}}, "network final_net cannot be built"),
        ("deepfm", {"tasks": TWO}, "shared_bottom or mmoe"),
        ("lr", {"pooling": {"genres": {"combiner": "max"}}}, "sums the weights"),
        ("fm", {"pooling": {"genres": {"softmax": True}}}, "softmax: true without `weights`"),
        ("fm", {"pooling": {"genres": {"ids": "history"}}}, "genres holds ids"),
        ("mf", {"features": ["user_id", "movie_id", "gender"]}, "it ignores gender"),
    ],
)
def test_what_a_built_in_network_cannot_do_is_said(
    network: str, settings: dict[str, Any], error: str, tiny_manifest: Manifest
) -> None:
    with pytest.raises((ConfigError, OwnCodeError), match="(?s)" + error):
        build(tiny_manifest, network, **settings)


def test_a_network_without_its_keys_asks_for_them(tiny_manifest: Manifest) -> None:
    keys = replace(tiny_manifest.keys, history=None, user=None)
    manifest = replace(tiny_manifest, keys=keys)
    build(manifest, "din")  # The only list of items is the history, whatever its name.
    second = replace(manifest.schema["history"], name="bought")
    two = FeatureSchema((*manifest.schema.features, second))
    with pytest.raises(ConfigError, match=r"set model\.params\.history"):
        build(replace(manifest, schema=two), "din")
    with pytest.raises(ConfigError, match=r"set model\.params\.user"):
        build(manifest, "mf")


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

def needs(inputs, units):
    return keras.layers.Dense(1)(inputs["movie_id"])

def alone(inputs):
    return keras.layers.Dense(1)(keras.Input((3,), name="mine"))

def whole(inputs):
    return keras.ops.cast(good(inputs), "int32")

class Late(keras.layers.Layer):
    def call(self, x):
        return x if x.shape[0] == 16 else x * float("nan")

def diverges(inputs):
    return Late()(good(inputs))
"""
OWN_MODULES = {
    "own_nets.py": NETS,
    "own_typo.py": "def build(inputs:\n",
    "own_broken.py": "import keras\n\nkeras.layers.Densest(1)\n",
}


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
        ("own_nets:good", {"params": {"units": "many"}}, r"own_nets\.py:6"),
        ("own_nets:needs", {}, "missing 1 required positional argument: 'units'"),
        ("own_nets:alone", {}, "mine"),
        ("own_nets:good", {"features": ["user_id", "movie_id", "gender"]}, "it ignores gender"),
        ("own_nets:whole", {}, "network own_nets:whole has no gradient"),
        ("own_nets:god", {}, "no attribute 'god'"),
        ("own_net:good", {}, "No module named 'own_net'.*PYTHONPATH"),
        ("own_broken:build", {}, r"AttributeError in \S*own_broken\.py:3"),
        ("own_typo:build", {}, "SyntaxError"),
        ("training:build", {}, "Sluice's own"),
    ],
)
def test_faults_of_a_network_of_ones_own_are_said_before_anything_is_written(
    network: str, settings: dict[str, Any], error: str, in_own_folder: Path, tiny_version: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    config = plan(tiny_version, tmp_path / "runs", network=network, **settings)
    for run in (
        lambda config: parts.build(read_plan(config)),
        lambda config: fit_run(config, NoProgress()),
    ):
        with pytest.raises((ConfigError, OwnCodeError), match="(?s)" + error):
            run(config)
    assert not (tmp_path / "runs").exists()
    assert str(in_own_folder) not in sys.path


def test_params_that_sluice_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="tasks: Sluice sets it"):
        configure("own_nets:two", params={"tasks": ["label"]})


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
    with pytest.raises(OwnCodeError, match="cannot be imported") as caught:
        load_run(run)
    assert "PYTHONPATH" in caught.value.render()
    assert str(in_own_folder) not in sys.path


def test_a_network_that_gives_no_number_ends_as_diverged(
    in_own_folder: Path, tiny_version: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingDivergedError) as caught:
        fit_run(plan(tiny_version, tmp_path, network="own_nets:diverges"), NoProgress())
    assert caught.value.exit_code == ExitCode.DIVERGED == 5


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], Path]:
    """Writes a small version whose labels are all of one value, or those of the users' ids."""
    original = tiny_dataset._row

    def write(label: float | None) -> Path:
        def row(*args: Any, **options: Any) -> dict[str, Any]:
            made = original(*args, **options)
            return {**made, "label": float(made["user_id"] % 3) if label is None else label}

        monkeypatch.setattr(tiny_dataset, "_row", row)
        return write_tiny_dataset(tmp_path / "datasets", config=TinyConfig(users=12))

    return write


def test_labels_of_a_binary_task_are_0_or_1(
    write: Callable[[float | None], Path], tmp_path: Path
) -> None:
    version = write(None)
    with pytest.raises(InputDataError, match=r"(?s)label 'label'.*2\.0.*0 or 1") as caught:
        fit_run(plan(version, tmp_path / "runs", network="lr"), NoProgress())
    assert caught.value.exit_code == ExitCode.INPUT_REFUSED
    rating = {"label": {"objective": "squared_error"}}
    run = fit_run(plan(version, tmp_path / "runs", network="mf", tasks=rating), NoProgress())
    found = evaluate_split(load_run(run), "test")["tasks"]["label"]
    assert 0 < found["rmse"] < 3


def test_labels_of_one_class_train_and_have_no_auc(
    write: Callable[[float | None], Path], tmp_path: Path
) -> None:
    version = write(1.0)
    with pytest.raises(ConfigError, match=r"(?s)auc.*one class.*log_loss"):
        fit_run(plan(version, tmp_path / "runs", network="lr"), NoProgress())
    config = plan(version, tmp_path / "runs", network="lr").model_copy(
        update={"fit": plan(version, tmp_path).fit.model_copy(update={"early_stopping": None})}
    )
    found = evaluate_split(load_run(fit_run(config, NoProgress())), "test")["tasks"]["label"]
    assert found["auc"] is None
    assert found["log_loss"] < 1


def change(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    specs = [replace(s, **changes) if s.name == name else s for s in manifest.schema.features]
    return replace(manifest, schema=FeatureSchema(tuple(specs)))


def add(manifest: Manifest, spec: FeatureSpec) -> Manifest:
    return replace(manifest, schema=FeatureSchema((*manifest.schema.features, spec)))


def test_labels_that_are_no_numbers_are_refused(tiny_manifest: Manifest) -> None:
    texts = change(tiny_manifest, "label", dtype="bytes")
    with pytest.raises(ConfigError, match=r"(?s)label: bytes.*map the label"):
        build(texts, "lr")
    with pytest.raises(ConfigError, match=r"(?s)learns from a label.*clicked.*label"):
        build(tiny_manifest, "lr", tasks={"clicked": {}})


def test_a_feature_that_no_network_can_read_is_named(tiny_manifest: Manifest) -> None:
    manifest = add(tiny_manifest, FeatureSpec("title", "bytes", "item"))
    with pytest.raises(ConfigError, match=r"(?s)cannot read feature 'title'.*vocabulary"):
        build(manifest, "lr")
    names = ["user_id", "movie_id"]
    assert build(manifest, "lr", features=names).inputs == tuple(names)


def test_keys_are_not_read_as_numbers(tiny_manifest: Manifest) -> None:
    bare = {"vocabulary_size": None, "shared_embedding": None}
    keyed = change(tiny_manifest, "movie_id", encoding="hash:movie_id", **bare)
    with pytest.raises(ConfigError, match=r"(?s)movie_id.*keys of 64 bits.*movie_id.kind=dynamic"):
        build(keyed, "deepfm")
    plain = change(tiny_manifest, "user_id", encoding="identity", **bare)
    with pytest.raises(ConfigError, match=r"(?s)user_id.*keys of 64 bits"):
        build(plain, "deepfm")
    both = change(keyed, "user_id", encoding="hash:user_id", **bare)
    title = add(both, FeatureSpec("title", "bytes", "item"))
    with pytest.raises(ConfigError, match=r"user_id \(hash:user_id\), movie_id") as caught:
        build(title, "deepfm")
    advice = str(caught.value.fix)
    for table in ("user_id", "movie_id"):
        assert f"--set model.embeddings.{table}.kind=dynamic" in advice
    [others] = re.findall(r"--set 'model\.features=\[(.*)\]'", advice)
    assert not {"user_id", "movie_id", "title", "label"} & set(others.split(", "))
    assert set(build(title, "deepfm", features=others.split(", ")).inputs) == set(
        others.split(", ")
    )
    with pytest.raises(ConfigError, match=r"or leave them out of model\.features"):
        build(keyed, "deepfm", features=["gender", "movie_id"])
    with pytest.raises(ConfigError, match=r"'model\.user_features=\[gender, history\]'"):
        build_model(DSSMConfig(), both, 1)
    dynamic = {"movie_id": {"kind": "dynamic"}}
    features = ["user_id", "movie_id"]
    assert "movie_id" in build(keyed, "deepfm", embeddings=dynamic, features=features).tables


def test_a_vocabulary_of_one_token_is_read(tiny_manifest: Manifest, batch: Batch) -> None:
    manifest = change(tiny_manifest, "gender", vocabulary_size=3)
    model = build(manifest, "fm")
    known = {**batch, "gender": tf.fill([8], tf.constant(2, tf.int64))}
    assert np.isfinite(score(model, known)).all()
    assert model.tables["gender"].vocabulary_size == 3


def test_rows_and_positions_of_weight_zero_count_nothing(
    tiny_manifest: Manifest, batch: Batch
) -> None:
    weights = FeatureSpec("genre_weights", "float32", "item", (None,), 4)
    model = build(
        add(tiny_manifest, weights), "deepfm",
        pooling={"genres": {"combiner": "mean", "weights": "genre_weights"}},
    )  # fmt: skip
    rows = {**batch, "genre_weights": tf.zeros(tf.shape(batch["genres"])), "w": tf.zeros([8])}
    others = tf.where(batch["genres"] > 0, tf.constant(2, tf.int64), batch["genres"])
    np.testing.assert_array_equal(score(model, rows), score(model, {**rows, "genres": others}))
    objective = Weighted(TaskLosses(model.tasks), "w")
    with tf.GradientTape() as tape:
        losses = objective(model, rows, StepContext(tf.constant([1, 2])))
    np.testing.assert_array_equal(losses, np.zeros(8))
    gradients = [g for g in tape.gradient(losses, model.dense_variables) if g is not None]
    assert gradients
    assert not any(np.asarray(gradient).any() for gradient in gradients)
