"""HSTU: its blocks beside plain NumPy, buckets of times by hand."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.training.models import HSTUConfig
from tests.training.networks.test_networks import Array, Weights, norm, sigmoid
from training.networks.network import Network, build_keras_model, building_layers
from training.networks.sequences import (
    TIME_BUCKETS,
    TimeBuckets,
    UserSequence,
    build_hstu,
)

LENGTH, DIM, HEADS, ROWS = 6, 4, 2, 3
LENGTHS = np.array([6, 3, 0])
HOUR, DAY = 3600.0, 86_400.0


def build(*, timed: bool = True, of_targets: bool = True) -> Network:
    """Two blocks whose weights are random; sequences may be as long as `LENGTH`."""
    tensors = {
        "items": keras.Input((LENGTH, DIM), name="items"),
        "is_read": keras.Input((LENGTH,), dtype="bool", name="is_read"),
        "ages": keras.Input((LENGTH,), name="ages"),
    }
    is_read = tensors["is_read"]
    ages = tensors["ages"] if timed else None
    sequence = UserSequence(tensors["items"], is_read, LENGTH, is_read, ages, of_targets)
    with building_layers("test", 1):
        output = build_hstu(sequence, HSTUConfig(heads=HEADS, dropout=0.3))
        network = Network(build_keras_model("test", tensors, output))
    rng = np.random.default_rng(1)
    for variable in network.weights.values():
        variable.assign(rng.normal(size=variable.shape))
    return network


def draw() -> dict[str, Array]:
    rng = np.random.default_rng(2)
    is_read = np.arange(LENGTH) < np.maximum(LENGTHS, 1)[:, None]
    items = rng.normal(size=(ROWS, LENGTH, DIM)) * (np.arange(LENGTH) < LENGTHS[:, None])[..., None]
    ages = np.cumsum(rng.exponential(size=(ROWS, LENGTH)) * [1, HOUR, 1, DAY, 2 * DAY, 0.1], axis=1)
    ages[0, 3] = -1  # Nobody knows when this was.
    ages[1, 3:] = ages[2] = -1
    return {
        "items": items.astype(np.float32), "is_read": is_read, "ages": ages.astype(np.float32)
    }  # fmt: skip


def bucket(seconds: float) -> int:
    return min(int(np.log(max(seconds, 1.0)) / 0.301), TIME_BUCKETS - 1)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def reference(w: Weights, x: dict[str, Array], row: int, of_targets: bool | None) -> Array:
    """The blocks as the paper writes them, one pair of positions at a time."""
    hidden = x["items"][row] + w["add_positions/positions"]
    read, ages = np.where(x["is_read"][row])[0], x["ages"][row]
    for n, suffix in enumerate(("", "_1")):
        each = norm(w, hidden, f"layer_normalization{'' if n == 0 else '_2'}")
        kernel = w[f"dense{'' if n == 0 else '_2'}/kernel"]
        u, v, q, k = np.split(silu(each @ kernel), 4, axis=1)
        attended = np.zeros_like(hidden)
        positions = w[f"pointwise_attention{suffix}/positions"]
        times = None if of_targets is None else w[f"pointwise_attention{suffix}/times"]
        for i in read:
            for j in (j for j in read if j >= i):
                bias = positions[j - i]
                if times is not None:
                    asked = ages[i] if not of_targets else ages[i - 1] if i else 0.0
                    if asked >= 0 and ages[j] >= 0:
                        bias = bias + times[bucket(ages[j] - asked)]
                for head in range(HEADS):
                    part = slice(head * DIM // HEADS, (head + 1) * DIM // HEADS)
                    weight = silu(q[i, part] @ k[j, part] + bias) / LENGTH
                    attended[i, part] += weight * v[j, part]
        normed = norm(w, attended, f"layer_normalization_{2 * n + 1}")
        hidden = hidden + w.dense(u * normed, f"dense_{2 * n + 1}")
    return hidden[read]


@pytest.mark.parametrize("of_targets", [None, False, True])
def test_blocks_are_what_the_paper_says(of_targets: bool | None) -> None:
    network, x = build(timed=of_targets is not None, of_targets=bool(of_targets)), draw()
    weights, found = Weights(network), network(x).numpy()
    for row in range(ROWS):
        expected = reference(weights, x, row, of_targets)
        np.testing.assert_allclose(found[row, : len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(found).all()
    assert not weights.unread


def test_buckets_of_times_by_hand() -> None:
    ages = tf.constant([[10.0, 10.0, 3610.0, 5.0, -1.0]])
    of_own = TimeBuckets(of_targets=False)(ages).numpy()[0]
    none = TIME_BUCKETS
    # ln 3600 / 0.301 = 27.2; equal times, and times that run backwards, are 0 seconds.
    assert of_own[0].tolist() == [0, 0, 27, 0, none]
    assert of_own[3].tolist() == [5, 5, 27, 0, none]
    assert (of_own[4] == none).all()
    of_targets = TimeBuckets(of_targets=True)(ages).numpy()[0]
    # ln 10 / 0.301 = 7.6: position 0 asks at the row's event, position 1 when item 0 was met.
    assert of_targets[0].tolist() == [7, 7, 27, 5, none]
    assert of_targets[1].tolist() == [0, 0, 27, 0, none]
    assert of_targets[4].tolist() == [5, 5, 27, 0, none]
    for far in (1e30, np.inf):
        assert TimeBuckets(of_targets=True)(tf.constant([[far]])).numpy().max() < TIME_BUCKETS


def test_what_stands_behind_the_beginning_changes_nothing() -> None:
    network, x = build(), draw()
    expected = network(x).numpy()
    garbage = {**x, "items": np.where(x["is_read"][..., None], x["items"], 9.0)}
    garbage["ages"] = np.where(x["is_read"], x["ages"], 5.0)
    found = network(garbage).numpy()
    np.testing.assert_allclose(found[x["is_read"]], expected[x["is_read"]])
