"""Ranking models: the exported SavedModel, scores of rows, lists of candidates."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import PART
from conf.errors import ConfigError, InternalError
from conf.training.train import TrainConfig
from tests.training.predictions import open_export, predict, write_lists, write_scores
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.apply import ranker
from training.apply.answers import Asked, Source, plan_answers
from training.apply.export import Export, Items
from training.apply.parts import JOB_FILE, Job, RowSource
from training.apply.ranker import Ranker, RowInputs
from training.apply.rows import choose_split
from training.checkpoint.restore import TrainedModel
from training.evaluation.metrics import Pairs
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.models.ranking import NetworkRankingModel
from training.raw_inputs.files import RawFile

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


def build_trained(version: Path, run: Path, model: dict = MODEL, **changes) -> TrainedModel:
    manifest = replace(read_manifest(version), **changes)
    evaluation = {"batch_size": 17}
    config = TrainConfig.model_validate(
        {"dataset": "d", "name": "n", "model": model, "evaluation": evaluation}
    )
    return TrainedModel(
        run, NetworkRankingModel(config.model, manifest, 5), config, manifest, version
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainedModel:
    version = write_tiny_dataset(tmp_path_factory.mktemp("data"), config=TinyConfig(candidates=6))
    return build_trained(version, tmp_path_factory.mktemp("run"))


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
def rows(trained, encoded) -> list[dict]:
    """The test split's features as raw tokens; what pads lists is left out."""
    raw: dict[str, list] = {}
    for name in INPUTS:
        encoding = trained.manifest.schema[name].encoding
        table = pq.read_table(trained.version_dir / "encoders" / f"{encoding}.parquet")
        tokens = [None, None, *table["token"].to_pylist()]
        raw[name] = [
            [tokens[i] for i in row if i] if isinstance(row, list) else tokens[row]
            for row in encoded[name].numpy().tolist()
        ]
    return [dict(zip(raw, row, strict=True)) for row in zip(*raw.values(), strict=True)]


def _pad(values: list[list], token) -> list[list]:
    width = max(map(len, values))
    return [row + [token] * (width - len(row)) for row in values]


@pytest.fixture(scope="module")
def export(trained) -> Path:
    return write_export(trained)


@pytest.fixture(scope="module")
def signatures(export) -> dict:
    return tf.saved_model.load(str(export)).signatures


@pytest.fixture(scope="module")
def raw(export, rows) -> dict[str, tf.Tensor]:
    """The test split's raw values as the inputs of `serving_default`."""
    card = json.loads((export / "export.json").read_text())
    found = {}
    for item in card["signatures"]["serving_default"]["inputs"]:
        values = [row[item["name"]] for row in rows]
        values = _pad(values, item["pad_token"]) if item["is_list"] else values
        values = [item["null_token"] if value is None else value for value in values]
        found[item["name"]] = tf.constant(values, tf.as_dtype(item["dtype"]))
    return found


def test_the_saved_model_gives_what_the_model_predicts(
    signatures, raw, encoded, rows, expected
) -> None:
    examples = tf.constant([build_example(row) for row in rows])
    answers = {
        "raw": signatures["serving_default"](**raw),
        "encoded": signatures["encoded"](**{name: encoded[name] for name in INPUTS}),
        "examples": signatures["examples"](examples=examples),
    }
    for answer in answers.values():
        assert set(answer) == {"click", "value"}
        for task, scores in expected.items():
            np.testing.assert_allclose(answer[task].numpy(), scores, rtol=1e-6, atol=1e-6)
    classes = signatures["classify"](inputs=examples)
    assert classes["classes"].numpy().tolist() == [[b"click"]] * len(rows)
    np.testing.assert_allclose(classes["scores"][:, 0], expected["click"], atol=1e-6)
    np.testing.assert_allclose(
        signatures["regress"](inputs=examples)["outputs"], expected["click"], atol=1e-6
    )
    assert np.ptp(expected["click"]) > 0.1
    assert 0 < expected["click"].min() < expected["click"].max() < 1


def build_example(row: dict) -> bytes:
    """An Example of raw values; what is missing is left out."""
    features = {}
    for name, value in row.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if name in ("gender", "genres"):
            of_bytes = tf.train.BytesList(value=[text.encode() for text in values])
            features[name] = tf.train.Feature(bytes_list=of_bytes)
        else:
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    kept = {name: found for name, found in features.items() if row[name] is not None}
    return tf.train.Example(features=tf.train.Features(feature=kept)).SerializeToString()


def test_candidates_of_a_row_are_scored_in_one_call(
    trained, signatures, raw, encoded, rows
) -> None:
    """Each way of asking gives what brute force over pairs gives."""
    movies = pq.read_table(trained.version_dir / "encoders" / "movie_id.parquet")["token"]
    asked = [[*movies.to_pylist(), 999_999]] * 3
    genres = {row["movie_id"]: row["genres"] for row in rows}
    known = [genres.get(movie, []) for movie in asked[0]]
    of_rows = {name: raw[name][:3] for name in ("user_id", "gender", "history")}
    given = {"movie_id": tf.constant(asked, tf.int64),
             "genres": tf.constant([_pad(known, "<sluice:pad>")] * 3)}  # fmt: skip
    by_features = signatures["candidates"](**of_rows, **given)["click"].numpy()
    items = tf.constant(asked, tf.int64)
    by_key = signatures["score_items"](**of_rows, items=items)["click"].numpy()
    records = {name: encoded[name][:3] for name in of_rows}
    by_id = signatures["score_items_encoded"](**records, items=items)["click"].numpy()
    assert by_features.shape == by_key.shape == (3, len(asked[0]))
    for row in range(3):
        scores = [score for _, score in sorted(_score_all(trained, encoded, row).items())]
        np.testing.assert_allclose(by_key[row, :-1], scores, atol=1e-6)
        pairs = zip(asked[0], by_features[row], scores, strict=False)
        same = [(found, score) for movie, found, score in pairs if movie in genres]
        assert len(same) > 20
        np.testing.assert_allclose(*zip(*same, strict=True), atol=1e-6)
        cold = {**{n: records[n][row : row + 1] for n in records},
                "movie_id": tf.constant([1], tf.int64),
                "genres": tf.zeros([1, 4], tf.int64)}  # fmt: skip
        unknown = trained.model.predict(cold)["click"].numpy()[0]
        np.testing.assert_allclose([by_key[row, -1], by_features[row, -1]], unknown, atol=1e-6)
    np.testing.assert_allclose(by_id, by_key, atol=1e-6)


def write_rows(path: Path, rows: list[dict]) -> Path:
    named = [{"line": f"r{number}", **row} for number, row in enumerate(rows)]
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
    write_scores(trained, tmp_path / "split.parquet", "test")
    split = pq.read_table(tmp_path / "split.parquet")
    np.testing.assert_allclose(split["click"].to_numpy(), expected["click"], rtol=1e-5, atol=1e-6)


def test_an_executor_writes_what_one_machine_writes(trained, export, rows, tmp_path) -> None:
    """Partitions of one batch each; lines of JSON come from Spark as text."""
    path = write_rows(tmp_path / "rows.jsonl.gz", rows)
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    source = RowSource((str(path),), "jsonl", "line", columns=tuple(json.loads(lines[0])))
    for name, asked in (("scores", Asked()), ("lists", Asked(k=4, task="value"))):
        output, told = tmp_path / name, Source(file=RawFile(path, "line"))
        answers = plan_answers(Export(export), asked, told)
        job = Job(output, "jsonl.gz", answers, source, part_rows=17, rows=len(rows))
        output.mkdir()
        lost = pa.RecordBatch.from_pydict({PART: [0], "value": lines[:1]})
        with pytest.raises(InternalError, match="does not see the output"):
            list(job.compute(str(export), [lost]))
        (output / JOB_FILE).touch()
        with pytest.raises(InternalError, match="rows that were counted"):
            list(job.compute(str(export), [lost]))
        assert [file.name for file in output.iterdir()] == [JOB_FILE]
        for part in range(job.parts):
            own = lines[part * 17 : part * 17 + 17]
            batch = pa.RecordBatch.from_pydict({PART: [part] * len(own), "value": own})
            [done] = job.compute(str(export), [batch[:5], batch[5:]])
            assert done.to_pylist() == [{"part": part, "rows": len(own)}]
        written = [gzip.decompress(file.read_bytes()) for file in sorted(output.glob("part-*"))]
        predict(trained, tmp_path / "own.jsonl.gz", told, **vars(asked))
        assert len(written) == job.parts == 4
        assert b"".join(written) == gzip.decompress((tmp_path / "own.jsonl.gz").read_bytes())


def test_missing_values_are_those_of_the_etl(trained, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    missing = {"click": 1, "user_id": None, "gender": None, "genres": [None]}
    unknown = {"user_id": -5, "gender": "?", "genres": ["?"], "history": []}
    rows = [{**row, "movie_id": 102} for row in (missing, unknown)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_scores(trained, tmp_path / "out.parquet", "test", RawFile(path))
    first, second = pq.read_table(tmp_path / "out.parquet")["click"].to_pylist()
    assert first == second
    with pytest.raises(ConfigError, match="name of a score"):
        write_scores(trained, tmp_path / "out.parquet", "test", RawFile(path, "click"))


def _read_lists(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def _score_all(trained, encoded, row: int) -> dict[int, float]:
    """Probability of each catalogue item for a row, by its id, by brute force."""
    where = (trained.version_dir, trained.manifest)
    [items] = build_eval_dataset(*where, "catalog", 1000, ("movie_id", "genres"))
    count = items["movie_id"].shape[0]
    user = {n: tf.repeat(encoded[n][row : row + 1], count, 0)
            for n in ("user_id", "gender", "history")}  # fmt: skip
    scores = trained.model.predict({**user, **items})["click"].numpy().tolist()
    return dict(zip(items["movie_id"].numpy().tolist(), scores, strict=True))


def _token(trained, identifier: int) -> int:
    table = pq.read_table(trained.version_dir / "encoders" / "movie_id.parquet")
    return table["token"][identifier - 2].as_py()


def test_pairs_are_ranked_as_a_sort_ranks_them(monkeypatch) -> None:
    """Candidates of each row, and all items for a few rows at once without what was met."""
    monkeypatch.setattr(ranker, "PAIRS_AT_ONCE", 70)
    rng = np.random.default_rng(3)
    items = Items(np.arange(2, 32), np.zeros((30, 0), np.float32), pa.array(range(30)))
    orders = rng.integers(0, 9, (40, 30)).astype(np.float32)  # Many ties: these stand by id.
    kept = rng.random(orders.shape) < 0.7
    kept[0] = False
    expected = [
        sorted(items.ids[kept[row]], key=lambda i: (-orders[row, i - 2], i))[:5]
        for row in range(40)
    ]
    card = {"outputs": [{"name": "v", "kind": "value"}],
            "signatures": {"rank_items": {"inputs": [{"name": "items"}]}}}  # fmt: skip
    served = SimpleNamespace(
        card=card, call=lambda _, given: {"v": orders[given["row"][:, np.newaxis], given["items"]]}
    )
    engine = Ranker(served, None, items)
    rows = RowInputs({"row": np.arange(40)})
    own = engine.rank(rows, 5, candidates=Pairs(*np.nonzero(kept)))
    whole = engine.rank(rows, 5, seen=Pairs(*np.nonzero(~kept)))
    for found in (own, whole):
        assert [row[row > 0].tolist() for row in found.ids] == expected
        lists = zip(range(40), found.ids, found.scores, strict=True)
        assert all(orders[row, i - 2] == v for row, ids, best in lists
                   for i, v in zip(ids, best, strict=True) if i)  # fmt: skip


def test_scores_of_items_are_those_of_pairs(trained, encoded, raw, expected) -> None:
    """Raw and encoded rows, the whole catalogue and pairs: one score of a row and an item."""
    export = open_export(trained)
    engine = Ranker(export, None, export.items)
    names = [item["name"] for item in export.find_inputs("rank_items")]
    own = ({name: values[name].numpy() for name in names} for values in (raw, encoded))
    ways = [RowInputs(next(own)), RowInputs(next(own), is_encoded=True)]
    cells = Pairs(np.arange(60), export.items.columns_of(encoded["movie_id"].numpy()))
    for rows in ways:
        orders = engine.order_items(rows, np.tile(export.items.tensor, (60, 1)))
        for task, scores in expected.items():
            found = engine.finish(task, orders[task])[cells.rows, cells.columns]
            np.testing.assert_allclose(found, scores, atol=1e-6)
        lists = engine.rank(rows, 3, candidates=cells)
        assert lists.ids[:, 0].tolist() == encoded["movie_id"].numpy().tolist()
        np.testing.assert_allclose(lists.scores[:, 0], expected["click"], atol=1e-6)


def test_items_that_a_file_describes_are_scored_by_their_inputs(
    trained, encoded, rows, tmp_path
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
            scores = _score_all(trained, encoded, number)
            found = dict(zip(entry["items"], entry["scores"], strict=True))
            assert set(found) == {row["movie_id"] for row in described}
            tokens = {_token(trained, item): value for item, value in scores.items()}
            own = {m: tokens[m] for m in found if m in tokens}
            np.testing.assert_allclose([found[m] for m in own], list(own.values()), atol=1e-6)


def test_candidates_of_each_row_are_ranked(trained, encoded, tmp_path) -> None:
    assert choose_split(open_export(trained), trained.manifest) == "test"
    file = tmp_path / "lists.json.gz"
    assert write_lists(trained, file, 20).rows == 60
    lists = _read_lists(file)
    for row in (0, 31, 59):
        known = _score_all(trained, encoded, row)
        own = [int(encoded["movie_id"][row]), *encoded["candidates"][row].numpy().tolist()]
        best = sorted(own, key=lambda item: (-known[item], item))
        assert lists[row]["items"] == [_token(trained, item) for item in best]
        np.testing.assert_allclose(lists[row]["scores"], [known[i] for i in best], rtol=1e-4)


def test_rows_without_users_and_candidates_rank_the_catalogue(trained, encoded, tmp_path) -> None:
    keys = replace(trained.manifest.keys, user=None, seen=None, candidates=None)
    alone = replace(trained, manifest=replace(trained.manifest, keys=keys))
    write_lists(alone, tmp_path / "lists.json.gz", 5)
    lists = _read_lists(tmp_path / "lists.json.gz")
    assert [entry["row"] for entry in lists] == list(range(1, 61))
    known = _score_all(trained, encoded, 3)
    best = sorted(known, key=lambda item: (-known[item], item))[:5]
    assert lists[3]["items"] == [_token(trained, item) for item in best]


def test_users_get_what_they_have_not_met_and_files_get_lists(trained, rows, tmp_path) -> None:
    file = tmp_path / "users.json.gz"
    assert write_lists(trained, file, 40, Source(split="users")).rows == 60
    where = (trained.version_dir, trained.manifest)
    [users] = build_eval_dataset(*where, "users", 100, ("user_id", "seen"), ("seen",))
    for entry, seen in zip(_read_lists(file), users["seen"], strict=True):
        met = {_token(trained, item) for item in seen.numpy().tolist() if item > 1}
        assert met.isdisjoint(entry["items"])
        assert len(entry["items"]) == 40 - len(met)
    users_only = [{k: v for k, v in row.items() if k not in ("movie_id", "genres")}
                  for row in rows[:4]]  # fmt: skip
    given = RawFile(write_rows(tmp_path / "rows.csv", users_only), "line")
    file = tmp_path / "l.json.gz"
    write_lists(trained, file, 3, Source(file=given))
    assert [entry["id"] for entry in _read_lists(file)] == ["r0", "r1", "r2", "r3"]
    assert {len(entry["items"]) for entry in _read_lists(file)} == {3}
