"""Interim."""
from __future__ import annotations
from typing import Any
import pyarrow as pa
from conf.errors import ConfigError, InputDataError
from etl.tfrecord.decode import ExampleDecoder, WireFeature
from etl.tfrecord.framing import CorruptRecordError, RecordBlock
from dataclasses import dataclass

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
            one = RecordBlock(block.data, block.index[k:k+1], block.offset, block.first_record + k)
            try: batches.append(self.decode_block(one, name))
            except CorruptRecordError as e: bad.append(BadRecord(k, "not a tf.train.Example"))
        t = pa.Table.from_batches(batches, self.schema).combine_chunks()
        bs = t.to_batches()
        return (bs[0] if bs else pa.RecordBatch.from_pylist([], schema=self.schema)), bad

def build_decoder(features: Any, record_type: str = "Example") -> Any:
    return ByteArrayDecoder() if record_type == "ByteArray" else _Decoder(features)

class FeatureSurvey:
    def __init__(self, record_type: str) -> None:
        self.found: Any = {}; self.records = 0
    def update(self, block, name):
        from etl.tfrecord.infer import _survey_block
        _survey_block(block, self.found, name); self.records += len(block.index)
    def features(self):
        from etl.tfrecord.features import KIND_CODES
        out = []
        for key, (kinds, length) in self.found.items():
            present = [k for k, c in KIND_CODES.items() if kinds >> c & 1]
            if len(present) > 1: raise InputDataError(f"feature {key!r} holds different kinds of values in different records")
            out += [WireFeature(key.decode(), k, length > 1) for k in present]
        return out

def _kind(t):
    if pa.types.is_boolean(t) or pa.types.is_integer(t): return "int64"
    if pa.types.is_floating(t) or pa.types.is_decimal(t): return "float32"
    if pa.types.is_string(t) or pa.types.is_binary(t): return "bytes"
    return None

class Raising:
    def __init__(self, target, record_type):
        self.target = target
        bad, fs = [], []
        for f in target:
            is_list = pa.types.is_list(f.type)
            kind = _kind(f.type.value_type if is_list else f.type)
            if kind is None: bad.append(f"{f.name} ({f.type})")
            else: fs.append(WireFeature(f.name, kind, is_list))
        if bad: raise ConfigError("cannot be read", received=", ".join(bad))
        if record_type == "ByteArray" and [f.type for f in target] != [pa.binary()]:
            raise ConfigError("record type ByteArray is read as one binary column")
        self.features = tuple(fs)
    def apply(self, batch, name):
        cols = []
        for f, c in zip(self.target, batch.columns, strict=True):
            try:
                d = f.type.value_type if pa.types.is_list(f.type) else f.type
                if pa.types.is_decimal(d): c = c.cast(pa.list_(pa.string()) if d is not f.type else pa.string())
                c = c.cast(f.type)
            except pa.ArrowInvalid as e:
                raise InputDataError(f"{name}: feature {f.name!r} does not fit the type", received=str(e))
            if c.null_count and not f.nullable: raise InputDataError(f"{name}: {f.name!r} not nullable")
            cols.append(c)
        return pa.RecordBatch.from_arrays(cols, schema=self.target)

def plan_raising(target, record_type, options=None, slots=None): return Raising(target, record_type)
