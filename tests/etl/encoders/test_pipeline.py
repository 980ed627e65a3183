"""The encoder pipeline: batches encoded, the same on any cut of the rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from conf.encoders import ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.errors import InputDataError
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.pipeline import EncoderPipeline, read_pipeline
from etl.encoders.vocabulary import write_vocabulary


def vocabulary(tokens: list) -> pa.Table:
    token_type = pa.int64() if isinstance(tokens[0], int) else pa.string()
    counts = list(range(len(tokens), 0, -1))
    return pa.table(
        {"token": pa.array(tokens, token_type), "id": range(2, len(tokens) + 2), "count": counts}
    )


ITEMS = [30, 10, 20]
GENRES = ["drama", "", "sci-fi"]
SCHEMA = FeatureSchema(
    (
        FeatureSpec("item", "int64", "item", encoding="item", vocabulary_size=5),
        FeatureSpec("history", "int64", "user", (None,), 3, "item", 5, "item"),
        FeatureSpec("genres", "int64", "item", (None,), None, "genre", 5),
        FeatureSpec("genre", "int64", "item", encoding="genre", vocabulary_size=5),
        FeatureSpec("price", "float32", "context"),
        FeatureSpec("title", "bytes", "id"),
        FeatureSpec("scores", "float32", "context", (2,)),
    )
)
COLUMNS = (
    ColumnEncoding("item", "item_id", "int64", "item"),
    ColumnEncoding("history", "clicked", "int64", "item"),
    ColumnEncoding("genres", "genres", "string", "genre"),
    ColumnEncoding("genre", "main_genre", "string", "genre"),
    ColumnEncoding("price", "price", "int64"),
    ColumnEncoding("title", "title", "string"),
    ColumnEncoding("scores", "scores", "float32"),
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> EncoderPipeline:
    path = tmp_path_factory.mktemp("encoders")
    specs = (
        write_vocabulary(vocabulary(ITEMS), path / "item.parquet"),
        write_vocabulary(vocabulary(GENRES), path / "genre.parquet"),
    )
    plan = EncoderPlan(SCHEMA, COLUMNS, specs)
    (path / ENCODERS_FILE).write_text(plan.dumps())
    return read_pipeline(path)


RAW = pa.schema(
    [
        ("scores", pa.list_(pa.float64())),
        ("title", pa.large_string()),
        ("ignored", pa.timestamp("us")),
        ("clicked", pa.large_list(pa.int64())),
        ("item_id", pa.int32()),
        ("genres", pa.list_(pa.string())),
        ("main_genre", pa.large_string()),
        ("price", pa.int64()),
    ]
)

ROW = {
    "scores": [0.5, -1.0],
    "title": "ab é漢\0",
    "ignored": 0,
    "clicked": [30, 99, None, 10, 20],
    "item_id": 20,
    "genres": ["sci-fi", "war", None, ""],
    "main_genre": "Drama",
    "price": -7,
}
ENCODED = {
    "item": 4,
    "history": [2, 1, 1],
    "genres": [4, 1, 1, 3],
    "genre": 1,
    "price": -7.0,
    "title": "ab é漢\0",
    "scores": [0.5, -1.0],
}
NULLS = dict.fromkeys(ENCODED) | {"item": 1, "genre": 1}


@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_batches_are_encoded_as_their_rows(pipeline, start):
    rows = [ROW, dict.fromkeys(ROW), ROW | {"clicked": [], "genres": [None]}, ROW]
    result = pipeline.apply(pa.RecordBatch.from_pylist(rows, schema=RAW).slice(start))
    result.validate(full=True)
    assert result.schema == pipeline.output_schema
    encoded = [ENCODED, NULLS, ENCODED | {"history": [], "genres": [1]}, ENCODED]
    assert result.to_pylist() == encoded[start:]


def test_columns_of_nulls_alone_are_absent_or_oov(pipeline):
    batch = pa.RecordBatch.from_pydict({name: pa.nulls(2) for name in RAW.names})
    assert pipeline.apply(batch).to_pylist() == [NULLS] * 2


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("item_id", pa.array([[1]])),
        ("clicked", pa.array([1])),
        ("item_id", pa.array([0.5])),
        ("price", pa.array(["cheap"])),
        ("title", pa.array([b"\xff"])),
        ("scores", pa.array([[1.0]])),
        ("scores", pa.array([[1e300, 0.0]])),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_column(pipeline, column, values):
    nulls = {field.name: pa.nulls(1, field.type) for field in RAW}
    batch = pa.RecordBatch.from_pydict({**nulls, column: values})
    with pytest.raises(InputDataError, match=f"column '{column}'"):
        pipeline.apply(batch)
    with pytest.raises(InputDataError, match=f"'{column}'"):
        pipeline.apply(batch.drop_columns([column]))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_damaged_plans_are_refused(tmp_path, text):
    (tmp_path / ENCODERS_FILE).write_text(text)
    with pytest.raises(InputDataError, match=r"encoders\.json"):
        read_pipeline(tmp_path)
