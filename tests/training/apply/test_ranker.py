"""Ranking models: the exported SavedModel, scores of rows, lists of candidates."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError
from conf.training.train import TrainConfig
from etl.tfrecord.table import write_table
from tests.training.apply.predictions import write_lists, write_scores
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.apply import ranker
from training.apply.answers import Source
from training.apply.export import Export, Items
from training.apply.ranker import Ranker, RowInputs
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import Pairs
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.models.ranking import NetworkRankingModel
from training.raw_inputs.files import RawFile
from training.raw_inputs.inputs import InputColumn

TASKS = {"click": {"label": "label"}, "value": {"label": "label", "objective": "squared_error"}}
MODEL = {
    "kind": "ranking",
    "network": "tests.training.toy_models:build_own_network",
    "params": {"units": 8},
    "pooling": {"history": {"combiner": "none"}},
    "tasks": TASKS,
    "embedding_dim": 4,
    "embedding_stddev": 1.0,
}
INPUTS = ("user_id", "gender", "history", "movie_id", "genres")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainedModel:
    version = write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(candidates=6))
    values = {"dataset": "d", "name": "n", "model": MODEL, "evaluation": {"batch_size": 17}}
    manifest, config = read_manifest(version), TrainConfig.model_validate(values)
    model, run = NetworkRankingModel(config.model, manifest, 5), tmp_path_factory.mktemp("run")
    return TrainedModel(run, model, config, manifest, version)


@pytest.fixture(scope="module")
def encoded(trained) -> dict[str, tf.Tensor]:
    """The test split's features, as the records hold them."""
    where = (trained.version_dir, trained.manifest)
    [batch] = build_eval_dataset(*where, "test", 1000, (*INPUTS, "candidates"), ("candidates",))
    return batch


@pytest.fixture(scope="module")
def expected(trained, encoded) -> dict[str, np.ndarray]:
    found = trained.model.predict(encoded)
    return {task: scores.numpy() for task, scores in found.items()}


@pytest.fixture(scope="module")
def tokens(trained) -> dict[str, list]:
    """Raw values by id, of each feature."""
    found = {}
    for name in INPUTS:
        encoding = trained.manifest.schema[name].encoding
        table = pq.read_table(trained.version_dir / "encoders" / f"{encoding}.parquet")
        found[name] = [None, None, *table["token"].to_pylist()]
    return found


@pytest.fixture(scope="module")
def rows(tokens, encoded) -> list[dict]:
    """The test split's features as raw tokens; what pads lists is left out."""
    raw = {
        name: [
            [own[i] for i in row if i] if isinstance(row, list) else own[row]
            for row in encoded[name].numpy().tolist()
        ]
        for name, own in tokens.items()
    }
    return [dict(zip(raw, row, strict=True)) for row in zip(*raw.values(), strict=True)]


@pytest.fixture(scope="module")
def score(trained, encoded, tokens) -> Callable[[int], dict[int, float]]:
    """Probability of each catalogue item for a row, by its raw key, by brute force."""
    where = (trained.version_dir, trained.manifest)
    [items] = build_eval_dataset(*where, "catalog", 1000, ("movie_id", "genres"))
    keys = [tokens["movie_id"][number] for number in items["movie_id"].numpy().tolist()]

    def find(row: int) -> dict[int, float]:
        names = ("user_id", "gender", "history")
        user = {n: tf.repeat(encoded[n][row : row + 1], len(keys), 0) for n in names}
        found = trained.model.predict({**user, **items})["click"].numpy().tolist()
        return dict(zip(keys, found, strict=True))

    return find


@pytest.fixture(scope="module")
def export(trained) -> Export:
    return Export(write_export(trained))


@pytest.fixture(scope="module")
def raw(export, rows, tmp_path_factory) -> dict[str, np.ndarray]:
    """The test split's raw values as the inputs of `serving_default`."""
    file = RawFile(write_rows(tmp_path_factory.mktemp("raw") / "rows.jsonl.gz", rows))
    inputs = export.find_inputs("serving_default")
    [found] = file.read([InputColumn.from_json(item) for item in inputs], 1000)
    return found.inputs


def test_examples_get_what_the_model_predicts(export, rows, expected, tmp_path) -> None:
    """As TensorFlow Serving's `:predict`, `:classify` and `:regress` call a ranking model."""
    write_table(pa.Table.from_pylist(rows), tmp_path / "rows.tfrecord")
    records = tf.data.TFRecordDataset(str(tmp_path / "rows.tfrecord"))
    examples = np.array(list(records.as_numpy_iterator()), object)
    found = export.call("examples", {"examples": examples})
    found |= export.call("regress", {"inputs": examples})
    classes = export.call("classify", {"inputs": examples})
    assert classes["classes"].tolist() == [[b"click"]] * len(rows)
    for task, scores in expected.items():
        np.testing.assert_allclose(found[task], scores, atol=1e-6)
    for scores in (classes["scores"][:, 0], found["outputs"]):
        np.testing.assert_allclose(scores, expected["click"], atol=1e-6)
    assert np.ptp(expected["click"]) > 0.1
    assert 0 < expected["click"].min() < expected["click"].max() < 1


def test_items_of_a_row_are_scored_as_pairs_are(trained, score, export, raw, encoded, rows) -> None:
    """Raw and encoded rows, items by key and by features: what brute force over pairs gives."""
    tokens = list(score(0))
    names = ("user_id", "gender", "history")
    items = np.array([[*tokens, 999_999]] * 3)
    genres = {row["movie_id"]: row["genres"] for row in rows}
    known = [genres.get(movie, []) for movie in items[0].tolist()]
    width = max(map(len, known))
    padded = [own + ["<sluice:pad>"] * (width - len(own)) for own in known]
    described = {"movie_id": items, "genres": np.array([padded] * 3, object)}
    own = {name: raw[name][:3] for name in names}
    records = {name: encoded[name][:3].numpy() for name in names}
    ways = {
        "candidates": export.call("candidates", {**own, **described}),
        "score_items": export.call("score_items", {**own, "items": items}),
        "score_items_encoded": export.call("score_items_encoded", {**records, "items": items}),
        "raw": Ranker(export).order_items(RowInputs(own), items),
        "encoded": Ranker(export).order_items(RowInputs(records, is_encoded=True), items),
    }
    cold = {"movie_id": tf.constant([1] * 3, tf.int64), "genres": tf.zeros([3, 4], tf.int64)}
    unknown = trained.model.predict({**records, **cold})["click"].numpy()
    for way, answer in ways.items():
        found = answer["click"]
        if way in ("raw", "encoded"):
            found = Ranker(export).finish("click", found)
        for row in range(3):
            same = [n for n, one in enumerate(tokens) if way != "candidates" or one in genres]
            scores = score(row)
            np.testing.assert_allclose(found[row, same], [scores[tokens[n]] for n in same], 1e-5)
        np.testing.assert_allclose(found[:, -1], unknown, atol=1e-6)


def write_rows(path: Path, rows: list[dict]) -> Path:
    named = [{"line": f"r{number}", "click": 1, **row} for number, row in enumerate(rows)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(named), path)
    elif path.suffix == ".csv":
        flat = [
            {k: "|".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
            for row in named
        ]
        pa_csv.write_csv(pa.Table.from_pylist(flat), path)
    else:
        text = "".join(json.dumps(row) + "\n" for row in named)
        path.write_bytes(gzip.compress(text.encode()))
    return path


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl.gz", "rows.parquet"])
def test_rows_of_a_file_are_scored_in_order(trained, rows, expected, tmp_path, name) -> None:
    file = RawFile(write_rows(tmp_path / name, rows), "line")
    assert write_scores(trained, tmp_path / "out.parquet", "test", file) == len(rows)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["line"].to_pylist() == [f"r{number}" for number in range(len(rows))]
    for task, scores in expected.items():
        assert table.schema.field(task).type == pa.float32()
        np.testing.assert_allclose(table[task].to_numpy(), scores, rtol=1e-5, atol=1e-6)
    write_scores(trained, tmp_path / "out.jsonl.gz", "test", replace(file, id_column=None))
    found = _read_lists(tmp_path / "out.jsonl.gz")
    assert [row["row"] for row in found] == list(range(1, len(rows) + 1))
    np.testing.assert_array_equal(np.float32([row["click"] for row in found]), table["click"])
    with pytest.raises(ConfigError, match="name of a score"):
        write_scores(trained, tmp_path / "no.parquet", "test", replace(file, id_column="click"))
    write_scores(trained, tmp_path / "split.parquet", "test")
    split = pq.read_table(tmp_path / "split.parquet")
    np.testing.assert_allclose(split["click"].to_numpy(), expected["click"], rtol=1e-5, atol=1e-6)


def _read_lists(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_pairs_are_ranked_as_a_sort_ranks_them(monkeypatch) -> None:
    """Candidates of each row, and all items for a few rows at once without what was met."""
    monkeypatch.setattr(ranker, "PAIRS_AT_ONCE", 70)
    rng = np.random.default_rng(3)
    items = Items(np.arange(2, 32), np.zeros((30, 0), np.float32), pa.array(range(30)))
    orders = rng.integers(0, 9, (40, 30)).astype(np.float32)  # Many ties: these stand by id.
    kept = rng.random(orders.shape) < 0.7
    kept[0] = False
    expected = [
        sorted(items.ids[kept[row]], key=lambda i: (-orders[row, i - 2], i)) for row in range(40)
    ]
    card = {"outputs": [{"name": "v", "kind": "value"}],
            "signatures": {"rank_items": {"inputs": [{"name": "items"}]}}}  # fmt: skip
    served = SimpleNamespace(
        card=card, call=lambda _, given: {"v": orders[given["row"][:, np.newaxis], given["items"]]}
    )
    engine = Ranker(served, None, items)
    rows = RowInputs({"row": np.arange(40)})
    of_rows, met = Pairs(*np.nonzero(kept)), Pairs(*np.nonzero(~kept))
    for k, given in product((5, 1 << 40), ({"candidates": of_rows}, {"seen": met})):
        found = engine.rank(rows, k, **given)
        assert [row[row > 0].tolist() for row in found.ids] == [own[:k] for own in expected]
        lists = zip(range(40), found.ids, found.scores, strict=True)
        assert all(orders[row, i - 2] == v for row, ids, best in lists
                   for i, v in zip(ids, best, strict=True) if i)  # fmt: skip


def test_items_that_a_file_describes_are_scored_by_their_inputs(
    trained, score, rows, tmp_path
) -> None:
    known = {row["movie_id"]: row["genres"] for row in rows}
    described = [{"movie_id": m, "genres": g} for m, g in list(known.items())[:9]]
    described.append({"movie_id": 99_999, "genres": ["genre_1"]})
    pool, file = tmp_path / "pool.jsonl", tmp_path / "lists.json.gz"
    pool.write_text("".join(json.dumps(row) + "\n" for row in described))
    given = write_rows(tmp_path / "rows.jsonl.gz", rows[:5])
    for source in (Source(split="test"), Source(file=RawFile(given, "line"))):
        write_lists(trained, file, 10, source, candidates=RawFile(pool), keep_seen=True)
        for number, entry in enumerate(_read_lists(file)[:5]):
            found = dict(zip(entry["items"], entry["scores"], strict=True))
            assert set(found) == {row["movie_id"] for row in described}
            assert source.file is None or entry["id"] == f"r{number}"
            scores = [score(number).get(item, found[item]) for item in found]
            np.testing.assert_allclose(list(found.values()), scores, atol=1e-6)


def test_candidates_of_each_row_or_all_items_are_ranked(
    trained, score, encoded, rows, tokens, tmp_path
) -> None:
    file, items = tmp_path / "lists.json.gz", tokens["movie_id"]
    keys = replace(trained.manifest.keys, user=None, seen=None, candidates=None)
    alone = replace(trained, manifest=replace(trained.manifest, keys=keys))
    for model, k in ((trained, 20), (alone, 5)):
        assert write_lists(model, file, k).rows == 60
        lists = _read_lists(file)
        assert [entry["row"] for entry in lists] == list(range(1, 61))
        for row in (0, 31, 59):
            known = score(row)
            own = [items[i] for i in encoded["candidates"][row].numpy().tolist()]
            own = list(known) if model is alone else [rows[row]["movie_id"], *own]
            best = sorted(own, key=lambda item: -known[item])[:k]
            assert lists[row]["items"] == best
            np.testing.assert_allclose(lists[row]["scores"], [known[i] for i in best], rtol=1e-4)


def test_users_get_what_they_have_not_met(trained, tokens, tmp_path) -> None:
    file = tmp_path / "users.json.gz"
    assert write_lists(trained, file, 40, Source(split="users")).rows == 60
    where = (trained.version_dir, trained.manifest)
    [users] = build_eval_dataset(*where, "users", 100, ("user_id", "seen"), ("seen",))
    for entry, seen in zip(_read_lists(file), users["seen"], strict=True):
        met = {tokens["movie_id"][item] for item in seen.numpy().tolist() if item > 1}
        assert met.isdisjoint(entry["items"])
        assert len(entry["items"]) == 40 - len(met)
