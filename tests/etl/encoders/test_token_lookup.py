"""Token lookups: exact, with OOV and its buckets."""

from __future__ import annotations

import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.encoders import VocabularySpec
from conf.errors import InputDataError
from etl.encoders.token_lookup import TokenEncoder, build_lookup

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
@given(vocabulary_and_values(st.one_of(INT64, st.integers(-3, 3))))
def test_integers_get_the_ids_of_a_dict(case):
    tokens, values, start, stop = case
    lookup = build_lookup(pa.array(tokens, pa.int64()))
    array = pa.array(values, pa.int64())[start:stop]
    assert lookup.encode(array).to_pylist() == expected_ids(tokens, values[start:stop])


@settings(deadline=None)
@given(
    vocabulary_and_values(TEXT),
    st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]),
)
def test_strings_get_the_ids_of_a_dict(case, data_type):
    tokens, values, start, stop = case
    lookup = build_lookup(pa.array(tokens, pa.string()))
    array = pa.array(values, pa.string()).cast(data_type)[start:stop]
    assert lookup.encode(array).to_pylist() == expected_ids(tokens, values[start:stop])


@settings(deadline=None)
@given(vocabulary_and_values(TEXT))
def test_a_vocabulary_may_be_a_slice(case):
    tokens, values, start, stop = case
    tokens = list(dict.fromkeys(tokens))
    start, stop = min(start, len(tokens)), min(stop, len(tokens))
    lookup = build_lookup(pa.array(tokens, pa.string())[start:stop])
    assert lookup.encode(pa.array(values, pa.string())).to_pylist() == expected_ids(
        tokens[start:stop], values
    )


@pytest.mark.parametrize("tokens", [[5, 7], ["5", "7"]])
def test_chunks_are_encoded_in_order(tokens):
    lookup = build_lookup(pa.array(tokens))
    chunks = pa.chunked_array(
        [pa.array(tokens), pa.array([None, tokens[1]], pa.array(tokens).type)]
    )
    assert lookup.encode(chunks).to_pylist() == [2, 3, 1, 3]
    assert lookup.encode(chunks[:0]).to_pylist() == []


def test_other_integer_types_and_dictionaries_are_looked_up_by_value():
    lookup = build_lookup(pa.array([7, -1]))
    assert lookup.encode(pa.array([7, 3], pa.int8())).to_pylist() == [2, 1]
    assert lookup.encode(pa.array([-1, None, 7]).dictionary_encode()).to_pylist() == [3, 1, 2]
    assert lookup.encode(pa.nulls(2)).to_pylist() == [1, 1]
    with pytest.raises(pa.ArrowInvalid):
        lookup.encode(pa.array([2**64 - 1], pa.uint64()))  # must not wrap to -1


def test_a_large_vocabulary_is_found_whole():
    tokens = pa.array(range(0, 300_000 * 4096, 4096))  # equal low bits: a weak hash would crawl
    lookup = build_lookup(tokens)
    assert len(lookup) == 300_000
    assert lookup.encode(tokens).equals(pa.array(range(2, 300_002)))


@pytest.mark.parametrize("tokens", [[1, 2, 1], ["a", "", "a"], [1, None], ["a", None]])
def test_repeated_and_null_tokens_are_refused(tokens):
    with pytest.raises(InputDataError, match=r"twice|null"):
        build_lookup(pa.array(tokens))


def test_other_token_types_are_refused():
    with pytest.raises(InputDataError, match="double"):
        build_lookup(pa.array([1.5]))


def test_unknown_tokens_are_hashed_to_buckets_before_the_tokens():
    spec = VocabularySpec("v", "string", "v.parquet", 7, "", oov_buckets=3)
    table = pa.table({"token": ["x", "y"], "id": [5, 6], "count": [2, 1]})
    (bucket,) = tf.strings.to_hash_bucket_fast(tf.constant(["?"]), 3).numpy()
    found = TokenEncoder(spec, table).encode(pa.array(["y", None, "?", "x"]))
    assert found.to_pylist() == [6, 1, 2 + bucket, 5]


def test_retired_tokens_are_unknown_but_others_keep_their_ids():
    spec = VocabularySpec("v", "int64", "v.parquet", 5, "")
    table = pa.table({"token": [7, 8, 9], "id": [2, 3, 4], "count": [1, 0, 1]})
    table = table.append_column("is_retired", pa.array([False, True, False]))
    assert TokenEncoder(spec, table).encode(pa.array([9, 8, 7])).to_pylist() == [4, 1, 2]
