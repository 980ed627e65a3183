"""Interim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.decode import ExampleDecoder, WireFeature
from etl.tfrecord.framing import CorruptRecordError, RecordBlock


@dataclass(frozen=True)
class BadRecord:
    record: int
    reason: str


class ByteArrayDecoder:
    schema = pa.schema([("byteArray", pa.binary())])

    def decode_block(self, block: RecordBlock, name: str = "") -> pa.RecordBatch:
        payloads = [block.data[s : s + n].tobytes() for s, n in block.index.tolist()]
        return pa.RecordBatch.from_arrays([pa.array(payloads, pa.binary())], schema=self.schema)

    def decode_sound(self, block: RecordBlock, name: str = ""):
        return self.decode_block(block, name), []


class _Decoder(ExampleDecoder):
    def decode_sound(self, block: RecordBlock, name: str = ""):
        batches, bad = [], []
        for k in range(len(block.index)):
            one = RecordBlock(
                block.data, block.index[k : k + 1], block.offset, block.first_record + k
            )
            try:
                batches.append(self.decode_block(one, name))
            except CorruptRecordError:
                bad.append(BadRecord(k, "not a tf.train.Example"))
        t = pa.Table.from_batches(batches, self.schema).combine_chunks()
        bs = t.to_batches()
        return (bs[0] if bs else pa.RecordBatch.from_pylist([], schema=self.schema)), bad


def build_decoder(features: Any, record_type: str = "Example") -> Any:
    return ByteArrayDecoder() if record_type == "ByteArray" else _Decoder(features)


class FeatureSurvey:
    def __init__(self, record_type: str) -> None:
        self.found: Any = {}
        self.records = 0

    def update(self, block, name):
        from etl.tfrecord.infer import _survey_block

        _survey_block(block, self.found, name)
        self.records += len(block.index)

    def features(self):
        from etl.tfrecord.features import KIND_CODES

        out = []
        for key, (kinds, length) in self.found.items():
            present = [k for k, c in KIND_CODES.items() if kinds >> c & 1]
            if len(present) > 1:
                raise InputDataError(
                    f"feature {key!r} holds different kinds of values in different records"
                )
            out += [WireFeature(key.decode(), k, length > 1) for k in present]
        return out
