"""Losses of one's own: what they are given, what is refused before training, what a run keeps."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml

from conf.errors import (
    ConfigError,
    ExitCode,
    InputDataError,
    OwnCodeError,
    TooFewRowsError,
)
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.input import FilterConfig
from conf.training.models import DSSMConfig, MFConfig, RankingConfig, SASRecConfig
from conf.training.tables import DynamicTableConfig
from conf.training.train import TrainConfig
from tests.training import tiny_dataset
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.restore import load_run
from training.embedding.key_mapping import map_keys, plan_keyed_features
from training.evaluation.evaluate import evaluate_split
from training.fit import fit_run, plan_run
from training.input.batches import Batch, build_eval_dataset
from training.models.registry import build_model
from training.monitoring.progress import NoProgress
from training.monitoring.run_logs import read_history
from training.networks.network import TrainingPass
from training.objectives.objective import build_objective
from training.objectives.own_loss import build_label_loss
from training.objectives.tried_rows import read_tried_rows
from training.objectives.user_items import TrainRows
from training.refit import fit_chosen

LOSSES = """
import tensorflow as tf

def cross_entropy(labels, logits):
    labels = tf.cast(tf.reshape(labels, tf.shape(logits)), logits.dtype)
    return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)

def focal(labels, logits, gamma=2.0):
    labels = tf.cast(labels, tf.float32)
    right = tf.sigmoid(tf.where(labels > 0.5, logits, -logits))
    return (1.0 - right) ** gamma * cross_entropy(labels, logits)

def by_user(labels, logits, features):
    return tf.cast(features["user_id"], tf.float32) * cross_entropy(labels, logits)

def hinge(positives, negatives, counted, margin=1.0):
    each = tf.nn.relu(margin + negatives - positives[:, None])
    return tf.reduce_sum(tf.where(counted, each, 0.0), axis=1)

def bpr(positives, negatives, counted):
    weights = tf.cast(counted, tf.float32)
    each = weights * tf.nn.softplus(negatives - positives[:, None])
    return tf.math.divide_no_nan(tf.reduce_sum(each, 1), tf.reduce_sum(weights, 1))

def softmax(positives, negatives, counted):
    others = tf.where(counted, negatives, -1e9)
    return tf.reduce_logsumexp(tf.concat([positives[:, None], others], 1), 1) - positives

def of_ones(labels, logits):
    return cross_entropy(labels, logits) / labels

def mean(labels, logits):
    return tf.reduce_mean(cross_entropy(labels, logits))

def column(labels, logits):
    return cross_entropy(labels, logits)[:, None]

def pairs(labels, logits):
    return logits[:, None] - logits

def logarithm(labels, logits):
    return -tf.math.log(logits)

def round(labels, logits):
    return tf.round(logits)

def nothing(labels, logits):
    cross_entropy(labels, logits)

def broken(labels, logits):
    return tf.reshape(logits, [3, 5])

def unmoved(labels, logits):
    return tf.cast(labels, tf.float32) + 0.0 * logits

def of_positives(labels, logits):
    return tf.where(labels > 0.5, tf.nn.softplus(-logits), 0.0)

def whole(labels, logits):
    return tf.cast(logits, tf.int32)

def imaginary(labels, logits):
    return tf.cast(logits, tf.complex64)

def leaving(labels, logits):
    raise SystemExit(0)

# Each is right on the rows that it is tried on, and wrong on the 64 of a step.
def raising_later(labels, logits):
    if logits.shape[0] != 16:
        raise ValueError("not these")
    return cross_entropy(labels, logits)

def one_later(labels, logits):
    losses = cross_entropy(labels, logits)
    return losses if logits.shape[0] == 16 else losses[:1]

def hidden_later(labels, logits):
    losses = cross_entropy(labels, logits)
    return losses[: tf.where(tf.shape(logits)[0] > 16, 1, 16)]

def asserting_later(labels, logits):
    few = tf.debugging.assert_less(tf.shape(logits)[0], 20)
    with tf.control_dependencies([few]):
        return cross_entropy(labels, logits)

def python_later(labels, logits):
    def double(values):
        if len(values) > 16:
            raise RuntimeError("not these")
        return values
    values = tf.numpy_function(double, [logits], tf.float32)
    return cross_entropy(labels, logits) * tf.ensure_shape(tf.stop_gradient(values), logits.shape)

def one_item_later(positives, negatives, counted):
    losses = hinge(positives, negatives, counted)
    return losses[: tf.where(tf.shape(positives)[0] == 16, 16, 1)]

def best(positives, negatives, counted, k=2):
    others = tf.where(counted, negatives, -1e9)
    ahead = tf.math.top_k(others, k).values - positives[:, None]
    return tf.reduce_sum(tf.nn.softplus(ahead), 1)

def uncounted(positives, negatives, counted):
    weights = tf.cast(counted, tf.float32)
    each = weights * tf.nn.softplus(negatives - positives[:, None])
    return tf.reduce_sum(each, 1) / tf.reduce_sum(weights, 1)
"""
PASS = TrainingPass(tf.constant([1, 8]))
OWN_MODULES = {"own_losses.py": LOSSES}
pytestmark = pytest.mark.usefixtures("in_own_folder")


@pytest.fixture(scope="module")
def batch(tiny_version: Path, tiny_manifest: Manifest) -> Batch:
    return next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 32)))


def own(function: str, **settings: Any) -> dict[str, Any]:
    return {"function": f"own_losses:{function}", **settings}


def ranking(function: str | None, kind: str = "binary", **settings: Any) -> RankingConfig:
    objective = {"kind": kind, "loss": None if function is None else own(function, **settings)}
    tasks = {"label": {"objective": objective}}
    return RankingConfig(network="lr", embedding_dim=4, tasks=tasks)


def compute(config: Any, version: Path, manifest: Manifest, batch: Batch) -> np.ndarray:
    model = build_model(config, manifest, 1)
    objective = build_objective(config, version, manifest, model, 32)
    return objective(model, batch, PASS).numpy()


def test_a_loss_of_labels_is_that_of_numpy(
    tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    where = (tiny_version, tiny_manifest, batch)
    plain = compute(ranking(None), *where)
    np.testing.assert_allclose(compute(ranking("cross_entropy"), *where), plain, rtol=1e-6)
    labels = batch["label"].numpy()
    logits = build_model(ranking(None), tiny_manifest, 1).compute_logits(batch)["label"].numpy()
    right = 1 / (1 + np.exp(-np.where(labels > 0.5, logits, -logits)))
    found = compute(ranking("focal", params={"gamma": 3.0}), *where)
    np.testing.assert_allclose(found, -((1 - right) ** 3) * np.log(right), rtol=1e-4)
    found = compute(ranking("by_user", features=["user_id"]), *where)
    np.testing.assert_allclose(found, plain * batch["user_id"].numpy(), rtol=1e-5)


@pytest.mark.parametrize("model", [MFConfig, DSSMConfig, SASRecConfig])
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


def test_a_loss_of_the_label_of_two_towers(
    tiny_version: Path, tiny_manifest: Manifest, batch: Batch
) -> None:
    where = (tiny_version, tiny_manifest, batch)
    expected = compute(MFConfig(objective="binary"), *where)
    changed = MFConfig(objective={"kind": "binary", "loss": own("cross_entropy")})
    np.testing.assert_allclose(compute(changed, *where), expected, rtol=1e-5)


def test_a_loss_reads_keys_where_a_step_has_rows(
    tiny_manifest: Manifest,
) -> None:
    config = ranking("by_user", features=["user_id"]).model_copy(
        update={"embeddings": {"user_id": DynamicTableConfig()}}
    )
    model = build_model(config, tiny_manifest, 1)
    loss = build_label_loss(config.tasks["label"].objective.loss, "loss")
    keyed = plan_keyed_features(model.embedded_features, model.tables, loss.inputs)
    keys, ones = np.array([40, 7, 40, 13]), tf.ones([4])
    rows = {"user_id": tf.constant(keys), "label": ones}
    batches = map_keys(tf.data.Dataset.from_tensors(rows), keyed, 1, is_new_epoch=True)
    mapped = next(iter(batches))
    assert set(mapped["user_id"].numpy()) == {2, 3, 4}
    found = loss(ones, tf.zeros([4]), batch=mapped).numpy()
    np.testing.assert_allclose(found, keys * np.log(2.0), rtol=1e-6)


def plan(version: Path, root: Path, model: Any, epochs: int = 1) -> TrainConfig:
    settings = {"dataset": str(version), "name": "own", "root": str(root)}
    fit = {"epochs": epochs}
    return TrainConfig.model_validate(
        {**settings, "model": model, "input": {"batch_size": 64}, "fit": fit}
    )


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (own("mean"), r"shape \(\) of 16 rows.*leave out the mean"),
        (own("column"), r"shape \(16, 1\).*tf\.squeeze"),
        (own("pairs"), r"shape \(16, 16\)"),
        (own("nothing"), "received: nothing"),
        (own("logarithm"), "values that are no numbers"),
        (own("round"), "no gradient"),
        (own("broken"), r"fails on 16 rows.*own_losses\.py:\d+"),
        (own("unmoved"), "no gradient"),
        (own("whole"), "no floating-point numbers.*int32"),
        (own("imaginary"), "no floating-point numbers.*complex64"),
        (own("leaving"), r"fails on 16 rows.*SystemExit in \S*own_losses\.py:\d+"),
        (own("by_user"), "reads a feature.*user_id.*is empty"),
        (own("by_user", features=["gender"]), "received: user_id"),
        (own("by_user", features=["users_id"]), "does not have.*did you mean 'user_id'"),
        (own("focal", features=["user_id"]), "no parameter for the features"),
        (own("focal", params={"gama": 1}), "did you mean 'gamma'"),
        (own("vocal"), "did you mean 'focal'"),
        ({"function": "own_loss:focal"}, "No module named 'own_loss'.*PYTHONPATH"),
        ({"function": "training:focal"}, "Sluice's own"),
        ({"function": "math:hypot"}, "does not tell its parameters"),
    ],
)
def test_faults_of_a_loss_are_said_before_anything_is_written(
    settings: dict[str, Any], error: str, tiny_version: Path, tmp_path: Path
) -> None:
    model = ranking(None).model_dump()
    model["tasks"]["label"]["objective"]["loss"] = settings
    config = plan(tiny_version, tmp_path / "runs", model)
    for run in (plan_run, lambda config: fit_run(config, NoProgress())):
        with pytest.raises(ConfigError, match="(?s)" + error) as caught:
            run(config)
        assert caught.value.exit_code == ExitCode.CONFIG
    assert not (tmp_path / "runs").exists()


def test_a_loss_is_tried_on_lists_as_training_has_them(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """Padded, also those without a bound."""
    unbound = replace(tiny_manifest.schema["history"], max_len=None)
    others = [s for s in tiny_manifest.schema.features if s.name != "history"]
    manifest = replace(tiny_manifest, schema=FeatureSchema((*others, unbound)))
    batch, rows = read_tried_rows(TrainRows(tiny_version, manifest, 16), ["history"])
    assert batch["history"].shape[0] == rows > 0


def test_a_loss_of_items_is_tried_with_a_row_without_negatives(
    tiny_version: Path, tmp_path: Path
) -> None:
    objective = {"kind": "bpr", "loss": own("uncounted")}
    config = plan(tiny_version, tmp_path, {"name": "mf", "objective": objective})
    with pytest.raises(ConfigError, match=r"(?s)no numbers.*no other item counts"):
        plan_run(config)


@pytest.mark.parametrize(
    ("negatives", "k", "count"),
    [
        ({"kind": "bpr"}, 2, 1),
        ({"kind": "bpr", "negatives": {"count": 7}}, 8, 7),
        ({"kind": "sampled_softmax"}, 65, 64),
        ({"kind": "sampled_softmax", "negatives": {"source": "mixed", "count": 7}}, 72, 71),
    ],
)
def test_a_loss_of_items_is_tried_with_as_many_as_training_has(
    negatives: dict[str, Any], k: int, count: int, tiny_version: Path, tmp_path: Path
) -> None:
    for asked in (k, count):
        objective = {**negatives, "loss": own("best", params={"k": asked})}
        config = plan(tiny_version, tmp_path, {"name": "mf", "objective": objective})
        if asked == k:
            with pytest.raises(ConfigError, match=r"(?s)fails on 16 rows.*own_losses\.py:\d+"):
                plan_run(config)
    fit_run(config, NoProgress())


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("raising_later", r"fails on 64 rows.*ValueError in \S*own_losses\.py:\d+: not these"),
        ("one_later", r"does not give one value"),
        ("hidden_later", r"does not give one value"),
        ("asserting_later", r"code of one's own fails.*own_losses\.py:\d+"),
        ("python_later", r"code of one's own fails.*own_losses\.py:\d+: RuntimeError: not"),
    ],
)
def test_faults_that_only_a_step_shows_are_told_as_the_loss_s(
    function: str, error: str, tiny_version: Path, tmp_path: Path
) -> None:
    with pytest.raises(OwnCodeError, match="(?s)" + error):
        fit_run(plan(tiny_version, tmp_path, ranking(function)), NoProgress())


def test_the_number_of_losses_is_counted_where_it_is_not_known_before(
    tiny_version: Path, tmp_path: Path
) -> None:
    """Of positions of sequences: a step has as many as its rows have items."""
    objective = {"kind": "bpr", "loss": own("one_item_later")}
    config = plan(tiny_version, tmp_path, {"name": "sasrec", "objective": objective})
    error = r"(?s)own code: loss.*does not give one value.*--resume"
    with pytest.raises(OwnCodeError, match=error):
        fit_run(config, NoProgress())


def test_a_loss_of_positives_is_tried_where_the_first_rows_have_none(
    tiny_version: Path, tmp_path: Path
) -> None:
    original = tiny_dataset._row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "_row", lambda *a, **o: {**original(*a, **o), "label": 0.0})
        version = write_tiny_dataset(tmp_path / "negatives", config=TinyConfig(users=12))
    plan_run(plan(version, tmp_path, ranking("of_positives")))


def test_a_damaged_record_that_training_leaves_out_is_not_tried(
    tiny_version: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_version.parent.parent, tmp_path / "tiny")
    version = tmp_path / "tiny" / "versions" / tiny_version.name
    shard = sorted(version.glob("train/*.tfrecord*"))[0]
    content = bytearray(shard.read_bytes())
    content[30] ^= 0xFF
    shard.write_bytes(content)
    config = plan(version, tmp_path, ranking("focal"))
    with pytest.raises(InputDataError):
        plan_run(config)
    skipping = config.input.model_copy(update={"on_corrupt": "skip_record"})
    fit_run(config.model_copy(update={"input": skipping}), NoProgress())


def test_a_loss_is_tried_on_rows_that_pass_the_filter(tiny_version: Path, tmp_path: Path) -> None:
    config = plan(tiny_version, tmp_path, ranking("of_ones"))
    with pytest.raises(ConfigError, match="values that are no numbers"):
        plan_run(config)

    def keep(label: int) -> TrainConfig:
        kept = config.input.model_copy(
            update={"filter": (FilterConfig(feature="label", value=label),)}
        )
        return config.model_copy(update={"input": kept})

    plan_run(keep(1))
    with pytest.raises(TooFewRowsError, match="the train split is empty"):
        plan_run(keep(7))


@pytest.mark.parametrize("space", [{}, {"optimizer.learning_rate": [0.01, 0.011]}])
def test_a_refit_goes_on_where_a_corrected_loss_had_failed(
    space: dict[str, Any], tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan(tiny_version, tmp_path, ranking("raising_later"), epochs=2)
    rows = {"batch_size": 64, "validation": {"hash_of": "user_id", "share": 0.3}}
    fit = {"epochs": 2, "early_stopping": {"metric": "auc"}, "refit": {"space": space}}
    config = TrainConfig.model_validate({**config.model_dump(), "input": rows, "fit": fit})
    with pytest.raises(OwnCodeError, match="not these"):
        fit_chosen(config, NoProgress())
    own_losses = sys.modules["own_losses"]
    monkeypatch.setattr(own_losses, "raising_later", own_losses.cross_entropy)
    run = fit_chosen(config, NoProgress(), resume=True)
    trials = json.loads((run / "run_card.json").read_text())["refit"]["trials"]
    assert [trial["value"] is None for trial in trials] == [False] * max(1, 2 * len(space))


def test_a_run_keeps_the_name_of_its_loss_and_needs_the_module_to_train_on(
    tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = {"kind": "bpr", "loss": own("hinge", params={"margin": 0.5})}
    model = {"name": "mf", "embedding_dim": 4, "objective": objective}
    run = fit_run(plan(tiny_version, tmp_path, model), NoProgress())
    longer = plan(tiny_version, tmp_path, model, epochs=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_losses")
    trained = load_run(run)  # Scores need no loss.
    assert trained.config.model.objective.loss.function == "own_losses:hinge"
    assert evaluate_split(trained, "test")["rows"] == 60
    with pytest.raises(ConfigError, match=r"(?s)cannot be imported.*PYTHONPATH"):
        fit_run(longer, NoProgress(), resume=True)


GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "own-code.md"


@pytest.mark.parametrize("number", [0, 1])
def test_the_losses_of_the_guide_train(
    number: int, tiny_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GUIDE.read_text("utf-8").split("## A loss")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[number])["model"]
    (tmp_path / "losses.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    run = fit_run(plan(tiny_version, tmp_path / "runs", model, epochs=3), NoProgress())
    history = read_history(run)
    assert history[-1].loss < history[0].loss


def test_a_resumed_run_equals_one_that_was_not_broken_off(
    tiny_version: Path, tmp_path: Path
) -> None:
    objective = {"kind": "bpr", "loss": own("hinge")}
    model = {"name": "mf", "embedding_dim": 4, "objective": objective}
    whole = load_run(fit_run(plan(tiny_version, tmp_path / "a", model, 2), NoProgress()))
    fit_run(plan(tiny_version, tmp_path / "b", model), NoProgress())
    rest = plan(tiny_version, tmp_path / "b", model, 2)
    resumed = load_run(fit_run(rest, NoProgress(), resume=True))
    for name, expected in whole.model.named_variables.items():
        np.testing.assert_array_equal(resumed.model.named_variables[name], expected)
