"""The decoder `tensorflow`: `tf.io.parse_example` on whole blocks of records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.errors import InputDataError
from etl.tfrecord.reading import (
    BadRecord,
    RecordBlock,
    WireFeature,
    corrupt_record,
)
from training.reader.feature_columns import SEQUENCE_RECORDS

# TensorFlow fails to report an error whose message holds bytes of a record that are no text.
_PARSE_ERRORS = (tf.errors.InvalidArgumentError, UnicodeDecodeError)
_MEMBERS = {"int64": "int64_list", "float32": "float_list", "bytes": "bytes_list"}
_FEATURE_IN_MESSAGE = re.compile(r"(?:Key|Feature): (\S+?)[.,]? ")


class TensorFlowDecoder:
    """Decodes by TensorFlow's own parsers.

    Every feature is parsed as ragged: that tells an absent scalar, and a list where one value is
    wanted, from a value. Packed features alone have a length, which is the same in every record.

    Args:
        features: What to decode, in the order of the columns.
        record_type: `"Example"` or `"SequenceExample"`.
        lengths: Lists that must be of this length in every record.
    """

    def __init__(
        self,
        features: Sequence[WireFeature],
        record_type: str = "Example",
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        self._features, self._lengths = tuple(features), dict(lengths or {})
        self._members = {feature.name: _MEMBERS[feature.kind] for feature in self._features}
        self._is_sequence = record_type == SEQUENCE_RECORDS
        self._message = tf.train.SequenceExample if self._is_sequence else tf.train.Example
        self._parse = tf.function(
            self._parse_graph, input_signature=[tf.TensorSpec([None], tf.string)]
        )

    def decode_block(self, block: RecordBlock, name: str) -> pa.RecordBatch:
        """Decodes a block; see `BlockDecoder`."""
        data = np.ascontiguousarray(block.data).tobytes()
        payloads = [data[start : start + size] for start, size in block.index.tolist()]
        try:
            parsed = self._parse(tf.constant(payloads, tf.string, [len(payloads)]))
        except _PARSE_ERRORS as error:
            raise self._explain(error, block, payloads, name) from error
        arrays = [self._build(f, parsed[f.name], block, name) for f in self._features]
        schema = pa.schema([(f.name, f.arrow_type) for f in self._features])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def decode_sound(self, block: RecordBlock, name: str) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records of a block; see `BlockDecoder`."""
        bad = []
        for record, (start, size) in enumerate(block.index.tolist()):
            try:
                found = self._message.FromString(block.data[start : start + size].tobytes())
            except Exception:  # protobuf's own error type depends on its implementation
                bad.append(BadRecord(record, f"not a tf.train.{self._message.__name__}"))
            else:
                reason = self._find_wrong_length(found)
                bad += [] if reason is None else [BadRecord(record, reason)]
        index = np.delete(block.index, [record.record for record in bad], axis=0)
        sound = RecordBlock(block.data, index, block.offset, block.first_record)
        return self.decode_block(sound, name), bad

    def _parse_graph(self, payloads: tf.Tensor) -> dict[str, tf.RaggedTensor]:
        context = {f.name: self._spec(f) for f in self._features if not f.is_sequence}
        if not self._is_sequence:
            return dict(tf.io.parse_example(payloads, context)) if context else {}
        lists = {f.name: _ragged(f) for f in self._features if f.is_sequence}
        found = tf.io.parse_sequence_example(payloads, context or None, lists or None)
        return {**found[0], **found[1]}

    def _spec(self, feature: WireFeature) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
        length = self._lengths.get(feature.name)
        return (
            _ragged(feature) if length is None else tf.io.FixedLenFeature([length], _dtype(feature))
        )

    def _build(self, feature: WireFeature, value: Any, block: RecordBlock, name: str) -> pa.Array:
        kind = feature.arrow_type
        if feature.name in self._lengths:
            value = tf.RaggedTensor.from_tensor(value)
        if feature.is_sequence:
            steps = _list_array(value.values, kind.value_type)
            return pa.ListArray.from_arrays(_offsets(value), steps)
        if feature.is_list:
            return _list_array(value, kind)
        lengths = np.diff(value.row_splits.numpy())
        if len(lengths) and lengths.max() > 1:
            record = int(lengths.argmax())
            raise InputDataError(
                f"{name}: feature {feature.name!r} holds several values where one is wanted",
                received=f"record {block.first_record + record}, at byte offset "
                f"{block.offset + int(block.index[record, 0])}",
                fix="read it as a list",
            )
        positions = np.cumsum(lengths) - 1
        return _leaf(value.values, kind).take(pa.array(positions, mask=lengths == 0))

    def _find_wrong_length(self, record: Any) -> str | None:
        """What is wrong with the length of a list in a record, or None."""
        found = (record.context if self._is_sequence else record.features).feature
        members = self._members
        for name, length in self._lengths.items():
            if name not in members or found[name].WhichOneof("kind") not in (None, members[name]):
                continue
            count = len(getattr(found[name], members[name]).value)
            if count != length:
                return f"feature {name!r} holds {count} values instead of {length}"
        return None

    def _explain(
        self, error: Exception, block: RecordBlock, payloads: list[bytes], name: str
    ) -> InputDataError:
        """The error that names the first record that cannot be parsed alone."""
        for record, payload in enumerate(payloads):
            try:
                self._parse(tf.constant([payload]))
            except _PARSE_ERRORS as alone:
                offset = block.offset + int(block.index[record, 0])
                number = block.first_record + record
                wanted = {f.name: f.kind for f in self._features}
                named = [key for key in _FEATURE_IN_MESSAGE.findall(str(alone)) if key in wanted]
                if not named:
                    kind = f"tf.train.{self._message.__name__}"
                    return corrupt_record(name, offset, number, f"not a {kind}")
                reason = self._find_wrong_length(self._message.FromString(payload))
                if reason is not None:
                    return corrupt_record(name, offset, number, reason)
                return InputDataError(
                    f"{name}: feature {named[0]!r} holds another kind of values",
                    received=f"record {number}, at byte offset {offset}",
                    allowed=wanted[named[0]],
                    fix="read it as the kind that was written",
                )
        return InputDataError(f"{name} cannot be parsed", received=str(error)[:300])


def _dtype(feature: WireFeature) -> tf.DType:
    return tf.string if feature.kind == "bytes" else tf.as_dtype(feature.kind)


def _ragged(feature: WireFeature) -> tf.io.RaggedFeature:
    return tf.io.RaggedFeature(_dtype(feature), row_splits_dtype=tf.int64)


def _offsets(value: tf.RaggedTensor) -> pa.Array:
    return pa.array(value.row_splits.numpy().astype(np.int32))


def _list_array(value: tf.RaggedTensor, kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(_offsets(value), _leaf(value.values, kind.value_type))


def _leaf(values: tf.Tensor, kind: pa.DataType) -> Any:
    return pa.array(values.numpy(), kind)
