from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.models import DSSMConfig, YouTubeDNNConfig
from training.models.embedded_inputs import EmbeddedInputs, InputFeature
from training.models.registry import build_model
from training.models.retrieval import tell_later_items
from training.models.two_towers import DSSM

WEIGHTED = "position_weighted"
USERS = {
    "user_id": tf.constant([2, 3], tf.int64),
    "gender": tf.constant([2, 3], tf.int64),
    "history": tf.constant([[5, 6, 7], [8, 0, 0]], tf.int64),
}


def test_an_item_alone_is_its_normalised_row(tiny_manifest: Manifest) -> None:
    config = DSSMConfig(embedding_dim=4, item_features=("movie_id",))
    model = DSSM(config, tiny_manifest, 1)
    rows = model.tables["movie_id"].rows.numpy()[[2, 9]]
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = model.embed_items({"movie_id": tf.constant([2, 9])})
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert model.item_inputs == ("movie_id",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user_features": ("gendr",)}, "gender"),
        ({"item_features": ("movie_id", "history")}, "role user"),
        ({"user_features": ()}, "no input feature"),
        ({"pooling": {"genre": {}}}, "names no list"),
        ({"pooling": {"genres": {"combiner": "none"}}}, "one vector of each list"),
        ({"pooling": {"genres": {"weights": "history"}}}, "a list of numbers"),
        ({"pooling": {"genres": {"weights": "histori"}}}, "did you mean 'history'"),
        ({"pooling": {"history": {}}, "history_pooling": WEIGHTED}, "both pool the history"),
        # They would quietly become the plain mean.
        ({"user_features": ("user_id",), "history_pooling": WEIGHTED}, "needs a history"),
    ],
)
def test_features_that_do_not_fit_are_refused(changes, message, tiny_manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=message):
        DSSM(DSSMConfig.model_validate(changes), tiny_manifest, 1)


@pytest.mark.parametrize("pooling", ["mean", "sum", "max", "last", "position_weighted"])
def test_a_pooled_history_is_read_as_far_as_the_longest_of_train(
    pooling: str, tiny_manifest: Manifest
) -> None:
    """However it comes: padded, wider than any list, or ragged."""
    statistics = {"train": {"history": {"length": {"max": 6}}}}
    manifest = replace(unbound_history(tiny_manifest), statistics=statistics)
    settings = {"history_pooling": pooling}
    if pooling != "position_weighted":
        settings = {"pooling": {"history": {"combiner": pooling}}}
    model = DSSM(DSSMConfig.model_validate({"embedding_dim": 4, **settings}), manifest, 1)
    if pooling == "position_weighted":
        logits = model.embedded_inputs[0].position_weights["history"].logits
        logits.assign([3.0, 0, 0, 1, 0, -2])
    history = tf.constant([[*range(2, 14)], [8, 9, *[0] * 10]], tf.int64)
    expected = model.embed_users({**USERS, "history": history[:, :6]}).numpy()
    padded = model.embed_users({**USERS, "history": history}).numpy()
    ragged = tf.RaggedTensor.from_tensor(history, padding=0)
    np.testing.assert_allclose(padded, expected, atol=1e-6)
    np.testing.assert_allclose(model.embed_users({**USERS, "history": ragged}), expected, atol=1e-6)


def unbound_history(manifest: Manifest) -> Manifest:
    specs = [
        replace(spec, max_len=None) if spec.name == "history" else spec
        for spec in manifest.schema.features
    ]
    return replace(manifest, schema=FeatureSchema(tuple(specs)))


def test_numbers_are_read_as_they_are() -> None:
    specs = [
        FeatureSpec("price", "float32", "item"),
        FeatureSpec("size", "float32", "item", shape=(2,)),
        FeatureSpec("year", "int64", "item"),
    ]
    inputs = EmbeddedInputs([InputFeature(spec, None) for spec in specs], {})
    values = {"price": [0.5], "size": [[1.0, 2.0]], "year": [3]}
    found = inputs({name: tf.constant(value) for name, value in values.items()})
    expected = {"price": [[0.5]], "size": [[1.0, 2.0]], "year": [[3.0]]}
    assert {name: value.numpy().tolist() for name, value in found.items()} == expected
    shapes = {name: tensor.shape for name, tensor in inputs.build_keras_inputs().items()}
    assert shapes == {"price": (None, 1), "size": (None, 2), "year": (None, 1)}


LAYERS = {
    "embedding_dim": 4,
    "user_hidden_units": (6, 5),
    "item_hidden_units": (3,),
    "batch_normalization": True,
}
ITEMS = {"movie_id": tf.constant([2, 9], tf.int64), "genres": tf.constant([[2, 3], [4, 0]])}


def randomize(model: DSSM) -> dict[str, np.ndarray]:
    """Sets all weights of the networks to draws, and returns them."""
    rng, found = np.random.default_rng(3), {}
    for network in model.networks:
        for name, weight in network.weights.items():
            value = rng.normal(size=weight.shape)
            value = np.abs(value) + 0.1 if name.endswith("variance") else value
            weight.assign(value)
            found[f"{network.label}/{name}"] = value
    return found


def run_tower(weights: dict[str, np.ndarray], tower: str, hidden: np.ndarray, layers: int):
    """The layers by hand: dense, normalization by moving statistics, ReLU."""
    own = {name.removeprefix(f"{tower}/"): value for name, value in weights.items()}
    for number in range(layers):
        end = f"_{number}" if number else ""
        hidden = hidden @ own[f"dense{end}/kernel"] + own[f"dense{end}/bias"]
        part = f"batch_normalization{end}"
        scale = own[f"{part}/gamma"] / np.sqrt(own[f"{part}/moving_variance"] + 1e-3)
        normed = (hidden - own[f"{part}/moving_mean"]) * scale + own[f"{part}/beta"]
        hidden = np.maximum(normed, 0.0)
    end = f"_{layers}" if layers else ""
    return hidden @ own[f"dense{end}/kernel"] + own[f"dense{end}/bias"]


def test_layers_of_towers_equal_the_reference(tiny_manifest: Manifest) -> None:
    model = DSSM(DSSMConfig(**LAYERS, normalize=False), tiny_manifest, 1)
    weights = randomize(model)
    for features, tower, layers in ((USERS, "user_tower", 2), (ITEMS, "item_tower", 1)):
        side = model.embedded_inputs[tower == "item_tower"]
        inputs = np.concatenate([value.numpy() for value in side(features).values()], axis=1)
        found = model.embed_users(features) if layers == 2 else model.embed_items(features)
        np.testing.assert_allclose(found, run_tower(weights, tower, inputs, layers), rtol=1e-4)


def test_items_that_know_what_came_later_are_told(tiny_manifest: Manifest) -> None:
    model = build_model(DSSMConfig(item_features=("movie_id", "genres")), tiny_manifest, 1)
    assert not tell_later_items(model, tiny_manifest)
    columns = [{"name": "id"}, {"name": "kinds"}]
    made = {
        "features": [{"name": "genres", "column": "kinds"}, {"name": "movie_id", "column": "id"}],
        "joins": [{"source": "items", "column": "id", "valid_from": "t"}],
        "sources": {"items": {"key": "id", "columns": columns}},
    }
    for build in (made, {**made, "joins": [], "rolling": [{"name": "kinds"}]}):
        manifest = replace(tiny_manifest, source=replace(tiny_manifest.source, config=build))
        (note,) = tell_later_items(model, manifest)
        assert "holds genres as of the end of the log" in note


def test_youtube_dnn_pools_what_a_user_met(tiny_manifest: Manifest) -> None:
    """Without hidden layers the vector is the mean of the items' own rows, of no user's id."""
    config = YouTubeDNNConfig(embedding_dim=4, user_features=("history",))
    model = DSSM(config, tiny_manifest, 1)
    assert (model.user_inputs, model.item_inputs) == (("history",), ("movie_id",))
    rows = model.tables["movie_id"].rows.numpy()
    found = model.embed_users({"history": tf.constant([[5, 6, 7], [8, 0, 0], [0, 0, 0]])}).numpy()
    expected = [rows[[5, 6, 7]].mean(axis=0), rows[8], np.zeros(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(model.embed_items(ITEMS), rows[[2, 9]], rtol=1e-6)
    assert not model.dense_variables
