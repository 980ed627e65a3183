"""Lists under factorization machines: each element is a field, whatever form the list comes in."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.models import RankingConfig
from training.models.ranking import RankingModel
from training.models.registry import build_model

LENGTH, SIZE = 4, 9
IDS = np.array([[4, 2, 4, 0], [5, 0, 0, 0], [0, 0, 0, 0], [2, 3, 8, 7]], np.int64)
VALUES = np.random.default_rng(0).normal(size=IDS.shape).astype(np.float32) * (IDS != 0)
OTHERS = np.array([[3, 0], [3, 4], [2, 0], [0, 0]], np.int64)
ALONE = np.array([2, 3, 1, 2], np.int64)
SPECS = (
    FeatureSpec("alone", "int64", "context", vocabulary_size=4),
    FeatureSpec("pairs", "int64", "context", (None,), vocabulary_size=SIZE),  # of any length
    FeatureSpec("others", "int64", "context", (None,), 2, vocabulary_size=5),
    FeatureSpec("values", "float32", "context", (None,)),
    FeatureSpec("label", "float32", "label"),
)
LISTS = {"features": ["alone", "pairs", "others"]}
WEIGHTED = {"weights": "values"}


@pytest.fixture(scope="module")
def manifest(tiny_manifest: Manifest) -> Manifest:
    return replace(tiny_manifest, schema=FeatureSchema(SPECS), statistics={})


def build(manifest: Manifest, network: str, **settings: Any) -> RankingModel:
    """Returns a model whose weights are all away from 0."""
    data = {"kind": "ranking", "network": network, "embedding_dim": 3, **LISTS, **settings}
    model = build_model(RankingConfig.model_validate(data), manifest, 1)
    assert isinstance(model, RankingModel)
    for number, variable in enumerate(model.named_variables.values()):
        noise = tf.random.stateless_normal(variable.shape, [number, 1])
        variable.assign(tf.cast(noise, variable.dtype))
    return model


def score(model: RankingModel, batch: dict[str, Any]) -> np.ndarray:
    [logits] = model.compute_logits(batch).values()
    return logits.numpy()


def machine(model: RankingModel, divided: bool = False, weighted: bool = True) -> np.ndarray:
    """Rendle 2010, equation 1: a double sum over pairs of the row's x, one by one."""
    tables = {name: table.rows.numpy().astype(np.float64) for name, table in model.tables.items()}
    [bias] = [v.numpy()[0] for n, v in model.network.weights.items() if n.endswith("bias/bias")]
    scores = []
    for row in range(len(IDS)):
        x: list[tuple[float, np.ndarray]] = [(1.0, tables["alone"][ALONE[row]])]
        linear = tables["alone_bias"][ALONE[row], 0]
        for name, ids in (("pairs", IDS), ("others", OTHERS)):
            tokens = np.flatnonzero(ids[row])
            for position in tokens:
                value = VALUES[row, position] if name == "pairs" and weighted else 1.0
                linear += value * tables[f"{name}_bias"][ids[row, position], 0]
                scale = len(tokens) if divided and name == "pairs" else 1
                x.append((value / scale, tables[name][ids[row, position]]))
        products = sum(a * b * (v @ w) for (a, v), (b, w) in itertools.combinations(x, 2))
        scores.append(bias + linear + products)
    return np.array(scores)


def forms() -> dict[str, dict[str, Any]]:
    """The same rows with lists padded, padded further, ragged, and as a sparse tensor."""
    wide = [[0, 0], [0, 3]]
    lengths = (IDS != 0).sum(axis=1)
    where = np.argwhere(IDS != 0)
    indices = np.stack([where[:, 0], IDS[IDS != 0]], axis=1)
    sparse = tf.SparseTensor(indices, VALUES[IDS != 0], [len(IDS), SIZE])
    made = {
        "padded": {"pairs": tf.constant(IDS), "values": tf.constant(VALUES)},
        "wide": {"pairs": tf.pad(IDS, wide), "values": tf.pad(VALUES, wide)},
        "ragged": {
            "pairs": tf.RaggedTensor.from_tensor(IDS, lengths),
            "values": tf.RaggedTensor.from_tensor(VALUES, lengths),
        },
        "sparse": {"pairs": sparse},
    }
    rows = {"alone": tf.constant(ALONE), "others": tf.constant(OTHERS)}
    return {form: {**rows, **lists} for form, lists in made.items()}


@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
def test_fm_multiplies_all_pairs_of_elements_and_fields(manifest, combiner) -> None:
    pooling = {"pairs": {**WEIGHTED, "combiner": combiner}}
    model = build(manifest, "fm", pooling=pooling)
    expected = machine(model, divided=combiner == "mean")
    for batch in forms().values():
        np.testing.assert_allclose(score(model, batch), expected, rtol=1e-4, atol=1e-5)


def test_elements_without_weights_count_once_each(manifest) -> None:
    model = build(manifest, "fm")
    expected = machine(model, weighted=False)
    linear = build(manifest, "lr")
    for name, table in linear.tables.items():
        table.rows.assign(model.tables[name].rows)
    for form in ("padded", "ragged"):
        batch = forms()[form]
        np.testing.assert_allclose(score(model, batch), expected, rtol=1e-4, atol=1e-5)
        assert np.abs(score(linear, batch) - expected).max() > 0.1


def test_positions_that_are_kept_give_the_same(manifest) -> None:
    """Their order is nothing to the sum, so that sparse tensors, whose ids are sorted, will do."""
    batch = forms()["padded"]
    specs = [replace(s, max_len=LENGTH) if s.name in ("pairs", "values") else s for s in SPECS]
    bounded = replace(manifest, schema=FeatureSchema(tuple(specs)))
    kept = build(bounded, "fm", pooling={"pairs": {**WEIGHTED, "combiner": "none"}})
    np.testing.assert_allclose(score(kept, batch), machine(kept), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(score(kept, forms()["sparse"]), machine(kept), rtol=1e-4, atol=1e-5)
    pooled = build(bounded, "deepfm", pooling={"pairs": {**WEIGHTED, "combiner": "none"}})
    for model, is_ordered in ((kept, False), (pooled, True)):
        [feature] = [f for f in model.embedded_inputs[0].features if f.name == "pairs"]
        assert feature.reads_order == is_ordered


def test_deepfm_adds_the_pairs_of_elements_to_what_its_MLP_reads(manifest) -> None:
    batch = forms()["padded"]
    for combiner, divided in ((None, False), ("mean", True)):
        pooling = {"pairs": {**WEIGHTED, "combiner": combiner}}
        deep = build(manifest, "deepfm", params={"hidden_units": [5]}, pooling=pooling)
        wide = build(manifest, "wide_deep", params={"hidden_units": [5]}, pooling=pooling)
        assert set(deep.network.weights) == set(wide.network.weights)  # Checkpoints load.
        for name, variable in wide.named_variables.items():
            variable.assign(deep.named_variables[name])
        linear = build(manifest, "lr", pooling={"pairs": WEIGHTED})
        machines = build(manifest, "fm", pooling=pooling)
        for model in (linear, machines):
            for name, table in model.tables.items():
                table.rows.assign(deep.tables[name].rows)
            model.network.weights["bias/bias"].assign([0.0])
        pairs = machine(machines, divided=divided) - score(linear, batch)
        found = score(deep, batch) - score(wide, batch)
        np.testing.assert_allclose(found, pairs, rtol=1e-4, atol=1e-4)


def test_vectors_of_two_lengths_are_refused(manifest) -> None:
    with pytest.raises(ConfigError, match=r"(?s)one length.*pairs: 5"):
        build(manifest, "fm", embeddings={"pairs": {"dim": 5}})
