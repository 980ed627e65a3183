"""Lists as feature lists: TensorFlow parses one value per step, and back they are the same."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.feature_lists import flatten_lists, nest_lists, nest_schema, parse_feature_lists

lists = st.lists(st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=4)), max_size=12)


@given(lists, st.integers(0, 3))
def test_nesting_is_undone_by_flattening_also_in_slices(rows, first):
    batch = pa.record_batch({"h": pa.array(rows, pa.list_(pa.int64())), "x": [1] * len(rows)})
    batch = batch.slice(min(first, len(rows)))
    nested = nest_lists(batch, ("h",))
    wanted = [None if row is None else [[v] for v in row] for row in batch.column("h").to_pylist()]
    assert nested.column("h").to_pylist() == wanted
    assert nested.schema == nest_schema(batch.schema, ("h",))
    assert flatten_lists(nested, ("h",)).to_pylist() == batch.to_pylist()


def test_tensorflow_reads_context_and_ragged_feature_lists():
    tf = pytest.importorskip("tensorflow")
    schema = pa.schema(
        [("user", pa.int64()), ("h", pa.list_(pa.int64())), ("t", pa.list_(pa.float32()))]
    )
    batch = pa.RecordBatch.from_pylist(
        [{"user": 1, "h": [3, 4], "t": [0.5]}, {"user": 2, "h": [], "t": []}], schema
    )
    nested = nest_lists(batch, ("h",))
    encoder = build_encoder(nested.schema, "SequenceExample")
    framed = b"".join(bytes(chunk) for chunk in encoder.encode_chunks(nested, 10))
    size = int.from_bytes(framed[:8], "little")
    parsed = tf.train.SequenceExample.FromString(framed[12 : 12 + size])
    assert parsed.context.feature["user"].int64_list.value == [1]
    assert parsed.context.feature["t"].float_list.value == [0.5]
    steps = parsed.feature_lists.feature_list["h"].feature
    assert [list(step.int64_list.value) for step in steps] == [[3], [4]]
    context, sequences = tf.io.parse_single_sequence_example(
        framed[12 : 12 + size],
        {"user": tf.io.FixedLenFeature([], tf.int64)},
        {"h": tf.io.FixedLenSequenceFeature([], tf.int64)},
    )
    assert (int(context["user"]), sequences["h"].numpy().tolist()) == (1, [3, 4])


def test_only_list_columns_are_taken():
    schema = pa.schema([("user", pa.int64()), ("history", pa.list_(pa.int64()))])
    for name in ("user", "histroy"):
        with pytest.raises(ConfigError, match="history"):
            nest_schema(schema, (name,))
    for text in ("history", "[1]", "{}"):
        with pytest.raises(ConfigError, match="featureLists"):
            parse_feature_lists(text)
