from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.input import InputConfig
from conf.training.objectives import NegativesConfig
from tests.datasets import read_train_records
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.input.batches import build_eval_dataset
from training.networks.network import StepContext
from training.objectives import user_items
from training.objectives.samplers import (
    Sampler,
    build_sampler,
    count_in_batch,
)
from training.objectives.user_items import (
    KnownItems,
    TrainRows,
    build_known_items,
    group_pairs,
    read_user_items,
)

DRAWABLE = np.array([3, 4, 6, 7], np.int64)
COUNTS = np.array([0, 5, 0, 100, 0, 7, 20, 1], np.int64)
VOCABULARY = len(COUNTS)


def begin(sampler: Sampler, step: int = 0) -> StepContext:
    state = list(sampler.state_variables)
    return StepContext(tf.constant([3, 8 * step]), state, [v.read_value() for v in state])


def build(source: str, distortion: float | None = None) -> Sampler:
    config = NegativesConfig(source=source, count=1, distortion=distortion)
    return build_sampler(config, DRAWABLE, COUNTS, VOCABULARY)


def weights_of(source: str, distortion: float | None) -> np.ndarray:
    """What the items are drawn in proportion to, by the definitions of the guide."""
    exponent = {"uniform": 0, "frequency": 0.75, "mixed": 0}[source]
    exponent = exponent if distortion is None else distortion
    return np.array([100.0, 1.0, 20.0, 1.0]) ** exponent


@pytest.mark.parametrize(
    ("source", "distortion"),
    [("uniform", None), ("frequency", None), ("frequency", 1.0), ("mixed", None), ("mixed", 0.5)],
)
def test_shares_are_those_of_what_is_drawn(source: str, distortion: float | None) -> None:
    """Each share lies within five standard deviations of the frequency of 40,000 draws."""
    sampler, draws = build(source, distortion), 40_000
    drawn = sampler.draw([draws], begin(sampler)).numpy()
    found = np.bincount(drawn, minlength=VOCABULARY)[DRAWABLE] / draws
    assert np.isin(drawn, DRAWABLE).all()
    shares = sampler.shares(tf.constant(DRAWABLE), begin(sampler)).numpy()
    deviation = np.sqrt(shares * (1 - shares) / draws)
    assert (np.abs(found - shares) < 5 * deviation + 1e-9).all()
    weights = weights_of(source, distortion)
    np.testing.assert_allclose(shares, weights / weights.sum(), rtol=1e-5)
    outside = sampler.shares(tf.constant([0, 1, 5], tf.int64), begin(sampler)).numpy()
    np.testing.assert_allclose(outside, shares.min(), rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    source=st.sampled_from(["uniform", "frequency", "adaptive"]),
    step=st.integers(0, 1000),
    rows=st.integers(1, 9),
    count=st.integers(1, 5),
)
def test_draws_are_a_function_of_seed_and_step(source, step, rows, count) -> None:
    sampler = build(source)
    first = sampler.draw([rows, count], begin(sampler, step)).numpy()
    assert first.shape == (rows, count)
    assert np.isin(first, DRAWABLE).all()
    again = sampler.draw([rows, count], begin(sampler, step)).numpy()
    np.testing.assert_array_equal(first, again)
    many = sampler.draw([64], begin(sampler, step)).numpy()
    assert not np.array_equal(many, sampler.draw([64], begin(sampler, step + 1)).numpy())


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), steps=st.integers(1, 4), distortion=st.sampled_from([0.5, 1.0]))
def test_adaptive_draws_follow_what_steps_have_met(seed, steps, distortion) -> None:
    """Against a dictionary of counts that begin at one."""
    rng = np.random.default_rng(seed)
    sampler = build("adaptive", distortion)
    expected = dict.fromkeys(DRAWABLE.tolist(), 1)
    for step in range(steps):
        ids = rng.integers(0, VOCABULARY, size=(3, 2))
        training = begin(sampler, step)
        sampler.learn(tf.constant(ids), training)
        sampler.state_variables[0].assign(training.values[0])
        for item in ids.ravel().tolist():
            if item in expected:
                expected[item] += 1
    weights = np.array([expected[item] for item in DRAWABLE.tolist()]) ** float(distortion)
    shares = sampler.shares(tf.constant(DRAWABLE), begin(sampler)).numpy()
    np.testing.assert_allclose(shares, weights / weights.sum(), rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=30),
    users=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    is_ragged=st.booleans(),
)
def test_known_items_equal_a_dictionary_of_sets(pairs, users, seed, is_ragged) -> None:
    rng = np.random.default_rng(seed)
    own = rng.integers(0, 10, size=len(users))
    lists = rng.integers(0, 10, size=(len(users), 3))
    train: dict[int, set[int]] = {}
    for user, item in pairs:
        if user >= 2 and item >= 2:
            train.setdefault(user, set()).add(item)
    expected = [
        train.get(user, set()) | {int(own[row])} | {int(item) for item in lists[row] if item}
        for row, user in enumerate(users)
    ]
    grouped = group_pairs(np.array(pairs, np.int64).reshape(-1, 2))
    assert len(grouped.items) == sum(map(len, train.values()))
    history = tf.constant(lists)
    if is_ragged:
        history = tf.RaggedTensor.from_tensor(history, padding=0)
        expected = [
            train.get(user, set()) | {int(own[row])} | set(history[row].numpy().tolist())
            for row, user in enumerate(users)
        ]
    batch = {"user": tf.constant(users, tf.int64), "item": tf.constant(own), "history": history}
    known = KnownItems("item", ("user", grouped), ("history",), 10)
    assert known.inputs == ("item", "user", "history")
    found = known.find(batch)
    asked = rng.integers(0, 10, size=(len(users), 4))
    inside = known.contains(found, tf.constant(asked)).numpy()
    for row, items in enumerate(expected):
        assert inside[row].tolist() == [item in items for item in asked[row]]
    candidates = rng.integers(0, 10, size=7)
    marked = known.mark(found, tf.constant(len(users)), tf.constant(candidates)).numpy()
    for row, items in enumerate(expected):
        assert marked[row].tolist() == [item in items for item in candidates]


def test_user_items_are_those_of_the_rows_that_are_trained_on(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    names = ["user_id", "movie_id"]
    rows = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000, names)))
    pairs = set(zip(*(rows[name].numpy().tolist() for name in names), strict=True))
    found = read_user_items(tiny_version, tiny_manifest)
    users = np.repeat(found.users, np.diff(found.starts))
    assert set(zip(users.tolist(), found.items.tolist(), strict=True)) == pairs
    held_out = InputConfig.model_validate(
        {"batch_size": 32, "validation": {"hash_of": "movie_id", "share": 0.3}}
    )
    kept = read_user_items(tiny_version, tiny_manifest, held_out)
    assert 0 < len(kept.items) < len(found.items)


def test_user_items_are_those_of_mixed_datasets_too(tmp_path: Path) -> None:
    versions = [
        write_tiny_dataset(tmp_path, name, TinyConfig(users=20, own_group=share))
        for name, share in (("tiny", 0.9), ("other", 0.0))
    ]
    mix = [{"dataset": str(versions[1].parent.parent), "weight": 0.3}]
    config = InputConfig.model_validate({"batch_size": 32, "mix": mix})
    train = TrainRows(versions[0], read_manifest(versions[0]), 32, config)
    assert [part.manifest.dataset_name for part in train.parts] == ["tiny", "other"]
    expected: dict[int, set[int]] = {}
    for version in versions:
        for record in read_train_records(version, read_manifest(version)):
            expected.setdefault(record["user_id"][0], set()).add(record["movie_id"][0])
    known = build_known_items(train, ("user_id", "movie_id"))
    batch = {"user_id": tf.constant(sorted(expected)), "movie_id": tf.constant([2] * len(expected))}
    found = known.find(batch)
    rows, items = found.rows.numpy(), found.items.numpy()
    for row, user in enumerate(sorted(expected)):
        assert set(items[rows == row].tolist()) == expected[user] | {2}


def test_a_bucket_of_unknown_users_is_no_user(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_user_items(tiny_version, tiny_manifest)
    monkeypatch.setattr(user_items, "find_named_ids", lambda *_: range(5, 1005))
    after = read_user_items(tiny_version, tiny_manifest)
    assert after.users.tolist() == [user for user in before.users if user >= 5]


def test_without_users_the_history_tells(tiny_version: Path, tiny_manifest: Manifest) -> None:
    manifest = replace(tiny_manifest, keys=replace(tiny_manifest.keys, user=None))
    known = build_known_items(TrainRows(tiny_version, manifest, 32), ())
    assert known.inputs == ("movie_id", "history")
    unnamed = replace(manifest, keys=replace(manifest.keys, history=None))
    assert build_known_items(TrainRows(tiny_version, unnamed, 32), ()).inputs == known.inputs
    # Ids of something else than items tell nothing of items.
    features = tuple(
        replace(s, encoding="genres", shared_embedding="genres") if s.name == "history" else s
        for s in manifest.schema.features
    )
    bare = replace(manifest, schema=FeatureSchema(features))
    with pytest.raises(ConfigError, match="needs users, or a history"):
        build_known_items(TrainRows(tiny_version, bare, 32), ())


def test_the_items_of_every_history_are_known(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=9, bought=True))
    manifest = read_manifest(version)
    manifest = replace(manifest, keys=replace(manifest.keys, user=None, history=None))
    known = build_known_items(TrainRows(version, manifest, 32), ())
    assert known.inputs == ("movie_id", "history", "bought")
    batch = next(iter(build_eval_dataset(version, manifest, "test", 9, known.inputs)))
    found = known.find(batch)
    rows, items = found.rows.numpy(), found.items.numpy()
    for row in range(9):
        parts = [batch[n][row].numpy().tolist() for n in ("history", "bought")]
        expected = {int(batch["movie_id"][row]), *parts[0], *parts[1]} - {0}
        assert set(items[rows == row].tolist()) == expected


def test_counts_in_a_batch_are_shares_of_train() -> None:
    found = count_in_batch(np.array([0, 0, 6, 3, 1]), 100)
    np.testing.assert_allclose(found[2:], [60, 30, 10], rtol=1e-5)
    assert (count_in_batch(np.zeros(5, np.int64), 8) > 0).all()
    # Of mixed datasets the numbers are expected ones, which may be below one row.
    shares = count_in_batch(np.array([0.0, 0.25, 0.75, 9.0]), 10)
    np.testing.assert_allclose(shares[1:], [0.25, 0.75, 9.0])
