"""One row, one score: by the server, `predict`, `score` and the graph, however the row is written.

The build's own execution of the encoders says what is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from conf.artefacts.dataset import read_manifest
from conf.artefacts.export import ExportOptions, Give
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import VectorBytes
from conf.encoders.hashing import Hash
from conf.errors import InputDataError
from conf.manifest import DatasetKeys
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.train import TrainConfig
from etl.encoders.pipeline import read_pipeline
from tests.contract.skew.encoder_plans import plan_feature, write_tokens, write_version
from tests.machine import examples
from tests.training.apply.predictions import write_scores
from training.apply.answers import Asked, Source, find_row_inputs, plan_answers
from training.apply.export import Export
from training.apply.parts import LINE, Job, RowSource, read_part
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.models.registry import build_model
from training.raw_inputs.files import RawFile
from training.serving.app import build_app
from training.serving.server import Server
from training.serving.server_config import ServerConfig

ITEMS, LONGEST, DIM = 12, 6, 3
COLUMNS = [
    {"name": "clicks", "type": "list<int64>", "separator": " ",
     "pair": "shops", "pair_default": 0},
]  # fmt: skip
SOURCE: dict[str, Any] = {"events": {"source": "log"}, "sources": {"log": {"columns": COLUMNS}}}
ROW_FEATURES = ["history", "shop", "vector", "dwell"]
SETTINGS = {
    "embedding_dim": 4, "embedding_stddev": 1.0,
    "pooling": {"shop": {"combiner": "sum"}, "dwell": {"combiner": "mean"}},
    "vectors": {"vector": {"decode": "float64", "length": DIM}},
}  # fmt: skip
MODELS = {
    "scores": {"kind": "ranking", "network": "deepfm", "features": ["item", *ROW_FEATURES]},
    "towers": {"kind": "retrieval", "name": "dssm", "user_features": ROW_FEATURES,
               "item_features": ["item"]},
}  # fmt: skip
ASKED = {"scores": (Give.SCORES, "serving_default", "label"),
         "towers": (Give.USER_EMBEDDING, "user_embedding", "embedding")}  # fmt: skip
"""What is asked of each model, by which signature, and the name of the answer."""


@dataclass(frozen=True)
class Row:
    """A row: what it holds, and how that is written."""

    values: dict[str, Any]  # as the build reads it, by column
    json: dict[str, Any]  # as requests and lines of JSON have it
    text: dict[str, str]  # as CSV has it


def write_pairs(items: list[int], shops: list[int]) -> str:
    return " ".join(f"{i}_{s}" if s else f"{i}" for i, s in zip(items, shops, strict=True))


@st.composite
def draw_row(draw: st.DrawFn) -> Row:
    pairs = st.tuples(st.integers(0, ITEMS + 1), st.integers(0, 9))
    drawn = draw(st.none() | st.lists(pairs, max_size=2 * LONGEST))
    items, shops = ([i for i, _ in drawn or ()], [s for _, s in drawn or ()])
    number = st.floats(-4, 4, width=32)
    vector = draw(st.none() | st.lists(number, min_size=DIM, max_size=DIM))
    dwell = draw(st.none() | st.lists(number, max_size=2 * LONGEST))
    values = {"item": draw(st.integers(0, ITEMS + 1)), "vector": vector, "dwell": dwell}
    plain = {name: "" if value is None else str(value) for name, value in values.items()}
    for name in ("vector", "dwell"):
        plain[name] = "|".join(map(repr, values[name] or ()))
    named = draw(st.sampled_from(["clicks", "history"]))
    if drawn is None:
        way, own = {named: None}, {"clicks": "", "shops": ""}
    elif not draw(st.booleans()):  # Lists, each in a column of its own.
        way, own = {named: items, "shops": shops}, {"clicks": write_pairs(items, shops)}
    else:
        text = write_pairs(items, shops)
        way, own = {named: text}, {"clicks": text, "shops": ""}
        if draw(st.booleans()):  # Other second values go before those of the text.
            shops = [s + 1 for s in shops]
            way["shops"], own["shops"] = shops, write_pairs(items, shops)
        elif draw(st.booleans()):
            way["shops"] = None
    values |= {"clicks": items or None, "shops": shops or None}
    return Row(values, {n: values[n] for n in ("item", "vector", "dwell")} | way, {**plain, **own})


@dataclass(frozen=True)
class Ways:
    """Everything that scores rows: encoders of the build, models by name, the server."""

    plan: Path
    trained: dict[str, TrainedModel]
    exported: dict[str, Export]
    client: TestClient


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    root = tmp_path_factory.mktemp("data")
    directory = root / "v" / "encoders"
    directory.mkdir(parents=True)
    items = write_tokens(list(range(ITEMS)), directory / "item.parquet")
    specs = [
        FeatureSpec("item", "int64", "item", (), None, "item", items.size),
        FeatureSpec("history", "int64", "user", (None,), None, "item", items.size, "item", 0),
        FeatureSpec("dwell", "float32", "user", (None,), pad_value=0.0),
        FeatureSpec("label", "float32", "label"),
    ]
    columns = [
        ColumnEncoding("item", "item", "int64", "item"),
        ColumnEncoding("history", "clicks", "int64", "item"),
        ColumnEncoding("dwell", "dwell", "float32"),
        ColumnEncoding("label", "label", "float32"),
    ]
    for name, operation, raw in (
        ("shop", Hash(40), RawColumn("shops", "int64", True)),
        ("vector", VectorBytes("float64", DIM), RawColumn("vector", "float64", True)),
    ):
        spec, column = plan_feature(name, operation, (raw,), LONGEST, "user")
        specs.append(replace(spec, max_len=None))
        columns.append(column)
    plan = EncoderPlan(FeatureSchema(tuple(specs)), tuple(columns), (items,))
    catalog, lengths = [{"item": n} for n in range(2, items.size)], {"length": {"max": LONGEST}}
    version = write_version(
        root, plan, {"catalog": catalog}, config=SOURCE,
        keys=DatasetKeys(None, "item", None, label="label"),
        statistics={"train": dict.fromkeys(("history", "shop", "dwell"), lengths)},
    )  # fmt: skip
    manifest = read_manifest(version)
    trained, exported = {}, {}
    for name, model in MODELS.items():
        values = {"dataset": "d", "name": name, "model": {**SETTINGS, **model}}
        config = TrainConfig.model_validate(values)
        built = build_model(config.model, manifest, 3)
        trained[name] = TrainedModel(root, built, config, manifest, version)
        exported[name] = Export(write_export(trained[name], ExportOptions(root / "models")))
    with TestClient(build_app(Server(ServerConfig(root / "models"))), "http://localhost") as client:
        yield Ways(directory, trained, exported, client)


def compute(ways: Ways, rows: list[Row]) -> dict[str, np.ndarray]:
    """What models give of what the build makes of rows."""
    types = {"item": pa.int64(), "clicks": pa.list_(pa.int64()), "shops": pa.list_(pa.int64()),
             "vector": pa.list_(pa.float64()), "dwell": pa.list_(pa.float32()),
             "label": pa.float32()}  # fmt: skip
    arrays = {name: pa.array([row.values.get(name) for row in rows], kind)
              for name, kind in types.items()}  # fmt: skip
    encoded = read_pipeline(ways.plan).apply(pa.RecordBatch.from_pydict(arrays)).to_pydict()
    features: dict[str, Any] = {}
    for spec in ways.trained["scores"].manifest.schema.features:
        values = encoded[spec.name]
        if spec.dtype == "bytes":
            features[spec.name] = tf.constant([value or b"" for value in values])
        elif spec.is_list:
            dtype = tf.as_dtype(spec.dtype)
            features[spec.name] = tf.ragged.constant([v or [] for v in values], dtype)
        elif spec.role != "label":
            features[spec.name] = tf.constant(values, spec.dtype)
    scores, towers = (ways.trained[name].model for name in ("scores", "towers"))
    return {"scores": scores.predict(features)["label"].numpy(),
            "towers": towers.embed_users(features).numpy()}  # fmt: skip


def ask_server(ways: Ways, name: str, rows: list[Row]) -> list[Any]:
    """Each row in a request of its own, as lists of a request have one length."""
    read = find_row_inputs(ways.exported[name], ASKED[name][0])
    inputs = {item["column"] for item in read}
    signature = ASKED[name][1]

    def ask(body: dict[str, Any]) -> Any:
        asked = {"signature_name": signature, **body}
        answer = ways.client.post(f"/v1/models/{name}:predict", json=asked)
        assert answer.status_code == 200, (body, answer.text)
        [value] = next(iter(answer.json().values()))
        return value

    given = [{n: v for n, v in row.json.items() if n in inputs or n == "history"} for row in rows]
    found = [ask({"instances": [row]}) for row in given]
    assert found == [ask({"inputs": {n: [v] for n, v in row.items()}}) for row in given]
    return found


def score_lines(ways: Ways, name: str, rows: list[Row]) -> np.ndarray:
    export, (give, signature, output) = ways.exported[name], ASKED[name]
    names = tuple(dict.fromkeys(name for row in rows for name in row.json))
    answers = plan_answers(export, Asked(give), Source(file=RawFile(Path("rows"))))
    job = Job(
        Path("out"),
        "parquet",
        answers,
        RowSource(("rows",), "jsonl", columns=names),
        rows=len(rows),
    )
    batch = pa.RecordBatch.from_pydict({LINE: pa.array([json.dumps(row.json) for row in rows])})
    parts = read_part(job, export, None, 0, iter([batch]))
    return np.concatenate([export.call(signature, part.inputs.arrays)[output] for part in parts])


def predict_file(ways: Ways, file: Path) -> list[float]:
    target = file.with_name("scores.parquet")
    write_scores(ways.trained["scores"], target, "test", RawFile(file))
    return pq.read_table(target)["label"].to_pylist()


def write_files(folder: Path, rows: list[Row]) -> list[Path]:
    lines, table = folder / "rows.jsonl", folder / "rows.csv"
    lines.write_text("".join(json.dumps(row.json) + "\n" for row in rows))
    names = ("item", "vector", "dwell", "clicks", "shops")
    texts = {name: [row.text.get(name, "") for row in rows] for name in names}
    pa_csv.write_csv(pa.table(texts), table)
    return [lines, table]


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(draw_row(), min_size=1, max_size=5))
def test_a_row_has_one_score_however_it_is_written(
    ways: Ways, tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    for name, expected in compute(ways, rows).items():
        found = {"server": ask_server(ways, name, rows), "score": score_lines(ways, name, rows)}
        if name == "scores":
            for file in write_files(tmp_path_factory.mktemp("rows"), rows):
                found[file.suffix] = predict_file(ways, file)
        for way, values in found.items():
            np.testing.assert_allclose(values, expected, atol=1e-5, err_msg=f"{name} by {way}")


def test_the_export_says_how_far_lists_are_read(ways: Ways) -> None:
    inputs = ways.exported["scores"].card["signatures"]["serving_default"]["inputs"]
    found = {item["name"]: item["max_len"] for item in inputs}
    lists = dict.fromkeys(("history", "dwell", "shop"), LONGEST)
    assert found == {"item": None, "vector": None, **lists}


def test_a_vector_without_a_number_is_refused_as_what_it_is(ways: Ways, tmp_path: Path) -> None:
    row = {"item": 3, "clicks": None, "shops": None, "dwell": None, "vector": [1.0, None, 2.0]}
    answer = ways.client.post("/v1/models/scores:predict", json={"instances": [row]})
    said = "input vector has no value for a missing one in row 0 (from 0), position [1]"
    assert (answer.status_code, answer.json()["error"]) == (400, said)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputDataError, match="row 1: column 'vector'"):
        predict_file(ways, tmp_path / "rows.jsonl")
