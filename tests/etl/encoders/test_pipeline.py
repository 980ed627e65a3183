"""The encoder pipeline: batches encoded, the same on any cut of the rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("encoders")
    specs = (
        write_vocabulary(vocabulary(ITEMS), path / "item.parquet"),
        write_vocabulary(vocabulary(GENRES), path / "genre.parquet"),
    )
    plan = EncoderPlan(SCHEMA, COLUMNS, specs)
    (path / ENCODERS_FILE).write_text(plan.dumps())
    return path


@pytest.fixture(scope="module")
def pipeline(directory) -> EncoderPipeline:
    return read_pipeline(directory)


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

ITEM = st.one_of(st.none(), st.sampled_from([*ITEMS, 0, -1, 99]))
GENRE = st.one_of(st.none(), st.sampled_from([*GENRES, "Drama", "war"]))
ROW = st.fixed_dictionaries(
    {
        "scores": st.one_of(st.none(), st.lists(st.floats(width=32, allow_nan=False),
                                                min_size=2, max_size=2)),
        "title": st.one_of(st.none(), st.text("ab é漢\0", max_size=5)),
        "ignored": st.just(0),
        "clicked": st.one_of(st.none(), st.lists(ITEM, max_size=6)),
        "item_id": ITEM,
        "genres": st.one_of(st.none(), st.lists(GENRE, max_size=4)),
        "main_genre": GENRE,
        "price": st.one_of(st.none(), st.integers(-1000, 1000)),
    }
)  # fmt: skip


def encode_row(row: dict) -> dict:
    """The semantics, a row and a value at a time."""

    def token_id(tokens: list, token: object) -> int:
        return tokens.index(token) + 2 if token in tokens else 1

    def ids(tokens: list, values: list | None, max_len: int | None = None) -> list | None:
        return values if values is None else [token_id(tokens, v) for v in values[:max_len]]

    return {
        "item": token_id(ITEMS, row["item_id"]),
        "history": ids(ITEMS, row["clicked"], 3),
        "genres": ids(GENRES, row["genres"]),
        "genre": token_id(GENRES, row["main_genre"]),
        "price": row["price"],
        "title": row["title"],
        "scores": row["scores"],
    }


@settings(deadline=None)
@given(rows=st.lists(ROW, max_size=12), data=st.data())
def test_batches_are_encoded_as_rows_would_be(pipeline, rows, data):
    start = data.draw(st.integers(0, len(rows)))
    batch = pa.RecordBatch.from_pylist(rows, schema=RAW).slice(start)
    result = pipeline.apply(batch)
    result.validate(full=True)
    assert result.schema == pipeline.output_schema
    assert result.to_pylist() == [encode_row(row) for row in rows[start:]]


def test_columns_of_nulls_alone_are_absent_or_oov(pipeline):
    batch = pa.RecordBatch.from_pydict({name: pa.nulls(2) for name in RAW.names})
    assert pipeline.apply(batch).to_pylist()[1] == {
        "item": 1, "history": None, "genres": None, "genre": 1, "price": None, "title": None,
        "scores": None,
    }  # fmt: skip


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
