"""Encodes and decodes with tfx_bsl, in an environment of its own.

Run as a file by that environment's Python, which need not know this package:
`python tfx_peer.py encode|decode|time INPUT [OUTPUT] [REPEATS]`. Rows come and go as Arrow IPC
files, records as a column of binary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa


def as_lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Scalars as lists of one, which is the only form that the encoder takes."""
    arrays = []
    for column in batch.columns:
        column = column.cast(_as_bytes(column.type))
        if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
            valid = column.is_valid().cast(pa.int8()).to_numpy(zero_copy_only=False)
            offsets = pa.array([0, *valid.cumsum().tolist()], pa.int64())
            lists = pa.LargeListArray.from_arrays(
                offsets, column.drop_null(), mask=column.is_null() if column.null_count else None
            )
            column = lists
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _as_bytes(data_type: pa.DataType) -> pa.DataType:
    """The encoder takes no text."""
    if pa.types.is_list(data_type):
        return pa.list_(_as_bytes(data_type.value_type))
    return pa.binary() if pa.types.is_string(data_type) else data_type


def build_encoder() -> Any:
    """Builds the encoder."""
    from tfx_bsl.coders import example_coder

    return example_coder.RecordBatchToExamplesEncoder()


def build_decoder(batch: pa.RecordBatch) -> Any:
    """Builds the decoder with the schema of a batch, which is faster than without one."""
    from tensorflow_metadata.proto.v0 import schema_pb2
    from tfx_bsl.coders import example_coder

    schema = schema_pb2.Schema()
    for field in batch.schema:
        kind = getattr(field.type, "value_type", field.type)
        feature = schema.feature.add(name=field.name)
        if pa.types.is_integer(kind):
            feature.type = schema_pb2.INT
        else:
            feature.type = schema_pb2.FLOAT if pa.types.is_floating(kind) else schema_pb2.BYTES
    return example_coder.ExamplesToRecordBatchDecoder(schema.SerializeToString())


def read_batch(path: str) -> pa.RecordBatch:
    """Reads the one batch of an Arrow IPC file."""
    with pa.OSFile(path, "rb") as source, pa.ipc.open_file(source) as reader:
        return reader.get_batch(0)


def write_batch(path: str, batch: pa.RecordBatch) -> None:
    """Writes a batch as an Arrow IPC file."""
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def best(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Least wall and CPU seconds of several runs, after one that warms up."""
    work()
    rounds = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        rounds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(w for w, _ in rounds), min(c for _, c in rounds)


def main(arguments: list[str]) -> None:
    """Does what the command line says."""
    command, path, *rest = arguments
    batch = read_batch(path)
    if command == "encode":
        records = build_encoder().encode(as_lists(batch))
        write_batch(rest[0], pa.record_batch([pa.array(records, pa.binary())], ["record"]))
    elif command == "decode":
        records = batch.column(0).to_pylist()
        template = read_batch(rest[1])
        write_batch(rest[0], build_decoder(template).DecodeBatch(records))
    else:
        lists, encoder = as_lists(batch), build_encoder()
        records = encoder.encode(lists)
        decoder = build_decoder(batch)
        print(
            json.dumps(
                {
                    "encode": best(lambda: encoder.encode(lists), int(rest[0])),
                    "decode": best(lambda: decoder.DecodeBatch(records), int(rest[0])),
                    "bytes": sum(map(len, records)),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1:])
