"""Sequence models: networks beside plain NumPy, what a position sees, what is a target."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSchema
from conf.training.input import HeldOutConfig
from conf.training.models import (
    BSTConfig,
    ComiRecConfig,
    GRUConfig,
    HSTUConfig,
    SASRecConfig,
)
from conf.training.train import TrainConfig
from tests.training.dynamic_runs import build_trainer
from tests.training.networks.test_networks import (
    Array,
    Weights,
    norm,
    reference_block,
    relu,
    sigmoid,
    softmax,
)
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import build_item_index
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.models.retrieval import choose_vectors, score_catalogue, score_rows
from training.models.sequence import SequenceModel, require_held_out
from training.networks.network import (
    Network,
    NetworkInputs,
    StepContext,
    build_keras_model,
    building_layers,
)
from training.networks.sequences import SEQUENCE_NETWORKS, read_sequence
from training.objectives.objective import compute_binary_loss

LENGTH, DIM = 5, 4
LENGTHS = (5, 3, 0, 1)  # Of the rows' sequences: one fills the list, one is empty.
SEED = tf.constant([1, 8])


def build_network(config: Any, *names: str) -> Network:
    """A network over lists of one mask; its weights are random ones."""
    tensors = {name: keras.Input((LENGTH, DIM), name=name) for name in names}
    tensors["items_mask"] = keras.Input((LENGTH,), dtype="bool", name="items_mask")
    inputs = NetworkInputs(tensors, vectors=names, masks=dict.fromkeys(names, "items_mask"))
    with building_layers("test", 1):
        sequence = read_sequence(inputs, names)
        output = SEQUENCE_NETWORKS[config.name].build(sequence, config)
        network = Network(build_keras_model("test", tensors, output))
    rng = np.random.default_rng(1)
    for variable in network.weights.values():
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return network


def draw_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(2)
    mask = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    shape = (len(LENGTHS), LENGTH, DIM)
    lists = {n: rng.normal(size=shape).astype(np.float32) for n in ("items", "gaps")}
    return {n: v * mask[..., None] for n, v in lists.items()} | {"items_mask": mask}


def read_in_time(x: dict[str, Array], row: int) -> Array:
    """The vectors of a row that are read, the oldest first: zeros stand for the beginning."""
    items = (x["items"][row] + x["gaps"][row])[: LENGTHS[row]][::-1] * np.sqrt(DIM)
    return np.concatenate([np.zeros((1, DIM)), items])[-LENGTH:]


def positions(w: Weights, length: int) -> Array:
    return w["add_positions/positions"][:length][::-1]


def attend(w: Weights, name: str, each: Array, t: int) -> Array:
    """What position t reads of itself and of what came before, by two heads."""
    found = w[f"{name}/attention_output/bias"].copy()
    for head in range(2):
        q, k, v = (
            each[: t + 1] @ w[f"{name}/{part}/kernel"][:, head] + w[f"{name}/{part}/bias"][head]
            for part in ("query", "key", "value")
        )
        found += softmax(k @ q[t] / np.sqrt(2)) @ v @ w[f"{name}/attention_output/kernel"][head]
    return found


def reference_sasrec(w: Weights, sequence: Array, is_gated: bool = False) -> Array:
    hidden = sequence + positions(w, len(sequence))
    names = (f"dense_{n}" if n else "dense" for n in itertools.count())
    for number, attention in enumerate(("multi_head_attention", "multi_head_attention_1")):
        each = norm(w, hidden, f"layer_normalization{'' if number == 0 else f'_{2 * number}'}")
        attended = np.array([attend(w, attention, each, t) for t in range(len(each))])
        hidden = hidden + (sigmoid(w.dense(hidden, next(names))) if is_gated else 1.0) * attended
        each = norm(w, hidden, f"layer_normalization_{2 * number + 1}")
        if is_gated:
            gate, up, down = (w[f"{next(names)}/kernel"] for _ in range(3))
            added = ((each @ gate) * sigmoid(each @ gate) * (each @ up)) @ down
            hidden = hidden + sigmoid(w.dense(hidden, next(names))) * added
        else:
            first, last = next(names), next(names)
            hidden = hidden + w.dense(relu(w.dense(each, first)), last)
    return norm(w, hidden, "layer_normalization_4")


def reference_gru(w: Weights, sequence: Array) -> Array:
    kernel, recurrent, bias = (
        w[f"gru/gru_cell/{part}"] for part in ("kernel", "recurrent_kernel", "bias")
    )
    state, states = np.zeros(DIM), []
    for x in sequence:
        from_x, from_state = x @ kernel + bias[0], state @ recurrent + bias[1]
        update, reset = (sigmoid(from_x[i : i + DIM] + from_state[i : i + DIM]) for i in (0, DIM))
        new = np.tanh(from_x[2 * DIM :] + reset * from_state[2 * DIM :])
        state = update * state + (1 - update) * new
        states.append(state)
    return np.array(states)


def reference_bst(w: Weights, sequence: Array) -> Array:
    everyone = np.ones(len(sequence), bool)
    return reference_block(w, sequence + positions(w, len(sequence)), everyone)[-1:]


NETWORKS: dict[str, Any] = {
    "sasrec": (SASRecConfig(heads=2, dropout=0.5), reference_sasrec),
    "ligr": (
        SASRecConfig(heads=2, dropout=0.5, block="ligr"),
        partial(reference_sasrec, is_gated=True),
    ),
    "gru": (GRUConfig(dropout=0.5), reference_gru),
    "bst": (BSTConfig(heads=2), reference_bst),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_what_its_paper_says(name: str) -> None:
    config, reference = NETWORKS[name]
    network, x = build_network(config, "items", "gaps"), draw_inputs()
    weights, found = Weights(network), network(x).numpy()
    for row in range(len(LENGTHS)):
        expected = reference(weights, read_in_time(x, row))[::-1]
        own = found[row, : len(expected)] if found.ndim == 3 else found[row : row + 1]
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(found).all()
    assert not weights.unread


def test_interests_are_what_the_paper_says() -> None:
    """Of ComiRec, whose users have several vectors."""
    network = build_network(ComiRecConfig(interests=3, dropout=0.5), "items")
    x, weights = draw_inputs(), Weights(network)
    found, items = network(x).numpy(), x["items"]
    for row, length in enumerate(LENGTHS):
        if not length:  # Of a user without an item nothing is known.
            assert not found[row].any()
            continue
        columns = items[row, :length].T  # H, [dim, length]
        placed = columns * np.sqrt(DIM) + weights["add_positions/positions"][:length].T
        hidden = np.tanh(weights["dense/kernel"].T @ placed)
        attention = softmax(weights["dense_1/kernel"].T @ hidden).T  # A, [length, interests]
        np.testing.assert_allclose(found[row], (columns @ attention).T, rtol=1e-4, atol=1e-5)
    assert not weights.unread


MODELS: dict[str, Any] = {
    "sasrec": SASRecConfig(embedding_dim=4, heads=2, dropout=None),
    "ligr": SASRecConfig(embedding_dim=4, heads=2, block="ligr", dropout=None),
    "hstu": HSTUConfig(embedding_dim=4, heads=2, dropout=None, normalize=False),
    "gru": GRUConfig(embedding_dim=4, dropout=None),
    "bst": BSTConfig(embedding_dim=4, heads=2, dropout=None),
    "comirec": ComiRecConfig(embedding_dim=4, interests=3),
}
HISTORY = np.array([[5, 6, 7, 0, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, 3, 2], [0] * 8, [3, 1] + [0] * 6])
ITEMS = np.array([4, 10, 2, 1])  # The last one is unknown.


def build(config: Any, manifest: Manifest) -> SequenceModel:
    model = build_model(config, manifest, 1)
    assert isinstance(model, SequenceModel)
    return model


def embed(model: SequenceModel, history: Any) -> Array:
    values = history if isinstance(history, tf.RaggedTensor) else tf.constant(history, tf.int64)
    return model.embed_users({"history": values}).numpy()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny_manifest: Manifest) -> SequenceModel:
    config = MODELS[request.param].model_copy(update={"item_features": ("movie_id",)})
    return build(config, tiny_manifest)


def test_padding_and_length_change_nothing(model: SequenceModel) -> None:
    vectors = embed(model, HISTORY)
    assert vectors.shape == ((4, 4) if model.interests is None else (4, 3, 4))
    assert np.isfinite(vectors).all()
    if model.interests:  # From the start they differ: what begins alike learns alike.
        assert np.ptp(vectors[:2], axis=1).max(axis=1).min() > 1e-3
    ragged = tf.RaggedTensor.from_tensor(tf.constant(HISTORY, tf.int64), padding=0)
    narrow = HISTORY[[0, 3], :3]
    longer = np.concatenate([HISTORY, np.full_like(HISTORY, 11)], axis=1)[1:2]  # Too old to count.
    np.testing.assert_allclose(embed(model, ragged), vectors, atol=1e-6)
    np.testing.assert_allclose(embed(model, narrow), vectors[[0, 3]], atol=1e-6)
    np.testing.assert_allclose(embed(model, longer), vectors[1:2], atol=1e-6)
    np.testing.assert_allclose(embed(model, np.tile(HISTORY, 1250)[[1]]), vectors[1:2], atol=1e-6)


def test_items_are_rows_of_the_sequence_s_table(model: SequenceModel) -> None:
    assert set(model.tables) == {"movie_id"}
    assert (model.user_inputs, model.item_inputs) == (("history",), ("movie_id",))
    rows = model.tables["movie_id"].rows.numpy()[[2, 9]]
    found = model.embed_items({"movie_id": tf.constant([2, 9], tf.int64)})
    np.testing.assert_array_equal(found, rows)


def draw_queries(model: SequenceModel, history: Array = HISTORY) -> Any:
    batch = {"history": tf.constant(history, tf.int64), "movie_id": tf.constant(ITEMS, tf.int64)}
    return model.embed_queries(batch, "movie_id", StepContext(SEED))


@pytest.mark.parametrize("name", ["sasrec", "ligr", "hstu", "gru"])
def test_each_position_has_the_item_that_followed_as_its_target(
    name: str, tiny_manifest: Manifest
) -> None:
    model = build(MODELS[name], tiny_manifest)
    queries = draw_queries(model)
    assert (queries.per_row, int(queries.row_count)) == (8, 4)
    expected = np.concatenate([ITEMS[:, None], HISTORY[:, :-1]], axis=1)
    np.testing.assert_array_equal(tf.reshape(queries.target_ids, [4, 8]), expected)
    # Neither padding nor an unknown item is one that could be recommended.
    np.testing.assert_allclose(tf.reshape(queries.weights, [4, 8]), (expected > 1) / 8)
    np.testing.assert_array_equal(queries.rows, np.repeat(range(4), 8))
    vectors = tf.reshape(queries.vectors, [4, 8, 4]).numpy()
    np.testing.assert_allclose(vectors[:, 0], embed(model, HISTORY), atol=1e-6)
    # A position sees what came before its target: the target itself and what follows do not count.
    changed = HISTORY.copy()
    changed[1, :3] = 12
    after = tf.reshape(draw_queries(model, changed).vectors, [4, 8, 4]).numpy()
    np.testing.assert_allclose(after[1, 3:], vectors[1, 3:], atol=1e-6)
    assert np.abs(after[1, :3] - vectors[1, :3]).max(axis=1).min() > 1e-5


def test_the_interest_nearest_to_the_target_learns_it(tiny_manifest: Manifest) -> None:
    config = MODELS["comirec"].model_copy(update={"embedding_stddev": 1.0})
    model = build(config.model_copy(update={"item_features": ("movie_id",)}), tiny_manifest)
    queries = draw_queries(model)
    vectors, items = embed(model, HISTORY), model.tables["movie_id"].rows.numpy()[ITEMS]
    nearest = np.einsum("bkd,bd->bk", vectors, items).argmax(axis=1)
    assert len(set(nearest.tolist())) > 1
    np.testing.assert_allclose(queries.vectors, vectors[np.arange(4), nearest], atol=1e-6)
    np.testing.assert_array_equal(queries.target_ids, ITEMS)
    assert queries.per_row == 1


def test_scores_are_those_of_the_nearest_vector_and_so_are_gradients() -> None:
    rng = np.random.default_rng(3)
    users, items = tf.constant(rng.normal(size=(6, 3, 4))), tf.constant(rng.normal(size=(6, 4)))
    each = np.einsum("bkd,nd->bkn", users, items)
    np.testing.assert_allclose(score_catalogue(users, items), each.max(axis=1))
    np.testing.assert_allclose(score_rows(users, items), np.diagonal(each.max(axis=1)))
    chosen = choose_vectors(users, items)
    np.testing.assert_allclose(score_rows(chosen, items), score_rows(users, items))
    labels = tf.constant([0.0, 1.0] * 3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(users)
        losses = compute_binary_loss(labels, score_rows(users, items) / 0.5)
        nearest = choose_vectors(users, items)
        alone = compute_binary_loss(labels, score_rows(nearest, items) / 0.5)
    np.testing.assert_allclose(losses, alone)
    gradient = tape.gradient(losses, users).numpy()
    np.testing.assert_allclose(gradient, tape.gradient(alone, users))
    assert (np.abs(gradient).max(axis=2) > 0).sum(axis=1).tolist() == [1] * 6
    one = users[:, :1]
    np.testing.assert_array_equal(score_catalogue(one, items), score_catalogue(one[:, 0], items))
    np.testing.assert_allclose(score_rows(one, items), score_rows(one[:, 0], items))


def test_features_beside_the_sequence_and_of_items(tiny_manifest: Manifest) -> None:
    changes = {"user_features": ("gender",), "hidden_units": (6,), "normalize": True}
    for config in MODELS.values():
        if config.name == "comirec":
            continue
        model = build(config.model_copy(update=changes), tiny_manifest)
        assert model.user_inputs == ("history", "gender")
        assert model.item_inputs == ("movie_id", "genres")  # All of role item: a tower.
        users = {"history": tf.constant(HISTORY, tf.int64)}
        one, other = (
            model.embed_users({**users, "gender": tf.fill([4], tf.constant(g, tf.int64))})
            for g in (2, 3)
        )
        items = {"movie_id": tf.constant([2, 9]), "genres": tf.constant([[2, 3], [4, 0]])}
        for vectors in (one, other, model.embed_items(items)):
            np.testing.assert_allclose(tf.norm(vectors, axis=1), 1, rtol=1e-5)
        assert np.abs(one - other).max() > 1e-4


def change(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    features = tuple(
        replace(spec, **changes) if spec.name == name else spec for spec in manifest.schema.features
    )
    return replace(manifest, schema=FeatureSchema(features), statistics={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": ("histroy",)}, "did you mean 'history'"),
        ({"sequence": ("movie_id",)}, "model.sequence names a feature of another role"),
        ({"sequence": ("gender",)}, "positions of a list"),
        ({"user_features": ("history",)}, "neither joined nor pooled"),
        ({"pooling": {"history": {"combiner": "max"}}}, "neither joined nor pooled"),
        ({"item_features": ()}, "no input feature"),
    ],
)
def test_features_that_the_model_cannot_read_are_refused(
    changes: dict[str, Any], message: str, tiny_manifest: Manifest
) -> None:
    with pytest.raises(ConfigError) as refused:
        build(BSTConfig.model_validate(changes), tiny_manifest)
    assert message in refused.value.render()


def test_datasets_without_a_sequence_of_items_are_refused(tiny_manifest: Manifest) -> None:
    unnamed = replace(tiny_manifest, keys=replace(tiny_manifest.keys, history=None))
    assert build(SASRecConfig(), unnamed).user_inputs == ("history",)
    no_items = {"encoding": "others", "shared_embedding": "others"}
    with pytest.raises(ConfigError, match="no history, or several"):
        build(SASRecConfig(), change(unnamed, "history", **no_items))
    for name in ("bst", "comirec"):
        with pytest.raises(ConfigError, match="whose length is known"):
            build(MODELS[name], change(tiny_manifest, "history", max_len=None))
    others = change(tiny_manifest, "history", encoding="others", shared_embedding="others")
    with pytest.raises(ConfigError, match="each item of the sequence is a target"):
        build(SASRecConfig(), others)
    keys: dict[str, Any] = {"vocabulary_size": None, "encoding": "identity"}
    keyed = change(change(tiny_manifest, "history", **keys), "movie_id", **keys)
    tables = {"items": {"kind": "dynamic", "features": ["movie_id", "history"]}}
    with pytest.raises(ConfigError, match="in a static table"):
        build(SASRecConfig.model_validate({"embeddings": tables}), keyed)
    with pytest.raises(ConfigError, match="in a static table"):  # Ids, but steps get rows.
        build(SASRecConfig.model_validate({"embeddings": tables}), tiny_manifest)
    assert build(SASRecConfig(every_position=False), others).user_inputs == ("history",)


def test_pairs_cannot_be_held_out_of_later_histories(tiny_manifest: Manifest) -> None:
    pairs = HeldOutConfig(hash_of=("user_id", "movie_id"), share=0.2)
    with pytest.raises(ConfigError, match="trained on all the same"):
        require_held_out(SASRecConfig(), pairs, tiny_manifest)
    items, users = (HeldOutConfig(hash_of=name, share=0.2) for name in ("movie_id", "user_id"))
    with pytest.raises(ConfigError, match="trained on all the same"):
        require_held_out(SASRecConfig(), items, tiny_manifest)
    require_held_out(SASRecConfig(), users, tiny_manifest)
    require_held_out(SASRecConfig(every_position=False), pairs, tiny_manifest)

    def built(**config: Any) -> Manifest:
        return replace(tiny_manifest, source=replace(tiny_manifest.source, config=config))

    made = {"histories": [{"name": "history"}]}
    for samples in (8, "last"):  # Pieces as long as the history, or one alone.
        require_held_out(SASRecConfig(), pairs, built(**made, train_samples=samples))
    with pytest.raises(ConfigError, match="max_len or more"):
        require_held_out(SASRecConfig(), pairs, built(**made, train_samples=7))
    days = HeldOutConfig(hash_of="gender", share=0.2)
    require_held_out(SASRecConfig(), days, tiny_manifest)  # Rows bring their own histories.
    with pytest.raises(ConfigError, match="trained on all the same"):
        require_held_out(SASRecConfig(), days, built(**made))
    within = [{"name": "history", "within_session": True}]
    require_held_out(SASRecConfig(), days, built(histories=within))


def test_rows_that_lose_or_repeat_targets_are_told(tiny_manifest: Manifest) -> None:
    assert tiny_manifest.schema["history"].max_len == 8

    def notes(config: Any, samples: Any) -> str:
        made = {"histories": [{"name": "history"}], "train_samples": samples}
        built_by = {"train_samples": "all"} if samples is None else made
        source = replace(tiny_manifest.source, config=built_by)
        return " ".join(build(config, replace(tiny_manifest, source=source)).notes)

    assert "many times in an epoch" in notes(SASRecConfig(), "all")
    assert "no targets" in notes(SASRecConfig(every_position=False), 5)
    assert "no targets" in notes(ComiRecConfig(interests=2), "last")
    assert "targets of several rows" in notes(SASRecConfig(), 5)
    assert "no targets" in notes(SASRecConfig(), 9)
    assert not notes(SASRecConfig(), 8)
    assert not notes(SASRecConfig(), "last")
    assert not notes(SASRecConfig(every_position=False), "all")
    assert not notes(SASRecConfig(), None)


def train(version: Path, run: Path, model: dict[str, Any], epochs: int, rate: float) -> Any:
    """The model of a run of a few epochs."""
    sections: dict[str, Any] = {
        "model": {"item_features": ["movie_id"], **model},
        "evaluation": {"ks": [8], "sampled_negatives": None, "slices": []},
        "input": {"batch_size": 64, "shuffle_buffer": 3000},
        "optimizer": {"learning_rate": rate},
        "fit": {"epochs": epochs, "steps_per_loop": 4, "early_stopping": None},
    }
    config = TrainConfig.model_validate({"dataset": "tiny", "name": "t", **sections})
    trainer = build_trainer(config, version)
    trainer.fit(run, None)
    return TrainedModel(run, trainer.parts.model, config, read_manifest(version), version)


def test_it_learns_what_popularity_cannot(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    settings = {"name": "sasrec", "embedding_dim": 8, "heads": 2, "dropout": 0.2}
    model = train(tiny_version, tmp_path, settings, epochs=2, rate=0.01).model
    test = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "test", 100)))
    index = build_item_index(model, tiny_version, tiny_manifest, 64)
    scores = model.embed_users(test).numpy() @ index.vectors.T
    own = scores[np.arange(60), np.searchsorted(index.ids, test["movie_id"])][:, None]
    # Nine of ten events stay in the user's group of ten items; popularity hits a quarter.
    assert ((scores > own).sum(axis=1) < 10).mean() > 0.65
