"""The codec's figures come with their limits, and the peers get the same rows."""

from __future__ import annotations

import pytest
import tensorflow as tf

from etl.tfrecord.encode import encode
from etl.tfrecord.framing import index_records
from jobs.bench.tfrecord import codec
from jobs.bench.tfrecord.shapes import SHAPES, build_batch


def by_key(payload: bytes) -> dict[str, bytes]:
    features = tf.train.Example.FromString(payload).features.feature
    return {name: features[name].SerializeToString() for name in features}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_protobuf_is_given_the_rows_that_we_encode(shape):
    batch = build_batch(shape, 3)
    data = encode(batch)
    ours = [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]
    theirs = codec.encode_with_protobuf(shape, batch.to_pylist())
    assert [by_key(record) for record in ours] == [by_key(record) for record in theirs]


def test_a_shape_gives_every_figure_that_needs_no_other_environment():
    found = list(codec.measure_codec(SHAPES["narrow"], 20, 1, None))
    assert [m.name for m in found] == [
        codec.MEMCPY, codec.CRC, codec.ENCODE, codec.DECODE, codec.VERIFY_AND_DECODE,
        codec.PYTHON_EXAMPLE, codec.PARSE_EXAMPLE,
    ]  # fmt: skip
    assert all(m.wall_s > 0 and m.rows == 20 for m in found)
    size = encode(build_batch(SHAPES["narrow"], 20)).size
    assert {m.bytes for m in found[:5]} == {size}
    assert {m.bytes for m in found[5:]} == {size - 20 * 16}  # payloads without their framing
