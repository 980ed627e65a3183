"""Columns of records by TensorFlow's own parsers: what the compiled decoder is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from etl.tfrecord.codec.framing import RecordBlock
from etl.tfrecord.types.features import WireFeature


class TensorFlowDecoder:
    """Decodes blocks of sound records that hold what is wanted.

    Every feature is parsed as ragged: that tells an absent scalar from a value.

    Args:
        features: What to decode, in the order of the columns.
        record_type: `"Example"` or `"SequenceExample"`.
    """

    def __init__(self, features: Sequence[WireFeature], record_type: str) -> None:
        self._features = tuple(features)
        self._is_sequence = record_type == "SequenceExample"
        self._parse = tf.function(
            self._parse_graph, input_signature=[tf.TensorSpec([None], tf.string)]
        )

    def decode_block(self, block: RecordBlock, name: str) -> pa.RecordBatch:
        """Decodes a block; arguments as those of `etl.tfrecord.codec.decode.Decoder`."""
        data = np.ascontiguousarray(block.data).tobytes()
        payloads = [data[start : start + size] for start, size in block.index.tolist()]
        parsed = self._parse(tf.constant(payloads, tf.string, [len(payloads)]))
        arrays = [_build(feature, parsed[feature.name]) for feature in self._features]
        schema = pa.schema([(f.name, f.arrow_type) for f in self._features])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _parse_graph(self, payloads: tf.Tensor) -> dict[str, tf.RaggedTensor]:
        context = {f.name: _ragged(f) for f in self._features if not f.is_sequence}
        if not self._is_sequence:
            return dict(tf.io.parse_example(payloads, context))
        lists = {f.name: _ragged(f) for f in self._features if f.is_sequence}
        found = tf.io.parse_sequence_example(payloads, context or None, lists or None)
        return {**found[0], **found[1]}


def _ragged(feature: WireFeature) -> tf.io.RaggedFeature:
    kind = tf.string if feature.kind == "bytes" else tf.as_dtype(feature.kind)
    return tf.io.RaggedFeature(kind, row_splits_dtype=tf.int64)


def _build(feature: WireFeature, value: tf.RaggedTensor) -> pa.Array:
    kind = feature.arrow_type
    if feature.is_sequence:
        return pa.ListArray.from_arrays(_offsets(value), _list(value.values, kind.value_type))
    if feature.is_list:
        return _list(value, kind)
    lengths = np.diff(value.row_splits.numpy())
    assert lengths.max(initial=0) <= 1
    positions = pa.array(np.cumsum(lengths) - 1, mask=lengths == 0)
    return pa.array(value.values.numpy(), kind).take(positions)


def _offsets(value: tf.RaggedTensor) -> pa.Array:
    return pa.array(value.row_splits.numpy().astype(np.int32))


def _list(value: Any, kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(
        _offsets(value), pa.array(value.values.numpy(), kind.value_type)
    )
