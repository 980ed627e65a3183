from __future__ import annotations

import pyarrow as pa
import tensorflow as tf

from conf.encoders import VocabularySpec
from etl.encoders.tokens import TokenEncoder


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
