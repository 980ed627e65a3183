"""Ranking models: the exported SavedModel, scores of rows, lists of candidates."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
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
from conf.artefacts.export import PART, Give
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import SparseIndices, Weights
from conf.encoders.numbers import Bucketize, Normalize
from conf.errors import ConfigError, InternalError
from conf.manifest import DatasetKeys, Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.train import TrainConfig
from tests.training.predictions import open_export, predict, write_lists, write_scores
from tests.training.tiny_dataset import TinyConfig, describe_shard, write_shard, write_tiny_dataset
from tests.training.toy_models import TinyTowers
from training.apply.answers import Answers, Asked, Source, plan_answers
from training.apply.export import Export, Items
from training.apply.parts import JOB_FILE, Job, RowSource, compute_part
from training.apply.ranker import Ranker, RowInputs, rank_all, rank_pairs
from training.apply.rows import carries_candidates, choose_split
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.evaluation.metrics import Pairs
from training.export.saved_model import write_export
from training.input.batches import build_eval_dataset
from training.loop.assembly import refuse_lost_order
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
    export, signatures, raw, encoded, rows, expected
) -> None:
    card = json.loads((export / "export.json").read_text())
    assert (card["kind"], export.name, export.parent.name) == ("ranking", "1", "n")
    assert card["outputs"] == [
        {"name": "click", "label": "label", "kind": "binary",
         "means": "probability that label is 1"},
        {"name": "value", "label": "label", "kind": "squared_error", "means": "value of label"},
    ]  # fmt: skip
    assert not (export / "embeddings").exists()
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


def test_an_executor_writes_what_one_machine_writes(trained, export, rows, tmp_path) -> None:
    """Partitions of one batch each; lines of JSON come from Spark as text."""
    path = write_rows(tmp_path / "rows.jsonl.gz", rows)
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    source = RowSource(str(path), "jsonl", tuple(json.loads(lines[0])), "line")
    for name, asked in (("scores", Asked()), ("lists", Asked(k=4, task="value"))):
        output, told = tmp_path / name, Source(file=RawFile(path, "line"))
        answers = plan_answers(Export(export), asked, told)
        job = Job(str(output), "jsonl.gz", answers, source, part_rows=17, rows=len(rows))
        output.mkdir()
        lost = pa.RecordBatch.from_pydict({PART: [0], "value": lines[:1]})
        with pytest.raises(InternalError, match="does not see the output"):
            list(compute_part(job, str(export), [lost]))
        (output / JOB_FILE).touch()
        with pytest.raises(InternalError, match="rows that were counted"):
            list(compute_part(job, str(export), [lost]))
        assert [file.name for file in output.iterdir()] == [JOB_FILE]
        for part in range(job.parts):
            own = lines[part * 17 : part * 17 + 17]
            batch = pa.RecordBatch.from_pydict({PART: [part] * len(own), "value": own})
            [done] = compute_part(job, str(export), [batch[:5], batch[5:]])
            assert done.to_pylist() == [{"part": part, "rows": len(own)}]
        written = [gzip.decompress(file.read_bytes()) for file in sorted(output.glob("part-*"))]
        predict(trained, tmp_path / "own.jsonl.gz", told, **vars(asked))
        assert len(written) == job.parts == 4
        assert b"".join(written) == gzip.decompress((tmp_path / "own.jsonl.gz").read_bytes())


def test_a_split_without_a_candidate_has_none(trained) -> None:
    assert carries_candidates(trained.manifest, "test")
    assert not carries_candidates(trained.manifest, "train")
    counted = {"test": {"candidates": {"values": 0}}}
    assert not carries_candidates(replace(trained.manifest, statistics=counted), "test")


HEADER = "user_id,gender,history,movie_id,genres\n"


def test_formats_and_ids_that_do_not_fit_are_refused(trained, tmp_path) -> None:
    file = RawFile(tmp_path / "rows.txt", None)
    with pytest.raises(ConfigError, match="format of the input"):
        write_scores(trained, tmp_path / "out.parquet", "test", file)
    with pytest.raises(ConfigError, match="format of the output"):
        write_scores(trained, tmp_path / "out.csv", "test", file)
    (tmp_path / "a.csv").write_text(f"click,{HEADER}r,1000,F,101,102,\n")
    with pytest.raises(ConfigError, match="name of a score"):
        write_scores(trained, tmp_path / "o.parquet", "test", RawFile(tmp_path / "a.csv", "click"))


def test_missing_values_are_those_of_the_etl(trained, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"user_id": null, "gender": null, "movie_id": 102, "genres": [null]}\n'
                    '{"user_id": -5, "gender": "?", "movie_id": 102, "genres": ["?"], '
                    '"history": []}\n')  # fmt: skip
    write_scores(trained, tmp_path / "out.parquet", "test", RawFile(path))
    first, second = pq.read_table(tmp_path / "out.parquet")["click"].to_pylist()
    assert first == second


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


def test_pairs_are_ranked_as_a_sort_ranks_them() -> None:
    rng = np.random.default_rng(3)
    items = Items(np.arange(2, 32), np.zeros((30, 0), np.float32), pa.array(range(30)))
    orders = rng.integers(0, 9, (40, 30)).astype(np.float32)  # Many ties: these stand by id.
    kept = rng.random(orders.shape) < 0.7
    kept[0] = False
    expected = [
        sorted(items.ids[kept[row]], key=lambda i: (-orders[row, i - 2], i))[:5]
        for row in range(40)
    ]
    own = rank_pairs(Pairs(*np.nonzero(kept)), orders[kept], items, 40, 5)
    whole = rank_all(lambda part: orders[part].ravel(), items, (40, 5), Pairs(*np.nonzero(~kept)))
    for found in (own, whole):
        assert [row[row > 0].tolist() for row in found.ids] == expected


def test_scores_of_items_are_those_of_pairs(trained, encoded, raw, expected) -> None:
    """Raw and encoded rows, the whole catalogue and pairs: one score of a row and an item."""
    export = open_export(trained)
    ranker = Ranker(export, None, export.items)
    names = [item["name"] for item in export.find_inputs("rank_items")]
    own = ({name: values[name].numpy() for name in names} for values in (raw, encoded))
    ways = [RowInputs(next(own)), RowInputs(next(own), is_encoded=True)]
    cells = Pairs(np.arange(60), export.items.columns_of(encoded["movie_id"].numpy()))
    for rows in ways:
        orders = ranker.order_items(rows, np.tile(export.items.tensor, (60, 1)))
        for task, scores in expected.items():
            found = ranker.finish(task, orders[task])[cells.rows, cells.columns]
            np.testing.assert_allclose(found, scores, atol=1e-6)
        lists = ranker.rank(rows, 3, candidates=cells)
        assert lists.ids[:, 0].tolist() == encoded["movie_id"].numpy().tolist()
        np.testing.assert_allclose(lists.scores[:, 0], expected["click"], atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "source", "said"),
    [
        (Asked(Give.SCORES, k=3), Source(), "about lists"),
        (Asked(Give.USER_EMBEDDING), Source(), "cannot give that"),
    ],
)
def test_what_a_model_cannot_give_is_refused(trained, asked, source, said) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_answers(open_export(trained), asked, source)


def test_what_rows_get_follows_from_model_and_rows(trained) -> None:
    export = open_export(trained)
    for asked, source, give in (
        (Asked(), Source(file=RawFile(Path("x"))), Give.SCORES),
        (Asked(), Source(), Give.LISTS),
        (Asked(k=3), Source(file=RawFile(Path("x"))), Give.LISTS),
        (Asked(), Source(split="test"), Give.SCORES),
        (Asked(), Source(as_of="test"), Give.LISTS),
    ):
        assert plan_answers(export, asked, source).give is give
    assert plan_answers(export, Asked(), Source()) == Answers(Give.LISTS, 20, None, True)


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
    with pytest.raises(ConfigError, match="no such task"):
        write_lists(trained, file, 3, task="clock")


def test_towers_of_a_dataset_without_users(trained, tmp_path) -> None:
    keys = replace(trained.manifest.keys, user=None, seen=None, candidates=None)
    manifest = replace(trained.manifest, keys=keys)
    config = TrainConfig.model_validate({"dataset": "d", "name": "n"})
    towers = TrainedModel(tmp_path, TinyTowers(manifest), config, manifest, trained.version_dir)
    export = write_export(towers)
    card = json.loads((export / "export.json").read_text())
    assert (card["embeddings"]["items"], card["embeddings"]["users"]) == ({"rows": 40}, None)
    assert "user_embedding" in card["signatures"]
    file = tmp_path / "lists.json.gz"
    rows = write_lists(towers, file, 4).rows
    assert [entry["row"] for entry in _read_lists(file)] == list(range(1, rows + 1))


SPARSE = FeatureSchema((
    FeatureSpec("fields", "int64", "context", (None,), 4, "sparse_indices:fields", 11),
    FeatureSpec("values", "float32", "context", (None,), 4, "weights:values", pad_value=0.0),
    FeatureSpec("hour", "int64", "context", (), None, "bucketize:hour", 5),
    FeatureSpec("price", "float32", "context", (), None, "normalize:price", pad_value=0.0),
    FeatureSpec("label", "float32", "label"),
))  # fmt: skip
SPARSE_ROWS = [
    {"fields": [3, 5], "values": [0.5, 2.0], "hour": 2, "price": 1.5, "label": 1.0},
    {"fields": [], "values": [], "hour": 1, "price": 0.0, "label": 0.0},
    {"fields": [1], "values": [1.0], "hour": 3, "price": -2.0, "label": 1.0},
]
RAW_ROWS = [
    {"fields": [1, 3], "values": [0.5, 2.0], "hour": 4.0, "price": 2.5, "name": 7},
    {"hour": None, "price": None, "name": 8},
    {"fields": [99], "values": [1.0], "hour": 6.0, "price": -1.0, "name": 9},
]


def write_sparse(root: Path, manifest: Manifest) -> Path:
    """Writes a version of sparse pairs without users or items."""
    ids, weights = RawColumn("idxs", "int64", True), RawColumn("vals", "float32", True)
    hour, price = RawColumn("hour", "float64"), RawColumn("price", "float64")
    columns = (
        ColumnEncoding("fields", "idxs", "int64", "sparse_indices:fields",
                       SparseIndices((9,)), (ids,)),
        ColumnEncoding("values", "vals", "float32", "weights:values", Weights(), (weights, ids)),
        ColumnEncoding("hour", "hour", "float64", "bucketize:hour", Bucketize((5.0,)), (hour,)),
        ColumnEncoding("price", "price", "float64", "normalize:price",
                       Normalize(center=1.0), (price,)),
        ColumnEncoding("label", "label", "float32"),
    )  # fmt: skip
    plan = EncoderPlan(SPARSE, columns, ())
    (root / "encoders").mkdir(parents=True)
    (root / "encoders" / "encoders.json").write_text(plan.dumps())
    write_shard(root / "test.tfrecord", SPARSE_ROWS, SPARSE)
    split = SplitInfo("test", (describe_shard(root, "test.tfrecord", 3),))
    config = {"features": [{"name": "values", "encoding": {"kind": "weights", "of": "fields"}}]}
    changed = replace(
        manifest, schema=SPARSE, keys=DatasetKeys(None, None, label="label"), splits=(split,),
        encoders_fingerprint=plan.fingerprint, encoder_files=(),
        source=replace(manifest.source, config=config),
    )  # fmt: skip
    (root / "manifest.json").write_text(changed.dumps())
    return root


def check_order(sparse: TrainedModel) -> None:
    """Sparse tensors sort ids: refused where a network reads positions."""
    for combiner, is_read in (("sum", False), ("none", True), ("last", True)):
        pooling = {"fields": {"combiner": combiner}}
        model = {**sparse.config.model.model_dump(), "pooling": pooling}
        changed = {"model": model, "input": {"sparse": True}}
        config = TrainConfig.model_validate({"dataset": "d", "name": "n", **changed})
        task = SimpleNamespace(
            config=config,
            data=SimpleNamespace(version_dir=sparse.version_dir, manifest=sparse.manifest),
        )
        ranking = NetworkRankingModel(config.model, sparse.manifest, 1)
        with pytest.raises(ConfigError, match="sorts the ids") if is_read else nullcontext():
            refuse_lost_order(task, ranking, ranking.inputs)


def test_sparse_pairs_without_users_or_items(trained, tmp_path) -> None:
    version = write_sparse(tmp_path / "data", trained.manifest)
    model = {"kind": "ranking", "network": "deepfm", "params": {"hidden_units": [4]},
             "embedding_dim": 3, "embedding_stddev": 1.0}  # fmt: skip
    sparse = build_trained(version, tmp_path, model)
    where = (sparse.version_dir, sparse.manifest)
    [batch] = build_eval_dataset(*where, "test", 10, sparse.model.inputs)
    scores = sparse.model.predict(batch)["label"].numpy()
    assert write_scores(sparse, tmp_path / "split.parquet", "test") == 3
    np.testing.assert_allclose(pq.read_table(tmp_path / "split.parquet")["label"], scores, 1e-5)
    # The raw rows are what the ETL made the records from.
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in RAW_ROWS))
    write_scores(sparse, tmp_path / "file.parquet", "test", RawFile(path, "name"))
    table = pq.read_table(tmp_path / "file.parquet")
    assert table["name"].to_pylist() == [7, 8, 9]
    np.testing.assert_allclose(table["label"], scores, rtol=1e-5)
    signatures = tf.saved_model.load(str(write_export(sparse))).signatures
    encoded = {name: batch[name] for name in sparse.model.inputs}
    np.testing.assert_allclose(signatures["encoded"](**encoded)["label"], scores, rtol=1e-5)
    check_order(sparse)
    tasks = evaluate_split(sparse, "test")["tasks"]
    assert tasks["label"]["rows"] == 3
    with pytest.raises(ConfigError, match="cannot give that"):
        write_lists(sparse, tmp_path / "lists.jsonl", 3)
