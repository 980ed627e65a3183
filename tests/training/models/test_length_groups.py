"""Rows of like length that are computed together: narrower, and everything else as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from tests.training.models.test_batch_width import MODELS, compute, rank, read_short_histories
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.input.batches import Batch
from training.models.registry import build_model
from training.networks import network as networks
from training.networks.network import GROUPS, StepContext, encode_in_groups, plan_groups

LENGTHS = [3, 0, 5, 1, 1, 2, 5]
WIDTH = 6


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
            mask = (
                tf.cast(inputs["items_mask"][:, :5, None], tf.float32) if keeps_positions else 1.0
            )
            loss = tf.reduce_sum(tf.sin(kept * mask))
        found.append([kept * mask, *tape.gradient(loss, list(values.values()))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    if count == 7:  # One behind the longest list of each group, or the width of the batch.
        assert widths[:7] == [1, 2, 2, 3, 4, 6, 6]


def test_a_batch_of_few_rows_is_computed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "MIN_GROUP_ROWS", 4)
    numbers = []

    def encode(group: Mapping[str, tf.Tensor], number: int) -> tf.Tensor:
        numbers.append(number)
        return group["beside"]

    encode_in_groups(encode, draw(), ("items", "items_mask"), "items_mask", 4)
    assert numbers == [0]


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(item_times=True))


@pytest.fixture(scope="module")
def manifest(version: Path) -> Manifest:
    return read_manifest(version)


@pytest.fixture(scope="module")
def batch(version: Path, manifest: Manifest) -> Batch:
    return read_short_histories(version, manifest, LENGTHS)


GROUPED = ["sasrec", "ligr, features beside", "hstu, times of the row", "bst of sequences"]
GROUPED += ["bst concat", "bst target", "bst mean"]


@pytest.mark.parametrize("name", GROUPED)
def test_a_model_learns_the_same_in_groups(
    name: str, manifest: Manifest, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for groups in (3, 1):
        for kind in ("sequence", "ranking"):
            path = f"training.models.{kind}.plan_groups"
            monkeypatch.setattr(path, lambda *_, n=groups: n)
        calls = count_calls(monkeypatch)
        found.append(compute(build_model(MODELS[name], manifest, 1), batch))
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
    manifest: Manifest, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.models.sequence.plan_groups", lambda *_: 7)
    config = MODELS["sasrec"].model_copy(update={"dropout": 0.5})
    model = build_model(config, manifest, 1)
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
    manifest: Manifest,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = rank(network, hidden_units=[4], **params)
    statistics = {"train": {"history": {"length": {"mean": 2.0, "max": 8}}}}
    model = build_model(config, replace(manifest, statistics=statistics), 1)
    calls = count_calls(monkeypatch)
    compute(model, batch)
    assert bool(calls) is is_grouped


def test_groups_are_planned_where_lists_vary(manifest: Manifest) -> None:
    history = manifest.schema["history"]

    def plan(mean: float | None, spec: FeatureSpec = history) -> int:
        lengths: dict[str, Any] = {} if mean is None else {"length": {"mean": mean}}
        statistics = {"train": {spec.name: lengths}}
        return plan_groups(replace(manifest, statistics=statistics), spec)

    assert (plan(2.0), plan(7.5), plan(None)) == (GROUPS, 1, 1)
    assert plan(2.0, replace(history, max_len=None)) == 1
    assert plan(2.0, manifest.schema["gender"]) == 1
