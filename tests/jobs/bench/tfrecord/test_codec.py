"""The codec's figures come with their limits, and the peers get the same rows."""

from __future__ import annotations

import pytest
import tensorflow as tf

from etl.tfrecord.encode import encode
from etl.tfrecord.framing import index_records, read_records
from jobs.bench.tfrecord import codec
from jobs.bench.tfrecord.shapes import SHAPES, build_batch


def by_key(payload: bytes) -> dict[str, bytes]:
    features = tf.train.Example.FromString(payload).features.feature
    return {name: features[name].SerializeToString() for name in features}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_protobuf_is_given_the_rows_that_we_encode(shape, tmp_path):
    batch, path = build_batch(shape, 3), tmp_path / "rows.tfrecord"
    data = encode(batch)
    ours = [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]
    codec.write_with_tensorflow(shape, batch.to_pylist(), str(path))
    written = list(read_records(path))
    extended = codec.encode_by_extend(shape, batch.to_pylist())
    for theirs in (written, extended):
        assert [by_key(record) for record in ours] == [by_key(record) for record in theirs]


def test_a_shape_gives_every_figure_that_needs_no_other_environment():
    found = list(codec.measure_codec(SHAPES["narrow"], 20, 1, None))
    assert [m.name for m in found] == [
        codec.MEMCPY, codec.COLD_MEMCPY, codec.CRC, codec.ENCODE, codec.DECODE,
        codec.VERIFY_AND_DECODE, codec.PYTHON_EXAMPLE, codec.PYTHON_EXTEND, codec.PARSE_EXAMPLE,
    ]  # fmt: skip
    assert all(m.wall_s > 0 and m.rows == 20 for m in found)
    size = encode(build_batch(SHAPES["narrow"], 20)).size
    assert {m.bytes for m in found[:7]} == {size}
    assert {m.bytes for m in found[7:]} == {size - 20 * 16}  # payloads without their framing
