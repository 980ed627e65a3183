"""Batches of short lists: padding that all rows have is not computed, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from conf.training.models import BSTConfig, GRUConfig, HSTUConfig, RankingConfig, SASRecConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.input.batches import Batch, build_eval_dataset
from training.models.embedded_inputs import find_longest
from training.models.model import Model
from training.models.ranking import RankingModel
from training.models.registry import build_model
from training.models.sequence import SequenceModel
from training.networks.network import StepContext

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
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(item_times=True))


@pytest.fixture(scope="module")
def manifest(version: Path) -> Manifest:
    return read_manifest(version)


def read_short_histories(version: Path, manifest: Manifest, lengths: list[int]) -> Batch:
    """Rows with histories of some lengths, in lists that are padded to 8."""
    rows = next(iter(build_eval_dataset(version, manifest, "test", len(lengths))))
    kept = tf.constant(np.arange(8) < np.array(lengths)[:, None])
    return {
        name: tf.where(kept, value, tf.zeros_like(value)) if name.startswith("history") else value
        for name, value in rows.items()
        if name != "seen"
    }


@pytest.fixture(scope="module")
def batch(version: Path, manifest: Manifest) -> Batch:
    return read_short_histories(version, manifest, [3, 0, 1, 3, 2, 1])


def compute(model: Model, batch: Batch, width: int | None = None) -> dict[str, np.ndarray]:
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
    name: str, manifest: Manifest, batch: Batch
) -> None:
    model = build_model(MODELS[name], manifest, 1)
    assert model.embedded_inputs[0](batch)["history"].shape[1] == 4  # And one behind the longest.
    found = compute(model, batch)
    with computing_padding():
        assert model.embedded_inputs[0](batch)["history"].shape[1] == 8
        expected = compute(model, batch)
    assert set(found) == set(expected)
    assert sum(key.startswith("gradient") for key in found) > 3
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["sasrec", "hstu, times", "bst concat"])
def test_a_graph_takes_batches_of_any_width(name: str, manifest: Manifest, batch: Batch) -> None:
    model = build_model(MODELS[name], manifest, 1)
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
    for width in (3, 4, 8, 11):
        wide = {n: tf.pad(batch[n], [[0, 0], [0, 3]])[:, :width] for n in lists}
        np.testing.assert_allclose(score({**batch, **wide}), expected, rtol=1e-5, atol=1e-6)
    nothing = {n: tf.zeros_like(batch[n])[:, :0] for n in lists}
    assert np.isfinite(score({**batch, **nothing})).all()


@pytest.mark.parametrize(
    ("tokens", "longest"),
    [([[0, 0], [0, 0]], 0), ([[4, 0, 0], [3, 0, 5]], 3), ([[], []], 0), ([[1, 0, 0]], 1)],
)
def test_the_longest_list_ends_at_its_last_token(tokens: Any, longest: int) -> None:
    assert int(find_longest(tf.constant(tokens, tf.int64))) == longest
