"""Padding that all rows have, or rows of like length, is not computed, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training.models import BSTConfig, GRUConfig, HSTUConfig, RankingConfig, SASRecConfig
from training.input.batches import Batch, build_eval_dataset
from training.models.model import Model
from training.models.ranking import RankingModel
from training.models.registry import build_model
from training.models.sequence import SequenceModel
from training.networks import network as networks
from training.networks.network import StepContext, encode_in_groups

LENGTHS = [3, 0, 5, 1, 1, 2, 5]
WIDTH = 6
SMALL: dict[str, Any] = {"embedding_dim": 4, "heads": 2, "dropout": None}
UNITS: dict[str, Any] = {"hidden_units": [4]}
OF_USERS: dict[str, Any] = {"user_features": ("gender",), "hidden_units": (6,)}


@contextmanager
def computing_padding() -> Iterator[None]:
    """Has the width of lists be that of replicas."""
    modules = ("training.models.embedded_inputs", "training.networks.network")
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"{module}.may_cut", return_value=False))
        yield


def rank(network: str, **params: Any) -> RankingConfig:
    features = ["user_id", "movie_id", "history", "gender", "genres"]
    data = {"kind": "ranking", "network": network, "embedding_dim": 4, "features": features}
    return RankingConfig.model_validate({**data, "params": params})


MODELS: dict[str, Any] = {
    "sasrec": SASRecConfig(**SMALL),
    "ligr, features beside": SASRecConfig(block="ligr", **SMALL, **OF_USERS),
    "hstu": HSTUConfig(**SMALL),
    "hstu, times": HSTUConfig(**SMALL, times="history_time"),
    "hstu, times of the row": HSTUConfig(
        **SMALL, times="history_time", request_time="asked_at", **OF_USERS
    ),
    "hstu, gaps": HSTUConfig(**SMALL, times="history_age"),
    "gru": GRUConfig(embedding_dim=4, dropout=None),
    "bst of sequences": BSTConfig(**SMALL),
    "din": rank("din", attention_units=[3], **UNITS),
    "din softmax": rank("din", attention_units=[3], softmax=True, **UNITS),
    **{f"bst {pooling}": rank("bst", heads=2, pooling=pooling, **UNITS)
       for pooling in ("concat", "target", "mean")},
}  # fmt: skip


@pytest.fixture(scope="module")
def batch(timed_version: Path, timed_manifest: Manifest) -> Batch:
    """Rows with histories of these lengths, in lists that are padded to 8."""
    rows = next(iter(build_eval_dataset(timed_version, timed_manifest, "test", len(LENGTHS))))
    kept = tf.constant(np.arange(8) < np.array(LENGTHS)[:, None])
    return {
        name: tf.where(kept, value, tf.zeros_like(value)) if name.startswith("history") else value
        for name, value in rows.items()
        if name != "seen"
    }


def compute(model: Model, batch: Batch) -> dict[str, np.ndarray]:
    """What is served of a batch, its loss, and the gradients of everything trained."""
    training = StepContext(
        tf.constant([1, 2]), model.state_variables, [tf.identity(v) for v in model.state_variables]
    )
    with tf.GradientTape() as tape:
        if isinstance(model, SequenceModel):
            served = model.embed_users(batch)
            queries = model.embed_queries(batch, "movie_id", training)
            signs = tf.cast(queries.target_ids % 3, tf.float32)
            each = tf.reduce_sum(tf.sin(queries.vectors), axis=1) * queries.weights * signs
            losses = tf.math.segment_sum(each, queries.rows)
        else:
            assert isinstance(model, RankingModel)
            served = next(iter(model.compute_logits(batch).values()))
            losses = tf.sin(next(iter(model.compute_logits(batch, training).values())))
        loss = tf.reduce_sum(losses)
    found = {"served": served.numpy(), "losses": losses.numpy()}
    variables = [table.rows for table in model.tables.values()]
    variables += [v for network in model.networks for v in network.trained_variables]
    for number, gradient in enumerate(tape.gradient(loss, variables)):
        if gradient is not None:
            found[f"gradient {number}"] = tf.convert_to_tensor(gradient).numpy()
    for number, value in enumerate(training.values):
        found[f"statistic {number}"] = value.numpy()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_padding_is_not_computed_and_changes_nothing(
    name: str, timed_manifest: Manifest, batch: Batch
) -> None:
    model = build_model(MODELS[name], timed_manifest, 1)
    assert model.embedded_inputs[0](batch)["history"].shape[1] == 6  # And one behind the longest.
    found = compute(model, batch)
    with computing_padding():
        assert model.embedded_inputs[0](batch)["history"].shape[1] == 8
        expected = compute(model, batch)
    assert set(found) == set(expected)
    assert sum(key.startswith("gradient") for key in found) > 3
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["sasrec", "hstu, times", "bst concat"])
def test_a_graph_takes_batches_of_any_width(
    name: str, timed_manifest: Manifest, batch: Batch
) -> None:
    model = build_model(MODELS[name], timed_manifest, 1)
    lists = [each for each in batch if each.startswith("history")]
    free = {
        n: tf.TensorSpec([None, None] if n in lists else v.shape, v.dtype) for n, v in batch.items()
    }
    score: Callable[[Batch], tf.Tensor] = tf.function(
        lambda rows: (
            model.embed_users(rows)
            if isinstance(model, SequenceModel)
            else next(iter(model.compute_logits(rows).values()))
        ),
        input_signature=[free],
    )
    with computing_padding():
        expected = score.python_function(batch)  # type: ignore[attr-defined]
    for width in (5, 6, 8, 11):
        wide = {n: tf.pad(batch[n], [[0, 0], [0, 3]])[:, :width] for n in lists}
        np.testing.assert_allclose(score({**batch, **wide}), expected, rtol=1e-5, atol=1e-6)
    nothing = {n: tf.zeros_like(batch[n])[:, :0] for n in lists}
    assert np.isfinite(score({**batch, **nothing})).all()


@pytest.fixture(autouse=True)
def groups_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "MIN_GROUP_ROWS", 1)


def draw() -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(1)
    mask = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
    values = rng.normal(size=(len(LENGTHS), WIDTH, 2)) * mask[..., None]
    beside = rng.normal(size=(len(LENGTHS), 3))
    return {
        "items": tf.constant(values, tf.float32),
        "items_mask": tf.constant(mask),
        "beside": tf.constant(beside, tf.float32),
    }


@pytest.mark.parametrize("count", [2, 3, 7, 9])
@pytest.mark.parametrize("keeps_positions", [True, False])
def test_groups_give_each_row_what_it_gives_alone(count: int, keeps_positions: bool) -> None:
    inputs, widths = draw(), []

    def encode(group: Mapping[str, tf.Tensor], number: int) -> tf.Tensor:
        widths.append(int(group["items"].shape[1]))
        each = group["items"] ** 3
        pooled = tf.reduce_sum(each, axis=1) * group["beside"][:, :2]
        return each + pooled[:, None] if keeps_positions else pooled

    found = []
    for groups in (count, 1):
        with tf.GradientTape() as tape:
            values = {n: inputs[n] for n in ("items", "beside")}
            tape.watch(values)
            lists = ("items", "items_mask")
            output = encode_in_groups(encode, {**inputs, **values}, lists, "items_mask", groups)
            kept = output[:, :5] if keeps_positions else output
            is_read = tf.cast(inputs["items_mask"][:, :5, None], tf.float32)
            mask = is_read if keeps_positions else 1.0
            loss = tf.reduce_sum(tf.sin(kept * mask))
        found.append([kept * mask, *tape.gradient(loss, list(values.values()))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    if count == 7:  # One behind the longest list of each group, or the width of the batch.
        assert widths[:7] == [1, 2, 2, 3, 4, 6, 6]


GROUPED = [name for name in MODELS if name[:3] in ("sas", "lig", "bst")] + [
    "hstu, times of the row"
]


@pytest.mark.parametrize("name", GROUPED)
def test_a_model_learns_the_same_in_groups(
    name: str, timed_manifest: Manifest, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for groups in (3, 1):
        for kind in ("sequence", "ranking"):
            path = f"training.models.{kind}.plan_groups"
            monkeypatch.setattr(path, lambda *_, n=groups: n)
        calls = count_calls(monkeypatch)
        found.append(compute(build_model(MODELS[name], timed_manifest, 1), batch))
        assert calls == ([groups] if groups > 1 else [])
    for key, value in found[1].items():
        # Sums of float32 in another order: small numbers among large ones lose digits.
        bound = 1e-6 + 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(found[0][key], value, rtol=1e-5, atol=bound, err_msg=key)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of groups that steps are computed in, from here on."""
    calls: list[int] = []

    def encode(*arguments: Any) -> Any:
        calls.append(arguments[-1])
        return encode_in_groups(*arguments)

    monkeypatch.setattr(networks, "encode_in_groups", encode)
    return calls


def test_groups_drop_other_numbers_and_the_same_again(
    timed_manifest: Manifest, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.models.sequence.plan_groups", lambda *_: 7)
    config = MODELS["sasrec"].model_copy(update={"dropout": 0.5})
    model = build_model(config, timed_manifest, 1)
    alike = {name: tf.repeat(value[:1], 7, axis=0) for name, value in batch.items()}
    rows = [
        model.embed_users(alike, StepContext(tf.constant([1, step]))).numpy() for step in (2, 2, 3)
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.abs(rows[0] - rows[2]).max() > 1e-3
    assert len(np.unique(rows[0][:, 0])) == 7


@pytest.mark.parametrize(
    ("network", "params", "is_grouped"),
    [("bst", {"activation": "relu"}, True), ("bst", {"activation": "dice"}, False),
     ("bst", {"batch_normalization": True}, False), ("din", {"activation": "relu"}, False)],
)  # fmt: skip
def test_a_network_with_statistics_of_the_batch_reads_all_of_it(
    network: str,
    params: dict[str, Any],
    is_grouped: bool,
    timed_manifest: Manifest,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = rank(network, hidden_units=[4], **params)
    statistics = {"train": {"history": {"length": {"mean": 2.0, "max": 8}}}}
    model = build_model(config, replace(timed_manifest, statistics=statistics), 1)
    calls = count_calls(monkeypatch)
    compute(model, batch)
    assert bool(calls) is is_grouped
