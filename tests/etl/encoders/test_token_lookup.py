"""Token lookups: exact, with OOV and its buckets; statistics of tokens, out of fold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders import VocabularySpec
from conf.encoders.target import Statistic
from conf.errors import InputDataError
from etl.encoders.token_lookup import TokenEncoder
from etl.encoders.vocabulary import read_statistic_table, write_statistic_table
from tests.etl.encoders.fitting import encode_columns

INT64 = st.integers(-(2**63), 2**63 - 1)
# Few letters, so that tokens share prefixes and lengths, zero bytes and multi-byte characters.
TEXT = st.text(st.sampled_from("ab\0é漢"), max_size=20)


def expected_ids(tokens: list, values: list) -> list[int]:
    ids = {token: position + 2 for position, token in enumerate(tokens)}
    return [1 if value is None else ids.get(value, 1) for value in values]


@st.composite
def vocabulary_and_values(draw, token):
    tokens = draw(st.lists(token, unique=True, max_size=60))
    known = st.sampled_from(tokens) if tokens else token
    values = draw(st.lists(st.one_of(st.none(), known, token), max_size=80))
    start = draw(st.integers(0, len(values)))
    stop = draw(st.integers(start, len(values)))
    return tokens, values, start, stop


@settings(deadline=None)
@given(
    vocabulary_and_values(st.one_of(INT64, st.integers(-3, 3))).map(lambda case: (pa.int64(), case))
    | st.tuples(
        st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]),
        vocabulary_and_values(TEXT),
    )
)
def test_tokens_get_the_ids_of_a_dict(drawn):
    data_type, (tokens, values, start, stop) = drawn
    plain = pa.int64() if data_type == pa.int64() else pa.string()
    encoder = TokenEncoder(pa.array(tokens, plain))
    array = pa.array(values, plain).cast(data_type)[start:stop]
    assert encoder.encode(array).to_pylist() == expected_ids(tokens, values[start:stop])


def test_other_integer_types_and_dictionaries_are_looked_up_by_value():
    lookup = TokenEncoder(pa.array([7, -1]))
    assert lookup.encode(pa.array([7, 3], pa.int8())).to_pylist() == [2, 1]
    assert lookup.encode(pa.array([-1, None, 7]).dictionary_encode()).to_pylist() == [3, 1, 2]
    assert lookup.encode(pa.nulls(2)).to_pylist() == [1, 1]
    with pytest.raises(pa.ArrowInvalid):
        lookup.encode(pa.array([2**64 - 1], pa.uint64()))  # must not wrap to -1


def test_a_large_vocabulary_is_found_whole():
    tokens = pa.array(range(0, 300_000 * 4096, 4096))  # equal low bits: a weak hash would crawl
    lookup = TokenEncoder(tokens)
    assert lookup.encode(tokens).equals(pa.array(range(2, 300_002)))


def test_unknown_tokens_are_hashed_to_buckets_before_the_tokens():
    spec = VocabularySpec("v", "string", "v.parquet", 7, "", oov_buckets=3)
    table = pa.table({"token": ["x", "y"], "id": [5, 6], "count": [2, 1]})
    (bucket,) = tf.strings.to_hash_bucket_fast(tf.constant(["?"]), 3).numpy()
    found = TokenEncoder.of(spec, table).encode(pa.array(["y", None, "?", "x"]))
    assert found.to_pylist() == [6, 1, 2 + bucket, 5]


def test_retired_tokens_are_unknown_but_others_keep_their_ids():
    spec = VocabularySpec("v", "int64", "v.parquet", 5, "")
    table = pa.table({"token": [7, 8, 9], "id": [2, 3, 4], "count": [1, 0, 1]})
    table = table.append_column("is_retired", pa.array([False, True, False]))
    assert TokenEncoder.of(spec, table).encode(pa.array([9, 8, 7])).to_pylist() == [4, 1, 2]


def test_a_table_comes_back_and_a_damaged_or_foreign_file_is_refused(tmp_path):
    values, file = np.array([[0.5, 0.25], [1.0, 2.0]]), tmp_path / "rate.table.parquet"
    spec = write_statistic_table(values, file)
    np.testing.assert_array_equal(read_statistic_table(tmp_path, spec), values.astype(np.float32))
    assert pq.read_schema(file).names == ["all", "fold_0"]
    assert write_statistic_table(values[:], file) == spec
    for wrong in ({"rows": 4}, {"file": "../x"}):
        with pytest.raises(InputDataError):
            read_statistic_table(tmp_path, replace(spec, **wrong))
    file.write_bytes(b"PAR1")
    with pytest.raises(InputDataError, match="checksum"):
        read_statistic_table(tmp_path, spec)


def test_train_rows_read_the_other_folds_and_all_else_the_whole():
    table = np.array([[0.0, 0.0, 0.0], [0.5, 0.4, 0.6], [0.75, 0.25, 1.0]])
    columns = [pa.array(["a", "a", "a", "?"]), pa.array([0, 1, None, None])]
    fitted = {"tokens": TokenEncoder(pa.array(["a"])), "table": table}
    operation = Statistic("token", "rate")
    assert encode_columns(operation, *columns, **fitted) == [0.25, 1.0, 0.75, 0.5]
    assert encode_columns(operation, columns[0][:1], **fitted) == [0.75]
