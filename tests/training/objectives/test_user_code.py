"""User networks, towers and losses: what they are given, what is refused, what a run does."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml

from conf.errors import ConfigError, ExitCode, OwnCodeError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig, MFConfig, RankingConfig, SASRecConfig, YouTubeDNNConfig
from conf.training.train import DevicesConfig, TrainConfig
from training.checkpoint.restore import load_run
from training.distribution.strategy import build_strategy
from training.evaluation.evaluate import evaluate_split
from training.fit import fit_run
from training.input.batches import Batch, build_eval_dataset
from training.loop.parts import build
from training.loop.plan import read_plan
from training.models.registry import build_model
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_history
from training.networks.network import StepContext
from training.objectives.objective import build_objective, list_state
from training.objectives.trial import read_first_batch, try_user_code
from training.objectives.user_items import TrainRows
from training.refit import fit_chosen

SOURCE = """
import keras
import tensorflow as tf

def cross_entropy(labels, logits):
    labels = tf.cast(tf.reshape(labels, tf.shape(logits)), logits.dtype)
    return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)

def focal(labels, logits, gamma=2.0):
    labels = tf.cast(labels, tf.float32)
    right = tf.sigmoid(tf.where(labels > 0.5, logits, -logits))
    return (1.0 - right) ** gamma * cross_entropy(labels, logits)

def bpr(positives, negatives, counted):
    weights = tf.cast(counted, tf.float32)
    each = weights * tf.nn.softplus(negatives - positives[:, None])
    return tf.math.divide_no_nan(tf.reduce_sum(each, 1), tf.reduce_sum(weights, 1))

def softmax(positives, negatives, counted):
    others = tf.where(counted, negatives, -1e9)
    return tf.reduce_logsumexp(tf.concat([positives[:, None], others], 1), 1) - positives

def mean(labels, logits):
    return tf.reduce_mean(cross_entropy(labels, logits))

def pairs(labels, logits):
    return logits[:, None] - logits

def rounded(labels, logits):
    return tf.round(logits)

def whole(labels, logits):
    return tf.cast(logits, tf.int32)

def broken(labels, logits):
    return tf.reshape(logits, [3, 5])

def leaving(labels, logits):
    raise SystemExit(0)

CALLS = []

def later(labels, logits):
    def count(values):
        CALLS.append(1)
        if len(CALLS) > 3:
            raise RuntimeError("not these")
        return values
    values = tf.numpy_function(count, [logits], tf.float32)
    return cross_entropy(labels, logits) * tf.ensure_shape(tf.stop_gradient(values), logits.shape)

def average(inputs, output_dim):
    joined = keras.layers.Average()([inputs[name] for name in inputs])
    return keras.layers.Dense(output_dim, use_bias=False, kernel_initializer="identity")(joined)

def projected(inputs, output_dim):
    joined = keras.layers.Concatenate()([inputs[name] for name in inputs])
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(output_dim)(joined))
    return keras.layers.Dropout(0.2)(hidden)

def positions(inputs):
    mask = keras.ops.cast(inputs["history_mask"], "float32")[..., None]
    return keras.ops.sum(inputs["history"] * mask, axis=1)

def keyed(inputs):
    return inputs["gender"]["no"]

def integers(inputs, output_dim):
    return keras.ops.round(average(inputs, output_dim))

def flipped(inputs, output_dim):
    return keras.ops.flip(average(inputs, output_dim), axis=0)

def shared(inputs, output_dim):
    return keras.ops.softmax(average(inputs, output_dim), axis=0)

class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scales = tf.Variable(tf.ones(shape[-1:]))
    def call(self, x):
        return x * self.scales

def untracked(inputs, output_dim):
    return Scaled()(average(inputs, output_dim))

class Python(keras.layers.Layer):
    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(lambda v: 0 * v, [x], x.dtype), x.shape)
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

def python(inputs, output_dim):
    return Python()(average(inputs, output_dim))

class Trained(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            raise ValueError("not in training")
        return x

def trained(inputs, output_dim):
    return Trained()(average(inputs, output_dim))

def squashed(inputs, how="dense"):
    score = keras.layers.Dense(1)(inputs["movie_id"])
    if how == "dense":
        return keras.layers.Dense(1, activation="sigmoid")(inputs["movie_id"])
    if how == "reshaped":
        return keras.ops.squeeze(keras.ops.sigmoid(score), 1)
    if how == "softmax":
        return keras.layers.Softmax()(keras.layers.Dense(2)(inputs["movie_id"]))[:, 1:]
    if how == "hidden":
        return keras.layers.Lambda(keras.ops.sigmoid, output_shape=(1,))(score)
    gate = keras.layers.Dense(1, activation="sigmoid")(inputs["user_id"])
    return keras.layers.Multiply()([gate, score])
"""
USERS = {
    "user_id": tf.constant([2, 3], tf.int64),
    "gender": tf.constant([2, 3], tf.int64),
    "history": tf.constant([[5, 6, 7], [8, 0, 0]], tf.int64),
}
GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"
OWN_MODULES = {"mine.py": SOURCE, "typo.py": "def build(inputs:\n"}
PASS = StepContext(tf.constant([1, 8]))
pytestmark = pytest.mark.usefixtures("in_own_folder")


def own(function: str, **params: Any) -> dict[str, Any]:
    return {"function": f"mine:{function}", "params": params}


def tower(user: str = "average") -> dict[str, Any]:
    return {"name": "dssm", "embedding_dim": 4, "user_tower": own(user)}


def ranking(loss: dict[str, Any] | None, network: str = "lr", **settings: Any) -> dict[str, Any]:
    tasks = {"label": {"objective": {"kind": "binary", "loss": loss}}}
    base = {"kind": "ranking", "network": network, "embedding_dim": 4, "tasks": tasks}
    return {**base, **settings}


def plan(version: Path, root: Path, model: Any, epochs: int = 1) -> TrainConfig:
    settings = {"dataset": str(version), "name": "own", "root": str(root)}
    fit = {"epochs": epochs}
    return TrainConfig.model_validate(
        {**settings, "model": model, "input": {"batch_size": 64}, "fit": fit}
    )


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    return next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 32)))


def compute(config: Any, version: Path, manifest: Manifest, batch: Batch) -> np.ndarray:
    model = build_model(config, manifest, 1)
    objective = build_objective(config, version, manifest, model, 32)
    return objective(model, batch, PASS).numpy()


def test_a_loss_of_labels_is_that_of_numpy(
    tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    where = (tiny_version, tiny_manifest, batch)
    plain, changed, focal = (
        RankingConfig.model_validate(ranking(loss))
        for loss in (None, own("cross_entropy"), own("focal", gamma=3.0))
    )
    np.testing.assert_allclose(compute(changed, *where), compute(plain, *where), rtol=1e-6)
    labels = batch["label"].numpy()
    logits = build_model(plain, tiny_manifest, 1).compute_logits(batch)["label"].numpy()
    right = 1 / (1 + np.exp(-np.where(labels > 0.5, logits, -logits)))
    expected = -((1 - right) ** 3) * np.log(right)
    np.testing.assert_allclose(compute(focal, *where), expected, rtol=1e-4)
    towers = MFConfig(objective={"kind": "binary", "loss": own("cross_entropy")})
    expected = compute(MFConfig(objective="binary"), *where)
    np.testing.assert_allclose(compute(towers, *where), expected, rtol=1e-5)


@pytest.mark.parametrize("model", [MFConfig, SASRecConfig])
@pytest.mark.parametrize(
    ("function", "objective"),
    [
        ("bpr", {"kind": "bpr", "negatives": {"count": 3}, "mask": "target"}),
        ("softmax", {"kind": "sampled_softmax"}),
        ("softmax", {"kind": "sampled_softmax", "negatives": {"source": "uniform", "count": 9}}),
    ],
)
def test_a_loss_of_items_gets_the_scores_of_the_built_in_one(
    model: Any, function: str, objective: dict[str, Any], tiny_version: Path,
    tiny_manifest: Manifest, batch: Batch,
) -> None:  # fmt: skip
    where = (tiny_version, tiny_manifest, batch)
    dropout = {"dropout": None} if model is not MFConfig else {}
    plain = model(embedding_dim=4, objective=objective, **dropout)
    changed = model(embedding_dim=4, objective={**objective, "loss": own(function)}, **dropout)
    expected = compute(plain, *where)
    assert expected.std() > 0
    np.testing.assert_allclose(compute(changed, *where), expected, rtol=1e-4, atol=1e-6)


def test_a_tower_makes_the_vectors_of_users(tiny_manifest: Manifest) -> None:
    config = DSSMConfig.model_validate(
        {**tower(), "user_features": ("user_id", "gender"), "normalize": False}
    )
    model = build_model(config, tiny_manifest, 1)
    rows = {name: table.rows.numpy() for name, table in model.tables.items()}
    expected = (rows["user_id"][[2, 3]] + rows["gender"][[2, 3]]) / 2
    np.testing.assert_allclose(model.embed_users(USERS), expected, rtol=1e-5)


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


PLACE = r"in \S*mine\.py:\d+"


@pytest.mark.parametrize(
    ("model", "error"),
    [
        # What raises speaks, with its file and line.
        (ranking(own("broken")), f"loss mine:broken fails.*{PLACE}"),
        (ranking(own("leaving")), f"SystemExit {PLACE}"),
        (ranking(own("focal", gama=1)), "unexpected keyword argument 'gama'"),
        (ranking(own("vocal")), "no attribute 'vocal'"),
        (ranking({"function": "absent:focal"}), "No module named 'absent'.*PYTHONPATH"),
        (ranking(None, "typo:build"), r"SyntaxError.*typo\.py, line 1"),
        (ranking(own("mean")), "mean does not give one value for each row"),
        (ranking(own("pairs")), "pairs does not give one value for each row"),
        (tower("keyed"), f"user tower mine:keyed cannot be built.*{PLACE}"),
        (tower("trained"), f"ValueError {PLACE}.*not in training"),
        # What raises nothing is refused.
        (ranking(own("rounded")), "no gradient"),
        (ranking(own("whole")), "no gradient"),
        (tower("integers"), "user tower mine:integers has no gradient"),
        (tower("flipped"), "other numbers beside other rows"),
        (tower("shared"), "other numbers beside other rows"),
        (tower("untracked"), r"variables that Keras does not know.*\(\d+,\)"),
        (tower("python"), "calls Python in each step"),
        *(
            (ranking(None, "mine:squashed", params={"how": how}), "applies the sigmoid itself")
            for how in ("dense", "reshaped", "softmax", "hidden")
        ),
    ],
)
def test_faults_are_said_before_anything_is_written(
    model: dict[str, Any], error: str, tiny_version: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, OwnCodeError), match="(?s)" + error) as caught:
        build(read_plan(plan(tiny_version, tmp_path / "runs", model)))
    assert caught.value.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "runs").exists()


def test_probabilities_may_be_learned_as_values_or_weigh_a_score(
    tiny_version: Path, tmp_path: Path
) -> None:
    as_value = {"label": {"objective": {"kind": "squared_error"}}}
    build(read_plan(plan(tiny_version, tmp_path, ranking(None, "mine:squashed", tasks=as_value))))
    gated = ranking(None, "mine:squashed", params={"how": "gated"})
    build(read_plan(plan(tiny_version, tmp_path, gated)))


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_trial_changes_no_bit(
    replicas: int, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    negatives = {"source": "adaptive", "count": 5}
    objective = {"kind": "bpr", "negatives": negatives, "loss": own("bpr")}
    config = DSSMConfig.model_validate({**tower("projected"), "objective": objective})
    config = config.model_copy(update={"embeddings": {}})
    train = TrainRows(tiny_version, tiny_manifest, 32)
    with build_strategy(DevicesConfig(cpu_replicas=replicas)).scope():
        model = build_model(config, tiny_manifest, 1)
        built = build_objective(config, tiny_version, tiny_manifest, model, 32)
        state = [*model.state_variables, *list_state(built)]

        def look() -> list[Any]:
            weights = [w for network in model.networks for w in network.keras_model.variables]
            values = [*model.named_variables.values(), *state, *(w.value for w in weights)]
            drawn = [np.random.get_state()[1].tobytes(), random.getstate()]
            return [*(v.numpy().tobytes() for v in values), *drawn]

        before = look()
        assert len(before) > 20
        try_user_code(config, model, built, state, train)
        assert look() == before


def test_the_trial_reads_rows_as_training_does(tiny_version: Path, tiny_manifest: Manifest) -> None:
    kept = InputConfig.model_validate({"filter": [{"feature": "label", "value": 1}]})
    rows = read_first_batch(TrainRows(tiny_version, tiny_manifest, 24, kept), ["label", "history"])
    assert rows["label"].numpy().tolist() == [1] * 24
    assert rows["history"].shape[0] == 24


@pytest.mark.parametrize(
    "settings",
    [
        {"devices": {"cpu_replicas": 2}},
        {"compute": {"mixed_precision": True}},
        {"model": {**tower("projected"), "embeddings": {
            "user_id": {"kind": "dynamic"}}}},
    ],
)  # fmt: skip
def test_user_code_is_tried_in_the_way_that_it_trains(
    settings: dict[str, Any], tiny_version: Path, tmp_path: Path
) -> None:
    plain = plan(tiny_version, tmp_path, tower("projected"))
    run = fit_run(
        TrainConfig.model_validate({**plain.model_dump(), **settings}), TrainingProgress()
    )
    assert np.isfinite(read_history(run)[0].loss)


def test_a_refit_goes_on_where_a_corrected_loss_had_failed(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"batch_size": 64, "validation": {"hash_of": "user_id", "share": 0.3}}
    fit = {"epochs": 2, "early_stopping": {"metric": "auc"}, "refit": True}
    config = plan(tiny_version, tmp_path, ranking(own("later"))).model_dump()
    config = TrainConfig.model_validate({**config, "input": rows, "fit": fit})
    with pytest.raises(OwnCodeError, match="not these"):
        fit_chosen(config, TrainingProgress())
    mine = sys.modules["mine"]
    monkeypatch.setattr(mine, "later", mine.cross_entropy)
    run = fit_chosen(config, TrainingProgress(), resume=True)
    [trial] = json.loads((run / "run_card.json").read_text())["refit"]["trials"]
    assert trial["value"] is not None


def test_a_run_keeps_the_name_of_its_loss_and_needs_the_module_to_train_on(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"name": "mf", "embedding_dim": 4, "objective": {"kind": "bpr", "loss": own("bpr")}}
    run = fit_run(plan(tiny_version, tmp_path, model), TrainingProgress())
    longer = plan(tiny_version, tmp_path, model, epochs=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine")
    trained = load_run(run)  # Scores need no loss.
    assert trained.config.model.objective.loss.function == "mine:bpr"
    assert evaluate_split(trained, "test")["rows"] == 60
    with pytest.raises(OwnCodeError, match=r"(?s)cannot be imported.*PYTHONPATH"):
        fit_run(longer, TrainingProgress(), resume=True)


@pytest.mark.parametrize(
    ("title", "module", "number"),
    [("A loss", "losses", 0), ("A loss", "losses", 1), ("A tower", "towers", 0)],
)
def test_the_examples_of_the_guide_train(
    title: str, module: str, number: int, tiny_version: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    section = GUIDE.read_text("utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[number])["model"]
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    history = read_history(
        fit_run(plan(tiny_version, tmp_path / "runs", model, epochs=3), TrainingProgress())
    )
    assert history[-1].loss < history[0].loss


TEXT = """Graph execution error:

Detected at node MatMul defined at (most recent call last):
  File "/usr/local/bin/sluice", line 8, in <module>

  File "{sluice}training/loop/step.py", line 90, in _compute
{last}
OOM when allocating tensor
"""
