"""The codec on one core: this one, its limits, and the alternatives."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.codec.framing import FOOTER_BYTES, HEADER_BYTES, index_records
from tests.bench.clock import time_best
from tests.bench.measurements import Bar, Measurement
from tests.bench.shapes import RowShape, build_batch
from tests.bench.tfrecord.peers import TfxBsl

MEMCPY = "memcpy"
COLD_MEMCPY = "memcpy, cold"
CRC = "CRC-32C"
ENCODE = "encode, framing and CRC included"
DECODE = "decode, without CRC"
VERIFY_AND_DECODE = "verify CRC and decode"
PYTHON_EXAMPLE = "Python tf.train.Example and TFRecordWriter"
PYTHON_EXTEND = "Python tf.train.Example by extend, no framing"
PARSE_EXAMPLE = "batched tf.io.parse_example"
PARSE_RAGGED = "batched tf.io.parse_example, lists ragged"
TFX_ENCODE = "tfx_bsl encode, no framing"
TFX_DECODE = "tfx_bsl decode"

CODEC_BARS = (
    Bar(ENCODE, TFX_ENCODE, 6),
    Bar(ENCODE, PYTHON_EXAMPLE, 80),
    Bar(ENCODE, PYTHON_EXTEND, None),
    # Like for like: TensorFlow's parser gets payloads whose checksums nobody verified.
    Bar(DECODE, PARSE_EXAMPLE, 4),
    Bar(DECODE, PARSE_RAGGED, 4),
    Bar(VERIFY_AND_DECODE, PARSE_EXAMPLE, None),
    Bar(DECODE, TFX_DECODE, None),
)
ENCODE_GOAL_MB_PER_S = 700  # of finished TFRecord, on the CTR shape
_COLD_BYTES = 256 << 20  # more than a processor's caches hold
_PYTHON_ROWS = 500  # one Python object per value is slow: few rows tell as much


def measure_codec(
    shape: RowShape, rows: int, repeats: int, tfx: TfxBsl | None
) -> Iterator[Measurement]:
    """Measures one shape.

    Args:
        shape: Which rows.
        rows: Rows per batch, 1 or more.
        repeats: Timed rounds per figure, of which the least time counts.
        tfx: Environment of tfx_bsl; None to leave it out.

    Yields:
        The limits first, then this codec, then the others.
    """
    batch = build_batch(shape, rows)
    for measured in (_measure_own, _measure_tensorflow):
        with contextlib.suppress(ImportError):  # TensorFlow need not be there
            for name, work, n, size in measured(shape, batch):
                times = time_best(work, repeats)
                yield Measurement("codec", shape.name, name, times.wall_s, times.cpu_s, n, size)
    if tfx is not None:
        figures = tfx.time(batch, repeats)
        for name, key in ((TFX_ENCODE, "encode"), (TFX_DECODE, "decode")):
            wall, cpu = figures[key]
            yield Measurement("codec", shape.name, name, wall, cpu, rows, figures["bytes"])


_Work = tuple[str, Callable[[], Any], int, int]


def _measure_own(shape: RowShape, batch: pa.RecordBatch) -> Iterator[_Work]:
    encoder = build_encoder(batch.schema)
    data: np.ndarray = encoder.encode(batch)
    index, rows = index_records(data), batch.num_rows
    decoder = build_decoder(shape.features)
    target = np.empty_like(data)

    def encode() -> None:
        for _ in encoder.encode_chunks(batch):
            pass

    for name, work in (
        (MEMCPY, lambda: np.copyto(target, data)),
        (COLD_MEMCPY, _build_cold_copy(data)),
        (CRC, lambda: crc32c(data)),
        (ENCODE, encode),
        (DECODE, lambda: decoder.decode(data, index)),
        (VERIFY_AND_DECODE, lambda: decoder.decode(data, index_records(data))),
    ):
        yield name, work, rows, data.size


def _build_cold_copy(data: np.ndarray) -> Callable[[], None]:
    """Copies that find neither end in the cache: each call takes the next of many buffers."""
    pairs = [(data.copy(), data.copy()) for _ in range(1 + _COLD_BYTES // (2 * data.size))]
    turns = itertools.cycle(pairs)

    def copy() -> None:
        target, source = next(turns)
        np.copyto(target, source)

    return copy


def _measure_tensorflow(shape: RowShape, batch: pa.RecordBatch) -> Iterator[_Work]:
    import tensorflow as tf

    kinds = {"int64": tf.int64, "float32": tf.float32, "bytes": tf.string}
    data: np.ndarray = build_encoder(batch.schema).encode(batch)
    payloads = [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]
    raw = tf.constant(payloads)
    yield from _measure_protobuf(shape, batch.slice(0, _PYTHON_ROWS).to_pylist(), payloads)
    fixed, ragged = {}, {}
    for column, feature in zip(shape.columns, shape.features, strict=True):
        kind, length = kinds[feature.kind], [column.length] if feature.is_list else []
        fixed[column.name] = tf.io.FixedLenFeature(length, kind)
        ragged[column.name] = tf.io.RaggedFeature(kind) if feature.is_list else fixed[column.name]
    specs = {PARSE_EXAMPLE: fixed, **({PARSE_RAGGED: ragged} if shape.has_lists else {})}
    for name, spec in specs.items():
        parse = tf.function(lambda serialized, spec=spec: tf.io.parse_example(serialized, spec))
        yield name, partial(parse, raw), batch.num_rows, sum(map(len, payloads))


def _measure_protobuf(
    shape: RowShape, rows: list[dict[str, Any]], payloads: list[bytes]
) -> Iterator[_Work]:
    size = sum(map(len, payloads[: len(rows)]))
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = str(Path(folder) / "rows.tfrecord")
        framed = size + len(rows) * (HEADER_BYTES + FOOTER_BYTES)
        yield PYTHON_EXAMPLE, lambda: write_with_tensorflow(shape, rows, path), len(rows), framed
    yield PYTHON_EXTEND, lambda: encode_by_extend(shape, rows), len(rows), size


def write_with_tensorflow(shape: RowShape, rows: list[dict[str, Any]], path: str) -> None:
    """Writes a file as TensorFlow's guide does.

    Source: "TFRecord and tf.train.Example", tensorflow.org/tutorials/load_data/tfrecord.
    """
    import tensorflow as tf

    train, features = tf.train, shape.features
    with tf.io.TFRecordWriter(path) as writer:
        for row in rows:
            made = {}
            for feature in features:
                value = row[feature.name]
                values = value if feature.is_list else [value]
                if feature.kind == "bytes":
                    texts = train.BytesList(value=[text.encode() for text in values])
                    made[feature.name] = train.Feature(bytes_list=texts)
                elif feature.kind == "float32":
                    made[feature.name] = train.Feature(float_list=train.FloatList(value=values))
                else:
                    made[feature.name] = train.Feature(int64_list=train.Int64List(value=values))
            example = train.Example(features=train.Features(feature=made))
            writer.write(example.SerializeToString())


def encode_by_extend(shape: RowShape, rows: list[dict[str, Any]]) -> list[bytes]:
    """Encodes rows as leanly as Python's messages allow: lists extended in place, no file."""
    import tensorflow as tf

    features, records = shape.features, []
    for row in rows:
        example = tf.train.Example()
        for feature in features:
            value = row[feature.name]
            values = value if feature.is_list else [value]
            target = example.features.feature[feature.name]
            if feature.kind == "bytes":
                target.bytes_list.value.extend(text.encode() for text in values)
            elif feature.kind == "float32":
                target.float_list.value.extend(values)
            else:
                target.int64_list.value.extend(values)
        records.append(example.SerializeToString())
    return records


def limit_tensorflow_threads() -> None:
    """Keeps TensorFlow to one core, as this codec is; only before its first use."""
    with contextlib.suppress(ImportError):
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
