"""Each built-in network beside plain NumPy, written from the papers' equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from training.networks.network import Network, NetworkInputs, build_keras_model, building_layers
from training.networks.registry import NETWORKS, build_logits

ROWS, DIM, LENGTH = 5, 4, 3
IDS, LISTS, NUMBERS = ("user", "item"), ("clicks", "gaps"), {"price": 1, "point": 2}
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(IDS, (DIM,)),
    **dict.fromkeys(LISTS, (LENGTH, DIM)),
    **{f"{name}_mask": (LENGTH,) for name in LISTS},
    **{f"{name}_bias": (1,) for name in (*IDS, *LISTS)},
    **{name: (size,) for name, size in NUMBERS.items()},
}
Array = np.ndarray[Any, np.dtype[np.float64]]


class Weights:
    """Weights of a network by name, as float64; each must be read."""

    def __init__(self, network: Network) -> None:
        self.values = {n: v.numpy().astype(np.float64) for n, v in network.weights.items()}
        self.unread = set(self.values)

    def __getitem__(self, name: str) -> Array:
        self.unread.discard(name)
        return self.values[name]

    def dense(self, x: Array, name: str = "dense") -> Array:
        return x @ self[f"{name}/kernel"] + self[f"{name}/bias"]

    def mlp(self, x: Array, names: list[str], act: Callable[[Array], Array]) -> Array:
        for name in names:
            x = act(self.dense(x, name))
        return x


def relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def leaky_relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.2 * x)  # The slope of Keras' activation of this name.


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def dice(w: Weights, x: Array, name: str) -> Array:
    """Equation 4 of the paper, with the moving statistics of training."""
    mean = w[f"{name}/batch_normalization/moving_mean"]
    variance = w[f"{name}/batch_normalization/moving_variance"]
    gate = sigmoid((x - mean) / np.sqrt(variance + 1e-8))
    return gate * x + (1 - gate) * w[f"{name}/slope"] * x


def row(x: Mapping[str, Array], without: tuple[str, ...] = ()) -> Array:
    names = [n for n in (*IDS, *LISTS, *NUMBERS) if n not in without]
    return np.concatenate([x[n].reshape(ROWS, -1) for n in names], axis=1)


def linear(w: Weights, x: Mapping[str, Array], numbers: str) -> Array:
    total = w["bias/bias"] + sum(x[f"{n}_bias"] for n in (*IDS, *LISTS))
    return total + np.concatenate([x[n] for n in NUMBERS], axis=1) @ w[f"{numbers}/kernel"]


def pairs(x: Mapping[str, Array]) -> Array:
    """Products of all pairs of fields, one by one; each position of a list is a field."""
    fields = [x[n] for n in IDS] + [x[n][:, t] for n in LISTS for t in range(LENGTH)]
    total = np.zeros((ROWS, 1))
    for i, left in enumerate(fields):
        for right in fields[i + 1 :]:
            total[:, 0] += (left * right).sum(axis=1)
    return total


def reference_lr(w: Weights, x: Mapping[str, Array]) -> Array:
    return linear(w, x, "dense")


def reference_fm(w: Weights, x: Mapping[str, Array]) -> Array:
    return linear(w, x, "dense") + pairs(x)


def reference_wide_deep(w: Weights, x: Mapping[str, Array]) -> Array:
    hidden = w.mlp(row(x), ["dense", "dense_2"], relu)
    return linear(w, x, "dense_1") + hidden @ w["dense_3/kernel"]


def reference_deepfm(w: Weights, x: Mapping[str, Array]) -> Array:
    return reference_wide_deep(w, x) + pairs(x)


def reference_dcn(w: Weights, x: Mapping[str, Array]) -> Array:
    first = crossed = row(x)
    for name in ("feature_cross", "feature_cross_1"):
        crossed = first * w.dense(crossed, f"{name}/dense") + crossed
    hidden = w.mlp(first, ["dense", "dense_1"], relu)
    return w.dense(np.concatenate([crossed, hidden], axis=1), "dense_2")


def reference_final_net(w: Weights, x: Mapping[str, Array]) -> Array:
    def block(names: list[str]) -> Array:
        hidden = row(x)
        for name in names:
            u, v = np.split(w.dense(hidden, name), 2, axis=1)
            hidden = relu(np.concatenate([u, u * v], axis=1))
        return hidden

    first, second = block(["dense", "dense_1"]), block(["dense_2"])
    return (w.dense(first, "dense_3") + w.dense(second, "dense_4")) / 2


def reference_mf(w: Weights, x: Mapping[str, Array]) -> Array:
    product = (x["user"] * x["item"]).sum(axis=1, keepdims=True)
    return product + x["user_bias"] + x["item_bias"] + w["bias/bias"]


def reference_din(w: Weights, x: Mapping[str, Array], *, normalized: bool = False) -> Array:
    interest = np.zeros((ROWS, DIM))
    for number in range(ROWS):
        target, tokens = x["item"][number], np.flatnonzero(x["clicks_mask"][number])
        scores = []
        for position in tokens:
            h = x["clicks"][number, position]
            joined = np.concatenate([h, target, h - target, h * target])
            hidden = dice(w, w.dense(joined), "dice")
            hidden = dice(w, w.dense(hidden, "dense_1"), "dice_1")
            scores.append(float(w.dense(hidden, "dense_2")[0]))
        weights = softmax(np.array(scores) / np.sqrt(DIM)) if normalized and scores else scores
        for weight, position in zip(weights, tokens, strict=True):
            interest[number] += weight * x["clicks"][number, position]
    joined = np.concatenate([row(x, without=("clicks",)), interest], axis=1)
    hidden = dice(w, w.dense(joined, "dense_3"), "dice_2")
    return w.dense(hidden, "dense_4")


def reference_bst(w: Weights, x: Mapping[str, Array], pooling: str) -> Array:
    vectors = x["clicks"] + x["gaps"]
    sequence = np.concatenate([vectors, x["item"][:, None]], axis=1)
    sequence = sequence + w["add_positions/positions"]
    mask = np.concatenate([x["clicks_mask"], np.ones((ROWS, 1))], axis=1) > 0
    out = np.zeros_like(sequence)
    for number in range(ROWS):
        out[number] = reference_block(w, sequence[number], mask[number])
    pooled = {
        "concat": (out * mask[..., None]).reshape(ROWS, -1),
        "target": out[:, -1],
        "mean": (out * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True),
    }[pooling]
    joined = np.concatenate([row(x, without=("item", *LISTS)), pooled], axis=1)
    hidden = w.mlp(joined, ["dense_2", "dense_3"], leaky_relu)
    return w.dense(hidden, "dense_4")


def reference_block(w: Weights, sequence: Array, mask: Array) -> Array:
    """One row: attention of each head over the tokens, then the feed-forward layer."""
    attended = np.zeros_like(sequence)
    for head in range(2):
        q, k, v = (
            np.einsum("td,dk->tk", sequence, w[f"multi_head_attention/{part}/kernel"][:, head])
            + w[f"multi_head_attention/{part}/bias"][head]
            for part in ("query", "key", "value")
        )
        scores = np.where(mask, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
        attended += softmax(scores) @ v @ w["multi_head_attention/attention_output/kernel"][head]
    attended += w["multi_head_attention/attention_output/bias"]
    sequence = norm(w, sequence + attended, "layer_normalization")
    hidden = w.dense(leaky_relu(w.dense(sequence)), "dense_1")
    return norm(w, sequence + hidden, "layer_normalization_1")


def norm(w: Weights, x: Array, name: str) -> Array:
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + 1e-6)
    return scaled * w[f"{name}/gamma"] + w[f"{name}/beta"]


def reference_shared_bottom(w: Weights, x: Mapping[str, Array]) -> dict[str, Array]:
    shared = w.mlp(row(x), ["dense"], relu)
    return {
        "click": w.dense(w.mlp(shared, ["dense_1"], relu), "dense_3"),
        "like": w.dense(w.mlp(shared, ["dense_2"], relu), "dense_4"),
    }


def reference_mmoe(w: Weights, x: Mapping[str, Array]) -> dict[str, Array]:
    experts = np.stack([w.mlp(row(x), [name], relu) for name in MMOE["experts"]], axis=1)
    logits = {}
    for task in ("click", "like"):
        gate = softmax(row(x) @ w[f"{MMOE[task][0]}/kernel"])
        mixed = (gate[..., None] * experts).sum(axis=1)
        logits[task] = w.dense(w.mlp(mixed, [MMOE[task][1]], relu), MMOE[task][2])
    return logits


MMOE: dict[str, Any] = {
    "experts": ["dense", "dense_1", "dense_2"],
    "click": ("dense_3", "dense_5", "dense_7"),
    "like": ("dense_4", "dense_6", "dense_8"),
}

UNITS = {"hidden_units": [3, 2]}
OF_HISTORY = {"history": "clicks", "target": "item"}
DIN = {**OF_HISTORY, "attention_units": [3, 2], "hidden_units": [2]}
BST = {**OF_HISTORY, "gaps": "gaps", "heads": 2, "feed_forward_units": 3, **UNITS}
TASKS = ("click", "like")
CASES: dict[str, tuple[dict[str, Any], Callable[[Weights, Mapping[str, Array]], Any]]] = {
    "lr": ({}, reference_lr),
    "fm": ({}, reference_fm),
    "wide_deep": (UNITS, reference_wide_deep),
    "deepfm": (UNITS, reference_deepfm),
    "dcn": ({"cross_layers": 2, **UNITS}, reference_dcn),
    "final_net": ({"hidden_units": [4, 2], "second_units": [6]}, reference_final_net),
    "mf": ({"user": "user", "item": "item"}, reference_mf),
    "din": (DIN, reference_din),
    "din softmax": ({**DIN, "softmax": True}, lambda w, x: reference_din(w, x, normalized=True)),
    **{
        f"bst {pooling}": (
            {**BST, "pooling": pooling},
            lambda w, x, pooling=pooling: reference_bst(w, x, pooling),
        )
        for pooling in ("concat", "target", "mean")
    },
    "shared_bottom": ({"hidden_units": [3], "task_units": [2]}, reference_shared_bottom),
    "mmoe": ({"experts": 3, "hidden_units": [3], "task_units": [2]}, reference_mmoe),
}


def build(case: str, params: dict[str, Any], seed: int = 1) -> Network:
    """Builds a network; its weights are random ones, biases and statistics too."""
    name = case.partition(" ")[0]
    inputs = NetworkInputs(
        {
            name: keras.Input(shape, name=name, dtype="bool" if "mask" in name else "float32")
            for name, shape in SHAPES.items()
        },
        vectors=(*IDS, *LISTS),
        numbers=tuple(NUMBERS),
        biases=tuple(f"{n}_bias" for n in (*IDS, *LISTS)),
        masks={n: f"{n}_mask" for n in LISTS},
    )
    tasks = TASKS if name in ("shared_bottom", "mmoe") else ("click",)
    with building_layers(name, seed):
        logits = build_logits(name, NETWORKS[name], inputs, params, dict.fromkeys(tasks, 0.0))
        network = Network(build_keras_model(name, inputs, logits))
    rng = np.random.default_rng(seed)
    for weight_name, variable in network.weights.items():
        value = rng.normal(size=variable.shape) * 0.5
        variable.assign(np.abs(value) + 0.5 if "variance" in weight_name else value)
    return network


def draw_inputs() -> dict[str, Array]:
    """Draws a batch: a row of tokens alone, one with padding, one that is all padding."""
    rng = np.random.default_rng(7)
    x = {n: rng.normal(size=(ROWS, *s)).astype(np.float32) for n, s in SHAPES.items()}
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]) > 0
    for name in LISTS:
        x[f"{name}_mask"] = mask
        x[name] = x[name] * mask[..., None]  # As `combine_positions` leaves padding.
    return x


def test_each_network_has_a_reference_and_a_row_of_the_guide() -> None:
    assert {case.partition(" ")[0] for case in CASES} == set(NETWORKS)
    guide = (Path(__file__).parents[3] / "docs/guide/networks.md").read_text()
    assert all(f"\n| `{name}` |" in guide for name in NETWORKS)


@pytest.mark.parametrize("case", CASES)
def test_a_network_is_what_its_paper_says(case: str) -> None:
    params, reference = CASES[case]
    network = build(case, params)
    weights, x = Weights(network), draw_inputs()
    found, expected = network(x), reference(weights, x)
    expected = expected if isinstance(expected, dict) else {"click": expected}
    assert set(found) == set(expected)
    for task, logits in found.items():
        assert logits.shape == (ROWS, 1)
        np.testing.assert_allclose(logits, expected[task], rtol=1e-4, atol=1e-4)
    assert not weights.unread


@pytest.mark.parametrize("case", [case for case in CASES if case[:3] in ("din", "bst")])
def test_what_stands_at_padded_positions_changes_no_output(case: str) -> None:
    network = build(case, CASES[case][0])
    x = draw_inputs()
    noisy = dict(x)
    noisy["clicks"] = np.where(x["clicks_mask"][..., None], x["clicks"], 1e3)
    if "gaps" in CASES[case][0]:
        noisy["gaps"] = np.where(x["gaps_mask"][..., None], x["gaps"], -1e3)
    for training in (False, True):
        pairs = [{name: v[name] for name in network.input_names} for v in (x, noisy)]
        outputs = [network.keras_model(each, training=training) for each in pairs]
        np.testing.assert_allclose(outputs[0]["click"], outputs[1]["click"], rtol=1e-5, atol=1e-5)


def test_batch_statistics_are_those_of_tokens_alone() -> None:
    x = draw_inputs()
    padded = {name: np.concatenate([v, np.zeros_like(v)]) for name, v in x.items()}
    means = []
    for batch in (x, padded):
        network = build("din", DIN)
        network.keras_model({n: batch[n] for n in network.input_names}, training=True)
        means.append(network.weights["dice/batch_normalization/moving_mean"].numpy())
    np.testing.assert_allclose(means[0], means[1], rtol=1e-5)
