"""Sequence models: networks beside plain NumPy, what a position sees, what is a target, runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np
import pytest
import tensorflow as tf

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
    SequenceConfig,
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
from training.checkpoint.manager import restore_newest
from training.checkpoint.restore import TrainedModel
from training.checkpoint.saved_tensors import collect_state
from training.evaluation.item_index import build_item_index
from training.input.batches import build_eval_dataset
from training.models.registry import build_model
from training.models.sequence import SequenceModel, require_held_out, trains_everywhere
from training.networks.network import (
    Network,
    NetworkInputs,
    StepContext,
    build_keras_model,
    building_layers,
)
from training.networks.sequences import (
    SEQUENCE_NETWORKS,
    read_sequence,
)

LENGTH, DIM = 5, 4
LENGTHS = (5, 3, 0, 1)  # Of the rows' sequences: one fills the list, one is empty.
SEED = tf.constant([1, 8])
Step = Callable[[Weights, Array], Array]


def build_network(config: Any) -> Network:
    """A network over two lists, `items` and `gaps`; its weights are random ones."""
    tensors = {name: keras.Input((LENGTH, DIM), name=name) for name in ("items", "gaps")}
    tensors["items_mask"] = keras.Input((LENGTH,), dtype="bool", name="items_mask")
    masks = {"items": "items_mask", "gaps": "items_mask"}
    inputs = NetworkInputs(tensors, vectors=("items", "gaps"), masks=masks)
    with building_layers("test", 1):
        sequence = read_sequence(inputs, ("items", "gaps"))
        output = SEQUENCE_NETWORKS[config.name].build(sequence, config)
        network = Network(build_keras_model("test", tensors, output))
    rng = np.random.default_rng(1)
    for variable in network.weights.values():
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return network


def draw_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(2)
    mask = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    lists = {n: rng.normal(size=(len(LENGTHS), LENGTH, DIM)) for n in ("items", "gaps")}
    return {n: v * mask[..., None] for n, v in lists.items()} | {"items_mask": mask}


def read_in_time(x: dict[str, Array], row: int) -> Array:
    """The vectors of a row that are read, the oldest first: zeros stand for the beginning."""
    items = (x["items"][row] + x["gaps"][row])[: LENGTHS[row]][::-1] * np.sqrt(DIM)
    return np.concatenate([np.zeros((1, DIM)), items])[-LENGTH:]


def positions(w: Weights, length: int) -> Array:
    return w["add_positions/positions"][:length][::-1]


def reference_sasrec(w: Weights, sequence: Array) -> Array:
    hidden = sequence + positions(w, len(sequence))
    for number, attention in enumerate(("multi_head_attention", "multi_head_attention_1")):
        each = norm(w, hidden, f"layer_normalization{'' if number == 0 else f'_{2 * number}'}")
        hidden = hidden + np.array([attend(w, attention, each, t) for t in range(len(each))])
        each = norm(w, hidden, f"layer_normalization_{2 * number + 1}")
        first, last = ("dense", "dense_1") if number == 0 else ("dense_2", "dense_3")
        hidden = hidden + w.dense(relu(w.dense(each, first)), last)
    return norm(w, hidden, "layer_normalization_4")


def silu(x: Array) -> Array:
    return x * sigmoid(x)


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


def reference_ligr(w: Weights, sequence: Array) -> Array:
    hidden = sequence + positions(w, len(sequence))
    kernels = iter(["", *(f"_{n}" for n in range(1, 20))])

    def dense() -> str:
        return f"dense{next(kernels)}"

    for number, attention in enumerate(("multi_head_attention", "multi_head_attention_1")):
        each = norm(w, hidden, f"layer_normalization{'' if number == 0 else f'_{2 * number}'}")
        attended = np.array([attend(w, attention, each, t) for t in range(len(each))])
        hidden = hidden + sigmoid(w.dense(hidden, dense())) * attended
        each = norm(w, hidden, f"layer_normalization_{2 * number + 1}")
        gate, up, down = (w[f"{dense()}/kernel"] for _ in range(3))
        added = (silu(each @ gate) * (each @ up)) @ down
        hidden = hidden + sigmoid(w.dense(hidden, dense())) * added
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


NETWORKS: dict[str, tuple[Any, Step]] = {
    "sasrec": (SASRecConfig(heads=2, dropout=0.5), reference_sasrec),
    "ligr": (SASRecConfig(heads=2, dropout=0.5, block="ligr"), reference_ligr),
    "gru": (GRUConfig(dropout=0.5), reference_gru),
    "bst": (BSTConfig(heads=2), reference_bst),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_what_its_paper_says(name: str) -> None:
    config, reference = NETWORKS[name]
    network, x = build_network(config), draw_inputs()
    weights = Weights(network)
    tensors = {n: tf.constant(v, tf.bool if v.dtype == bool else tf.float32) for n, v in x.items()}
    found = network(tensors).numpy()
    for row in range(len(LENGTHS)):
        expected = reference(weights, read_in_time(x, row))[::-1]
        own = found[row, : len(expected)] if found.ndim == 3 else found[row : row + 1]
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)
    assert np.isfinite(found).all()
    assert not weights.unread


MODELS: dict[str, Any] = {
    "sasrec": SASRecConfig(embedding_dim=4, heads=2, dropout=None),
    "ligr": SASRecConfig(embedding_dim=4, heads=2, block="ligr", dropout=None),
    "hstu": HSTUConfig(embedding_dim=4, heads=2, dropout=None, normalize=False),
    "gru": GRUConfig(embedding_dim=4, dropout=None),
    "bst": BSTConfig(embedding_dim=4, heads=2, dropout=None),
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
    assert vectors.shape == (4, 4)
    assert np.isfinite(vectors).all()
    ragged = tf.RaggedTensor.from_tensor(tf.constant(HISTORY, tf.int64), padding=0)
    narrow = HISTORY[[0, 3], :3]
    longer = np.concatenate([HISTORY, np.full_like(HISTORY, 11)], axis=1)[1:2]  # Too old to count.
    np.testing.assert_allclose(embed(model, ragged), vectors, atol=1e-6)
    np.testing.assert_allclose(embed(model, narrow), vectors[[0, 3]], atol=1e-6)
    np.testing.assert_allclose(embed(model, longer), vectors[1:2], atol=1e-6)
    np.testing.assert_allclose(embed(model, np.tile(HISTORY, 1250)[[1]]), vectors[1:2], atol=1e-6)


def test_users_differ_by_items_and_their_order(model: SequenceModel) -> None:
    vectors = embed(model, HISTORY)
    moved = embed(model, HISTORY[:2, [1, 0, *range(2, 8)]])
    assert np.abs(moved - vectors[:2]).max(axis=1).min() > 1e-4
    assert np.abs(vectors[2] - vectors[[0, 1, 3]]).max(axis=1).min() > 1e-4


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


@pytest.mark.parametrize("config", [MODELS["bst"], GRUConfig(every_position=False, dropout=None)])
def test_without_targets_in_the_sequence_a_row_is_one_query(
    config: Any, tiny_manifest: Manifest
) -> None:
    model = build(config, tiny_manifest)
    queries = draw_queries(model)
    assert queries.per_row == 1
    np.testing.assert_array_equal(queries.target_ids, ITEMS)
    np.testing.assert_allclose(queries.vectors, embed(model, HISTORY), atol=1e-6)


def test_features_beside_the_sequence_and_of_items(tiny_manifest: Manifest) -> None:
    changes = {"user_features": ("gender",), "hidden_units": (6,), "normalize": True}
    for config in MODELS.values():
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
    with pytest.raises(ConfigError, match="whose length is known"):
        build(BSTConfig(), change(tiny_manifest, "history", max_len=None))
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


def test_every_config_of_a_sequence_has_its_network() -> None:
    configs = {config().name: config() for config in get_args(SequenceConfig)}
    assert set(configs) == set(SEQUENCE_NETWORKS)
    for name, network in SEQUENCE_NETWORKS.items():
        assert hasattr(configs[name], "every_position") == network.looks_back
        assert trains_everywhere(configs[name]) == network.looks_back
    assert not trains_everywhere(SASRecConfig(every_position=False))


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

    made = {"history": {"name": "history"}}
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

    def notes(config: Any, samples: Any, key: str = "history") -> str:
        made = {key: [{"name": "history"}], "train_samples": samples}
        built_by = {"train_samples": "all"} if samples is None else made
        source = replace(tiny_manifest.source, config=built_by)
        return " ".join(build(config, replace(tiny_manifest, source=source)).notes)

    assert "many times in an epoch" in notes(SASRecConfig(), "all")
    assert "many times in an epoch" in notes(SASRecConfig(), "all", "histories")
    assert "no targets" in notes(SASRecConfig(every_position=False), 5)
    assert "no targets" in notes(ComiRecConfig(interests=2), "last")
    assert "targets of several rows" in notes(SASRecConfig(), 5)
    assert "no targets" in notes(SASRecConfig(), 9)
    assert not notes(SASRecConfig(), 8)
    assert not notes(SASRecConfig(), "last")
    assert not notes(SASRecConfig(every_position=False), "all")
    assert not notes(SASRecConfig(), None)


def configure(
    name: str, *, epochs: int, dropout: float | None = None, **changes: Any
) -> TrainConfig:
    own = {"name": "sasrec", "block": "ligr"} if name == "ligr" else {"name": name}
    model = {**own, "embedding_dim": 8, "item_features": ["movie_id"], "dropout": dropout}
    model |= {"heads": 2} if name != "gru" else {}
    sections: dict[str, Any] = {
        "model": model,
        "input": {"batch_size": 64, "shuffle_buffer": 1000},
        "optimizer": {"learning_rate": 0.01},
        "fit": {"epochs": epochs, "steps_per_loop": 4, "early_stopping": None},
    }
    return TrainConfig.model_validate({"dataset": "tiny", "name": "t", **sections, **changes})


@pytest.fixture(scope="module")
def trained(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path_factory: pytest.TempPathFactory
) -> TrainedModel:
    """A SASRec with dropout, two epochs in one go."""
    run = tmp_path_factory.mktemp("whole")
    config = configure("sasrec", epochs=2, dropout=0.2)
    trainer = build_trainer(config, tiny_version)
    trainer.fit(run, None)
    model = build(config.model, tiny_manifest)
    restore_newest(run / "checkpoints" / "last", collect_state(model=model), print)
    return TrainedModel(run, model, config, tiny_manifest, tiny_version)


def test_it_learns_what_popularity_cannot(trained: TrainedModel) -> None:
    version, manifest = trained.version_dir, trained.manifest
    test = next(iter(build_eval_dataset(version, manifest, "test", 100)))
    index = build_item_index(trained.model, version, manifest, 64)
    assert isinstance(trained.model, SequenceModel)
    scores = trained.model.embed_users(test).numpy() @ index.vectors.T
    own = scores[np.arange(60), np.searchsorted(index.ids, test["movie_id"])][:, None]
    # Nine of ten events stay in the user's group of ten items; popularity hits a quarter.
    assert ((scores > own).sum(axis=1) < 10).mean() > 0.65
