"""Measures the TFRecord codec on one core against the alternatives.

Run `python -m jobs.bench.tfrecord`. Figures depend on the machine; ratios are what carries over.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from etl.tfrecord.crc32c import crc32c
from etl.tfrecord.decode import ExampleDecoder, WireFeature
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.framing import index_records


@dataclass(frozen=True)
class Measurement:
    """One way of doing the work.

    Attributes:
        name: What was done.
        seconds: Best of the repeats, for `rows` rows.
        rows: Rows that it handled.
        bytes: Bytes of records that it handled.
    """

    name: str
    seconds: float
    rows: int
    bytes: int

    @property
    def rows_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds


def build_ctr_batch(rows: int) -> pa.RecordBatch:
    """A click log as models of the Criteo kind read it: label, 13 float32, 26 int64 ids."""
    rng = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {"label": rng.integers(0, 2, rows)}
    columns |= {f"dense_{k}": rng.random(rows, dtype=np.float32) for k in range(13)}
    columns |= {f"id_{k}": rng.integers(0, 200_000, rows) for k in range(26)}
    return pa.record_batch(columns)


def build_history_batch(rows: int) -> pa.RecordBatch:
    """Two histories of 50 ids and eight scalars."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"scalar_{k}": rng.integers(0, 200_000, rows) for k in range(8)}
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 50)
    for name in ("history", "history_category"):
        values = pa.array(rng.integers(0, 50_000, rows * 50))
        columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.record_batch(columns)


def best_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Shortest time of several runs, after one that warms up caches and compiles."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def wire_features(schema: pa.Schema) -> list[WireFeature]:
    """The features that a batch of the benchmark becomes."""
    features = []
    for field in schema:
        is_list = pa.types.is_list(field.type)
        value_type = field.type.value_type if is_list else field.type
        kind: Any = "float32" if pa.types.is_floating(value_type) else "int64"
        features.append(WireFeature(field.name, kind, is_list))
    return features


def measure_sluice(batch: pa.RecordBatch, repeats: int) -> Iterator[Measurement]:
    """Encoding and decoding with this codec, and the floor under both."""
    encoder = build_encoder(batch.schema)
    data = encoder.encode(batch)
    index, rows = index_records(data), batch.num_rows
    decoder = ExampleDecoder(wire_features(batch.schema))
    target = np.empty_like(data)

    def copy_and_hash() -> None:
        np.copyto(target, data)
        crc32c(target)

    def encode() -> None:
        for _ in encoder.encode_chunks(batch):
            pass

    for name, work in (
        ("memcpy + CRC-32C alone", copy_and_hash),
        ("encode, framing and CRC included", encode),
        ("index and verify CRC", lambda: index_records(data)),
        ("decode, without CRC", lambda: decoder.decode(data, index)),
        ("verify and decode", lambda: decoder.decode(data, index_records(data))),
    ):
        yield Measurement(name, best_seconds(work, repeats), rows, data.size)


def measure_tensorflow(batch: pa.RecordBatch, repeats: int) -> Iterator[Measurement]:
    """`tf.train.Example` in Python, and TensorFlow's batched parser."""
    import tensorflow as tf

    few = batch.slice(0, min(batch.num_rows, 500))
    features = wire_features(batch.schema)

    def build_in_python() -> None:
        for row in few.to_pylist():
            example = tf.train.Example()
            for feature in features:
                value = row[feature.name]
                values = value if feature.is_list else [value]
                target = example.features.feature[feature.name]
                kind = target.float_list if feature.kind == "float32" else target.int64_list
                kind.value.extend(values)
            example.SerializeToString()

    data = build_encoder(batch.schema).encode(batch)
    payloads = [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]
    spec = {
        feature.name: tf.io.RaggedFeature(tf.int64)
        if feature.is_list
        else tf.io.FixedLenFeature([], getattr(tf, feature.kind))
        for feature in features
    }
    raw = tf.constant(payloads)
    parse = tf.function(lambda serialized: tf.io.parse_example(serialized, spec))
    share = few.num_rows / batch.num_rows
    yield Measurement("Python tf.train.Example, no framing", best_seconds(build_in_python, 1),
                      few.num_rows, int(data.size * share))  # fmt: skip
    yield Measurement("batched tf.io.parse_example", best_seconds(lambda: parse(raw), repeats),
                      batch.num_rows, data.size)  # fmt: skip


def build_table(title: str, measurements: list[Measurement]) -> Table:
    """A table of the figures, the ratio being to the first line."""
    table = Table(title=title)
    for column in ("work", "rows/s", "MB/s", f"of {measurements[0].name}"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for m in measurements:
        ratio = m.rows_per_s / measurements[0].rows_per_s
        table.add_row(
            m.name, f"{m.rows_per_s:,.0f}", f"{m.bytes / m.seconds / 1e6:,.0f}", f"{ratio:.2%}"
        )
    return table


def run(rows: int, repeats: int, console: Console) -> None:
    """Measures both shapes and prints a table for each.

    Args:
        rows: Rows per batch, 1 or more.
        repeats: Timed runs per figure, of which the best counts.
        console: Where to print.
    """
    for title, batch in (
        ("CTR: 26 int64, 13 float32, label", build_ctr_batch(rows)),
        ("history: 8 int64, two lists of 50 int64", build_history_batch(rows)),
    ):
        measurements = list(measure_sluice(batch, repeats))
        try:
            measurements += measure_tensorflow(batch, repeats)
        except ImportError:
            console.print("TensorFlow is not installed: only this codec is measured")
        console.print(build_table(title, measurements))


def limit_tensorflow_threads() -> None:
    """Keeps TensorFlow to one core, as this codec is; only before its first use."""
    with contextlib.suppress(ImportError):
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench.tfrecord", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000, help="rows per batch")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs per figure")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.repeats < 1:
        parser.error("--rows and --repeats must be 1 or more")
    limit_tensorflow_threads()
    run(arguments.rows, arguments.repeats, Console())


if __name__ == "__main__":
    main()
