"""N-grams against a plain Python reference."""

from __future__ import annotations

import re

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.operations import Ngrams
from etl.encoders.hashed import hash_to_buckets
from etl.encoders.ngrams import NgramEncoder

TEXTS = st.text(st.sampled_from("aB9 -_é日\0\n"), max_size=15) | st.text(max_size=10)


def reference(text: str, operation: Ngrams) -> list[str]:
    if operation.lower:
        text = re.sub("[A-Z]", lambda match: match[0].lower(), text)
    words = [word for word in re.split(r"[^0-9A-Za-z\x80-\U0010ffff]+", text) if word]
    units = words if operation.unit == "word" else list(" ".join(words))
    join = " " if operation.unit == "word" else ""
    return [
        join.join(units[i : i + size])
        for size in operation.sizes
        for i in range(len(units) - size + 1)
    ]


@settings(deadline=None)
@given(
    st.lists(st.none() | TEXTS, max_size=8),
    st.sampled_from(["word", "char"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.integers(1, 6),
)
def test_runs_of_words_and_characters(texts, unit, sizes, lower, max_len):
    operation = Ngrams(unit, tuple(sizes), 10**9, lower)
    column = pa.array(["skipped", *texts], pa.string())[1:]
    found = NgramEncoder(operation, max_len).encode([column]).to_pylist()
    for text, ids in zip(texts, found, strict=True):
        if text is None:
            assert ids is None
            continue
        grams = reference(text, operation)[:max_len]
        assert ids == (hash_to_buckets(pa.array(grams, pa.string()), 10**9) + 2).tolist()
