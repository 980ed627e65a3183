"""Users with several vectors: all that ranks by them gives the lists of a sort by the nearest."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions, Give, IndexKind, IndexOptions
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.apply.answers import Asked, Source
from training.apply.export import Export
from training.apply.predict import predict_rows
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import (
    build_item_index,
    order_by_id,
    rank_top_k,
    read_user_vectors,
    score_cells,
    score_items,
)
from training.evaluation.metrics import Pairs
from training.export.saved_model import write_export
from training.index.index_build import add_items
from training.index.item_columns import read_vectors
from training.index.vector_index import fit_index
from training.input.batches import build_eval_dataset
from training.loading.loaded_model import LoadedModel
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel
from training.reader.training_data import TrainingData
from training.serving.app import build_app
from training.serving.models.server_config import ServerConfig
from training.serving.server import Server

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


@dataclass(frozen=True)
class Exports:
    """A model whose users have several vectors, its export, and its lists by a plain sort.

    Attributes:
        trained: The model.
        base: Directory of the models that are served.
        version: Directory of the exported version.
        expected: Raw keys of the best unseen items of each user, by raw key.
    """

    trained: TrainedModel
    base: Path
    version: Path
    expected: dict[int, list[int]]


def read_tokens(trained: TrainedModel, vocabulary: str) -> Array:
    """Raw keys by id; those of no token are -1."""
    table = pq.read_table(trained.version_dir / "encoders" / f"{vocabulary}.parquet")
    return np.array([-1, -1, *table["token"].to_pylist()])


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    data = TinyConfig(items=30, pairs=True, groups=6)
    version = write_tiny_dataset(tmp_path_factory.mktemp("data"), config=data)
    manifest = read_manifest(version)
    model = {"name": "comirec", "embedding_dim": DIM, "interests": INTERESTS,
             "embedding_stddev": 1.0}  # fmt: skip
    evaluation = {"ks": [5, 10], "sampled_negatives": None, "slices": [], "batch_size": 17}
    config = TrainConfig.model_validate(
        {"dataset": "d", "name": "tastes", "model": model, "evaluation": evaluation}
    )
    run = tmp_path_factory.mktemp("run")
    trained = TrainedModel(run, build_model(config.model, manifest, 3), config, manifest, version)
    assert isinstance(trained.model, RetrievalModel)
    base = tmp_path_factory.mktemp("models")
    exported = write_export(trained, ExportOptions(base, k=K, index=IndexOptions()))
    index = build_item_index(trained.model, version, manifest, 64)
    users, items = read_tokens(trained, "user_id"), read_tokens(trained, "movie_id")
    expected = {}
    for batch in read_user_vectors(trained, seen=True):
        assert batch.vectors.shape[1:] == (INTERESTS, DIM)
        allowed = np.array([~np.isin(index.ids, one) for one in batch.seen.to_list()])
        for user, order in zip(batch.ids, sort_items(batch.vectors, index.vectors, allowed),
                               strict=True):  # fmt: skip
            expected[int(users[user])] = items[index.ids[order]].tolist()
    return Exports(trained, base, exported, expected)


@pytest.fixture(scope="module")
def client(exports: Exports) -> Iterator[TestClient]:
    app = build_app(Server(ServerConfig(exports.base, 60.0)))
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as found:
        yield found


def test_interests_differ_and_each_finds_items(exports: Exports) -> None:
    """Else a sort by one vector would give the same lists, and this file would test nothing."""
    users = read_vectors(pq.read_table(exports.version / "embeddings" / "users.parquet"))
    items = read_vectors(pq.read_table(exports.version / "embeddings" / "items.parquet"))
    nearest = np.einsum("ukd,nd->ukn", users, items).argmax(axis=1)
    assert (np.bincount(nearest.ravel(), minlength=INTERESTS) > nearest.size / 20).all()


def test_evaluation_counts_an_item_by_the_nearest_vector(exports: Exports) -> None:
    trained = exports.trained
    assert isinstance(trained.model, RetrievalModel)
    found = evaluate_split(trained, "test")
    where = (trained.version_dir, trained.manifest)
    names = (*trained.model.user_inputs, "movie_id", "seen")
    [batch] = build_eval_dataset(*where, "test", 1000, names, ("seen",))
    index = build_item_index(trained.model, *where, 64)
    users = trained.model.embed_users(batch).numpy()
    targets = batch["movie_id"].numpy()
    seen = [set(one) - {own} for one, own in zip(batch["seen"].to_list(), targets, strict=True)]
    for name, masked in (("full_unseen", seen), ("full_all", [set()] * len(targets))):
        allowed = np.array([~np.isin(index.ids, list(one)) for one in masked])
        orders = sort_items(users, index.vectors, allowed)
        pairs = zip(orders, targets, strict=True)
        ranks = [index.ids[order].tolist().index(own) for order, own in pairs]
        [protocol] = [one for one in found["protocols"] if one["name"] == name]
        for k in (5, 10):
            assert protocol["systems"]["model"][f"hit_rate@{k}"] == np.mean(np.array(ranks) < k)


def predict(exports: Exports, asked: Asked, source: Source, target: Path) -> list[dict[str, Any]]:
    data = TrainingData(exports.trained.version_dir, exports.trained.manifest)
    predict_rows(Export(exports.version), source, asked, target, data)
    with gzip.open(target, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_predicted_lists_and_scores_are_those_of_the_sort(exports: Exports, tmp_path: Path) -> None:
    asked = Asked(Give.LISTS, K)
    rows = predict(exports, asked, Source(as_of="test"), tmp_path / "lists.json.gz")
    assert {row["user"]: row["items"] for row in rows} == {
        user: order[:K] for user, order in exports.expected.items()
    }
    scored = predict(exports, Asked(Give.SCORES), Source("test"), tmp_path / "scores.json.gz")
    trained, model = exports.trained, exports.trained.model
    assert isinstance(model, RetrievalModel)
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
    tokens = read_tokens(exports.trained, "movie_id")
    raw = np.where(encoded > 1, tokens[encoded], -(2**63))
    exclude = pad([[int(tokens[i]) for i in one] for one in table["seen"].to_pylist()], -5)
    lists = model.call("top_k", {"history": raw, "exclude": exclude,
                                 "k": np.full(len(raw), K, np.int32)})  # fmt: skip
    for user, items in zip(table["key"].to_pylist(), lists["items"], strict=True):
        assert items.tolist() == exports.expected[user][:K]


def pad(lists: list[list[int]], filler: int) -> Array:
    width = max(map(len, lists))
    return np.array([one + [filler] * (width - len(one)) for one in lists])


def recommend(client: TestClient, user: int, **asked: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/recommend", json={"user": user, "k": K, **asked})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def test_a_server_gives_the_same_lists(exports: Exports, client: TestClient) -> None:
    for user, order in exports.expected.items():
        assert [one["item"] for one in recommend(client, user)] == order[:K]
    left = [one["item"] for one in recommend(client, user, exclude=order[:2])]
    assert left == order[2 : 2 + K]
    seen = [one["item"] for one in recommend(client, user, seen=True)]
    assert set(seen) - set(order)


def test_an_item_that_is_added_is_found_by_the_nearest_vector(
    exports: Exports, tmp_path: Path
) -> None:
    news = tmp_path / "news.jsonl"
    rows = [{"movie_id": 900 + n, "genres": [f"genre_{n}"]} for n in range(6)]
    news.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, added, _ = add_items(exports.version, news)
    assert added == 6
    items = pq.read_table(target / "items.parquet")["key"].to_pylist()
    exact = faiss.read_index(str(target / "exact.faiss"))
    vectors = exact.reconstruct_n(0, exact.ntotal)
    users = pq.read_table(exports.version / "embeddings" / "users.parquet")
    met = pq.read_table(exports.version / "users.parquet")["seen"].to_pylist()
    tokens = read_tokens(exports.trained, "movie_id")
    allowed = np.array([~np.isin(items, tokens[np.array(one)]) for one in met])
    orders = sort_items(read_vectors(users), vectors, allowed)
    app = build_app(Server(ServerConfig(exports.base, 60.0)))
    found_new = 0
    with TestClient(app, "http://localhost") as client:
        for user, order in zip(users["key"].to_pylist()[:20], orders, strict=False):
            found = [one["item"] for one in recommend(client, user)]
            assert found == [items[n] for n in order[:K]]
            found_new += sum(item >= 900 for item in found)
    assert found_new
