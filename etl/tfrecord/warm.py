"""Compiles the codec ahead of its first use."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from etl.tfrecord.codec import framing
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.codec.framing import RecordBlock, index_records
from etl.tfrecord.codec.infer import FeatureCollector, count_feature_lists
from etl.tfrecord.codec.row_placement import RowWriter
from etl.tfrecord.types.features import RECORD_TYPES


def warm_kernels() -> None:
    """Compiles, or loads from the cache, every kernel of the write and the read path.

    Compiling takes 15 to 30 seconds on one core, loading from the cache about half a second. Call
    it where the cache is filled once for many processes: at installation, when an image is built,
    or on the driver before local workers start.
    """
    crc32c(b"")
    _warm_framing()
    for record_type in RECORD_TYPES:
        columns: dict[str, pa.Array] = {"b": pa.array([b"x"])}
        if record_type != "ByteArray":
            columns |= {"i": pa.array([1]), "l": pa.array([[1.0, 2.0]], pa.list_(pa.float32()))}
        if record_type == "SequenceExample":
            columns["s"] = pa.array([[[1]]])
        batch = pa.record_batch(columns)
        data = build_encoder(batch.schema, record_type).encode(batch)
        index = index_records(data)
        collector = FeatureCollector(record_type)
        collector.update(RecordBlock(data, index, 0, 0))
        count_feature_lists(RecordBlock(data, index, 0, 0))
        features = collector.features()
        build_decoder(features, record_type).decode(data, np.ascontiguousarray(index))
    RowWriter([np.zeros(1, np.int64)], [0]).write([pa.array([1])], np.zeros(1, np.int64))


def _warm_framing() -> None:
    """What reading past damage and splitting files need."""
    nothing = np.zeros(16, np.uint8)
    address = nothing.ctypes.data
    framing.find_record(address, nothing.size, True)
    framing.is_header(address, nothing.size)
    framing.walk_headers(address, nothing.size, nothing.size, np.empty(2, np.int64))


if __name__ == "__main__":
    warm_kernels()
