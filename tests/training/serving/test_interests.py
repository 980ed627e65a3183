"""Users with several vectors: all that ranks by them gives the lists of a sort by the nearest."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.artefacts.export import ExportOptions, Give, IndexKind, IndexOptions
from tests.training.serving.tiny_models import build, read_tokens, serve
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.apply.answers import Asked, Source
from training.apply.export import Export
from training.apply.predict import predict_rows
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import (
    Pairs,
    build_item_index,
    order_by_id,
    rank_top_k,
    score_cells,
    score_items,
)
from training.export.embeddings import read_user_vectors
from training.export.saved_model import write_export
from training.index.item_columns import read_vectors
from training.index.vector_index import fit_index
from training.input.batches import build_eval_dataset
from training.loading.loaded_model import LoadedModel
from training.models.retrieval import RetrievalModel
from training.reader.training_data import TrainingData

INTERESTS, DIM, K = 3, 6, 7
Array = np.ndarray[Any, np.dtype[Any]]


def sort_items(users: Array, items: Array, allowed: Array) -> list[list[int]]:
    """Positions of items by the largest of a user's dot products, in float64."""
    scores = np.einsum("ukd,nd->ukn", users.astype(np.float64), items.astype(np.float64)).max(1)
    orders = np.argsort(-np.where(allowed, scores, -np.inf), axis=1, kind="stable")
    return [[n for n in order if row[n]] for order, row in zip(orders, allowed, strict=True)]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 4), st.integers(1, 17),
       st.integers(1, 20), st.integers(1, 40))  # fmt: skip
def test_lists_in_memory_and_of_an_index_are_those_of_a_sort(
    seed: int, rows: int, interests: int, items: int, k: int, block: int
) -> None:
    rng = np.random.default_rng(seed)
    # Small integers: exact products, and many ties.
    users = rng.integers(-2, 3, (rows, interests, 3)).astype(np.float32)
    index = order_by_id(np.arange(items), rng.integers(-2, 3, (items, 3)).astype(np.float32))
    allowed = rng.random((rows, items)) < 0.8
    expected = sort_items(users, index.vectors, allowed)
    found = rank_top_k(users, index, k, Pairs(*np.nonzero(~allowed)), block)
    near = fit_index(IndexKind.EXACT, index.vectors)
    scores = score_items(users, index.vectors)
    for row, order in enumerate(expected):
        wanted = order[:k]
        assert found.ids[row][: len(wanted)].tolist() == wanted
        assert (found.scores[row][: len(wanted)] == scores[row, wanted]).all()
        assert np.isneginf(found.scores[row][len(wanted) :]).all()
        positions, own = near.search(users[row], items, allowed[row])
        assert positions.tolist() == order
        np.testing.assert_array_equal(own, scores[row, order])
    cells = Pairs(*np.nonzero(allowed))
    own = score_cells(users[cells.rows], index.vectors[cells.columns])
    np.testing.assert_array_equal(own, scores[cells.rows, cells.columns])


class Exports(NamedTuple):
    """A model whose users have several vectors, its export, and its lists by a plain sort."""

    trained: TrainedModel
    version: Path
    expected: dict[int, list[int]]  # Raw keys of the best unseen items of each user, by raw key.


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    data = TinyConfig(items=30, pairs=True, groups=6)
    version = write_tiny_dataset(tmp_path_factory.mktemp("data"), config=data)
    model = {"name": "comirec", "embedding_dim": DIM, "interests": INTERESTS,
             "embedding_stddev": 1.0}  # fmt: skip
    trained = build(version, tmp_path_factory.mktemp("run"), "tastes", model)
    assert isinstance(trained.model, RetrievalModel)
    options = ExportOptions(tmp_path_factory.mktemp("models"), k=K, index=IndexOptions())
    exported = write_export(trained, options)
    index = build_item_index(trained.model, version, trained.manifest, 64)
    users, items = (np.array(read_tokens(trained, n)) for n in ("user_id", "movie_id"))
    expected = {}
    for batch in read_user_vectors(trained, seen=True):
        assert batch.vectors.shape[1:] == (INTERESTS, DIM)
        allowed = np.array([~np.isin(index.ids, one) for one in batch.seen.to_list()])
        for user, order in zip(batch.ids, sort_items(batch.vectors, index.vectors, allowed),
                               strict=True):  # fmt: skip
            expected[int(users[user])] = items[index.ids[order]].tolist()
    nearest = np.einsum("ukd,nd->ukn", batch.vectors, index.vectors).argmax(axis=1)
    assert (np.bincount(nearest.ravel(), minlength=INTERESTS) > nearest.size / 20).all()
    return Exports(trained, exported, expected)


def test_predicted_lists_and_scores_are_those_of_the_sort(exports: Exports, tmp_path: Path) -> None:
    trained, model = exports.trained, exports.trained.model
    assert isinstance(model, RetrievalModel)

    def predict(asked: Asked, source: Source) -> list[dict[str, Any]]:
        data, target = TrainingData(trained.version_dir, trained.manifest), tmp_path / "a.json.gz"
        predict_rows(Export(exports.version), source, asked, target, data)
        with gzip.open(target, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    rows = predict(Asked(Give.LISTS, K), Source(as_of="test"))
    assert {row["user"]: row["items"] for row in rows} == {
        user: order[:K] for user, order in exports.expected.items()
    }
    scored = predict(Asked(Give.SCORES), Source("test"))
    [batch] = build_eval_dataset(trained.version_dir, trained.manifest, "test", 1000, model.inputs)
    each = tf.einsum("bkd,bd->bk", model.embed_users(batch), model.embed_items(batch))
    found = [row["score"] for row in scored]
    np.testing.assert_allclose(found, tf.reduce_max(each, axis=1), rtol=1e-5)


def test_a_savedmodel_gives_the_vectors_and_the_lists(exports: Exports) -> None:
    model, folder = LoadedModel(exports.version), exports.version / "embeddings"
    table = pq.read_table(exports.version / "users.parquet")
    encoded = pad(table["feature:history"].to_pylist(), 0)
    found = model.call("user_embedding_encoded", {"history": encoded})["embedding"]
    stored = read_vectors(pq.read_table(folder / "users.parquet"))
    np.testing.assert_allclose(found, stored, atol=1e-5)
    lines = [line.split("\t")[1] for line in (folder / "users.txt").read_text().splitlines()]
    texts = [[one.split(",") for one in text.split(";")] for text in lines]
    np.testing.assert_array_equal(np.array(texts, np.float32), stored)
    tokens = np.array(read_tokens(exports.trained, "movie_id"))
    raw = np.where(encoded > 1, tokens[encoded], -(2**63))
    exclude = pad([[int(tokens[i]) for i in one] for one in table["seen"].to_pylist()], -5)
    lists = model.call("top_k", {"history": raw, "exclude": exclude,
                                 "k": np.full(len(raw), K, np.int32)})  # fmt: skip
    for user, items in zip(table["key"].to_pylist(), lists["items"], strict=True):
        assert items.tolist() == exports.expected[user][:K]


def pad(lists: list[list[int]], filler: int) -> Array:
    width = max(map(len, lists))
    return np.array([one + [filler] * (width - len(one)) for one in lists])


def test_a_server_gives_the_same_lists(exports: Exports) -> None:
    with serve(exports.version.parents[1]) as (_, client):

        def ask(user: int, **more: Any) -> list[int]:
            answer = client.post("/v1/recommend", json={"user": user, "k": K, **more})
            return [one["item"] for one in answer.json()["items"]]

        for user, order in exports.expected.items():
            assert ask(user) == order[:K]
        assert ask(user, exclude=order[:2]) == order[2 : 2 + K]
        assert set(ask(user, seen=True)) - set(order)
