"""Vocabularies that are looked up by a join: the same ids, shards and statistics as without one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.encoders import VocabularySpec
from etl.build import build_dataset
from etl.encoders.arrow_columns import flatten_lists
from etl.encoders.joined_vocabulary import JoinedColumn, join_vocabularies
from etl.encoders.token_lookup import JoinedTokenEncoder, TokenEncoder
from etl.encoders.vocabulary import (
    load_vocabulary,
    vocabulary_schema,
    write_ordered,
    write_vocabulary,
)
from tests.etl.logs import RATINGS, build_config, write_logs
from tests.etl.test_build_encoders import DAY, FEATURES, HISTORY, LATE, PAST, feature

WORDS = ["", "a", "b", "ab", "é", "漢", '"', "null", "a,b", "zz"]
NUMBERS = [*range(-3, 6), 2**62, -(2**62)]


def draw(seed: int, choices: list, known: int) -> tuple[list, list]:
    """Lists of values, some without a token, and the tokens."""
    generator = random.Random(seed)

    def pick() -> list | None:
        if generator.random() < 0.1:
            return None
        return [generator.choice([None, *choices]) for _ in range(generator.randrange(6))]

    return [pick() for _ in range(300)], generator.sample(choices, known)


@pytest.mark.parametrize("oov_buckets", [None, 7])
@pytest.mark.parametrize(("kind", "choices"), [("string", WORDS), ("int64", NUMBERS)])
def test_a_join_finds_the_ids_of_lists_and_of_values(spark, tmp_path, kind, choices, oov_buckets):
    lists, tokens = draw(11, choices, 6)
    first = 2 + (oov_buckets or 0)
    columns = [tokens, range(first, first + len(tokens)), range(len(tokens))]
    table = pa.table([pa.array(own) for own in columns], schema=vocabulary_schema(kind))
    spec = write_vocabulary(table, tmp_path / "v.parquet", oov_buckets)
    type_ = "bigint" if kind == "int64" else "string"
    rows = [(n, own, own[0] if own else None) for n, own in enumerate(lists)]
    frame = spark.createDataFrame(rows, f"n int, many array<{type_}>, one {type_}")
    joined = [JoinedColumn(name, name == "many", tmp_path, spec) for name in ("many", "one")]
    found = join_vocabularies(frame.repartition(3), joined).toArrow().sort_by("n")
    assert found.drop_columns([own.name for own in joined]).to_pylist() == [
        {"n": n, "many": many, "one": one} for n, many, one in rows
    ]
    encoder, lookup = JoinedTokenEncoder(oov_buckets), TokenEncoder.of(spec, table)
    one = found[joined[1].name].combine_chunks()
    assert encoder.encode(one).equals(lookup.encode(found["one"].combine_chunks()))
    ids, its_rows = flatten_lists(found[joined[0].name].combine_chunks())
    values, raw_rows = flatten_lists(found["many"].combine_chunks())
    assert encoder.encode(ids).equals(lookup.encode(values))
    np.testing.assert_array_equal(its_rows.offsets, raw_rows.offsets)
    np.testing.assert_array_equal(its_rows.is_null, raw_rows.is_null)


def test_a_vocabulary_that_comes_in_parts_is_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setattr("etl.encoders.vocabulary._GROUP_ROWS", 4)
    tokens = [f"t{n}" for n in range(10)]
    counts, ids = list(range(20, 10, -1)), range(5, 15)
    whole = pa.table([tokens, ids, counts], schema=vocabulary_schema("string"))
    (tmp_path / "parts").mkdir()
    wanted = write_vocabulary(whole, tmp_path / "v.parquet", 3)
    (batch,) = whole.select(["token", "count"]).to_batches()
    batches = [batch.slice(start, rows) for start, rows in ((0, 1), (1, 0), (1, 8), (9, 1))]
    found = write_ordered(batches, tmp_path / "parts" / "v.parquet", "string", 3)
    assert found == wanted == VocabularySpec("v", "string", "v.parquet", 15, wanted.file_crc32c, 3)
    assert load_vocabulary(tmp_path / "parts", found).equals(whole)


TOKENS = [
    feature("tag_ids", "tags", "vocabulary", "item", min_count=2, oov_buckets=3, max_len=2),
    feature("group_ids", "group", "vocabulary", "user", max_size=1, oov_buckets=2),
    feature("past_group", "past_group", "vocabulary", "user", name="group_ids"),
]
WITH_GROUP = {**PAST, "columns": ["rating", "group"]}


def build_days(spark, folder: Path, vocabulary_bytes: int) -> list:
    """Builds two days; the second one continues vocabularies, and retires a token."""
    logs = write_logs(folder / "logs")
    (logs / "genders.txt").write_text("X\nM\n")
    late = [f"{user}::{item}::4::{5 * DAY + n}" for n, (user, item) in enumerate(LATE)]
    config = build_config(
        logs,
        folder / "out",
        features=[*FEATURES, *TOKENS],
        histories=[HISTORY, WITH_GROUP],
        contract={"allow": ["hour"]},
        spark={"sluice.vocabularyBytes": vocabulary_bytes},
    )
    first = build_dataset(spark, config)
    write_logs(logs, [*RATINGS, *late])
    return [first, build_dataset(spark, config)]


def test_a_build_that_joins_its_vocabularies_gives_the_same_version(spark, tmp_path):
    held = build_days(spark, tmp_path / "held", 1 << 20)
    joined = build_days(spark, tmp_path / "joined", 1)
    for one, other in zip(held, joined, strict=True):
        assert one.manifest.splits == other.manifest.splits
        assert one.manifest.statistics == other.manifest.statistics
        assert one.manifest.encoder_files == other.manifest.encoder_files
        assert one.manifest.encoders_fingerprint == other.manifest.encoders_fingerprint
