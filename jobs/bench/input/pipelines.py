"""The ways to turn shards into batches that are compared, each as a dataset of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from conf.manifest import (
    DatasetKeys,
    Manifest,
    RowCounts,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.schema import FeatureSchema, FeatureSpec
from conf.training import InputConfig
from jobs.bench.tfrecord.shapes import Shape
from training.input import build_train_dataset

RAW = "raw TFRecordDataset"
PER_RECORD = "parse_single_example per record"
BATCHED = "batched parse_example"
BATCHED_SHUFFLED = "batched parse_example, shuffled"
BATCHED_RAGGED = "batched parse_example, padded"
BLOCK = "block decoder, {} thread(s)"
OWN_TENSORFLOW = "tensorflow decoder, {} thread(s)"

_KINDS = {"int64": tf.int64, "float32": tf.float32}
_READ_BUFFER_BYTES = 1 << 20
_SEED = 0


@dataclass(frozen=True)
class InputFiles:
    """Shards on disk.

    Attributes:
        shape: What the records hold.
        directory: Folder of the shards.
        shards: Name, records and bytes of each.
    """

    shape: Shape
    directory: Path
    shards: tuple[tuple[str, int, int], ...]

    @property
    def rows(self) -> int:
        """Records in all."""
        return sum(rows for _, rows, _ in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(size for _, _, size in self.shards)

    @property
    def paths(self) -> list[str]:
        """Paths of the shards."""
        return [str(self.directory / name) for name, _, _ in self.shards]

    @property
    def manifest(self) -> Manifest:
        """A manifest that lists the shards as the train split."""
        specs = tuple(
            FeatureSpec(
                column.name,
                "float32" if column.kind == "float32" else "int64",
                "context",
                shape=() if column.length is None else (None,),
                max_len=column.length,
                pad_value=0,
            )
            for column in self.shape.columns
        )
        shards = tuple(ShardInfo(name, rows, size, name) for name, rows, size in self.shards)
        return Manifest(
            dataset_name="bench", dataset_version="1", created_at="", record_type="Example",
            compression=None, splits=(SplitInfo("train", shards),),
            schema=FeatureSchema(specs), keys=DatasetKeys(None, None), encoder_files=(),
            encoders_fingerprint="", statistics={}, label_rate={},
            source=SourceSnapshot((), None, {}, ""), counts=RowCounts({}, {}, 0, {}, {}),
            code_version="",
        )  # fmt: skip


def build_pipelines(
    files: InputFiles, batch_size: int, shuffle_buffer: int, threads: tuple[int, ...]
) -> dict[str, Callable[[], tf.data.Dataset]]:
    """Builds the pipelines by name; each function returns a fresh dataset.

    The peers are written as TensorFlow's performance guide advises: parallel reads, vectorised
    parsing, parallel maps, prefetching. Where nothing else is said they neither shuffle nor wait
    for each other; this project's own always shuffles.

    Args:
        files: The shards.
        batch_size: Rows per batch.
        shuffle_buffer: Rows that are shuffled together.
        threads: Threads of this project's own input, one pipeline each.
    """
    fixed, padded = _specs(files.shape)

    def records() -> tf.data.Dataset:
        return tf.data.TFRecordDataset(
            files.paths, buffer_size=_READ_BUFFER_BYTES, num_parallel_reads=tf.data.AUTOTUNE
        )

    def batched(spec: dict, source: tf.data.Dataset) -> tf.data.Dataset:
        return _prefetch(
            source.batch(batch_size, drop_remainder=True).map(
                lambda x: tf.io.parse_example(x, spec), num_parallel_calls=tf.data.AUTOTUNE
            )
        )

    def per_record() -> tf.data.Dataset:
        parsed = records().map(
            lambda x: tf.io.parse_single_example(x, fixed), num_parallel_calls=tf.data.AUTOTUNE
        )
        return _prefetch(parsed.batch(batch_size, drop_remainder=True))

    def own(decoder: str, count: int) -> Callable[[], tf.data.Dataset]:
        config = InputConfig.model_validate(
            {
                "batch_size": batch_size, "shuffle_buffer": shuffle_buffer,
                "parallel_parses": count, "decoder": decoder,
            }
        )  # fmt: skip
        return lambda: build_train_dataset(
            files.directory, files.manifest, config, epoch=0, seed=_SEED
        )

    pipelines = {
        RAW: lambda: _prefetch(records().batch(batch_size, drop_remainder=True)),
        PER_RECORD: per_record,
        BATCHED: lambda: batched(fixed, records()),
        BATCHED_SHUFFLED: lambda: batched(fixed, records().shuffle(shuffle_buffer, seed=_SEED)),
    }
    if files.shape.has_lists:
        pipelines[BATCHED_RAGGED] = lambda: batched(padded, records())
    for count in threads:
        pipelines[BLOCK.format(count)] = own("block", count)
    pipelines[OWN_TENSORFLOW.format(max(threads))] = own("tensorflow", max(threads))
    return pipelines


def drain(dataset: tf.data.Dataset, batches: int) -> int:
    """Takes batches in a compiled loop, as a training loop does; returns their rows."""
    return int(_drain(iter(dataset), tf.constant(batches)))


@tf.function(reduce_retracing=True)
def _drain(iterator: tf.data.Iterator, batches: tf.Tensor) -> tf.Tensor:
    rows = tf.constant(0)
    for _ in tf.range(batches):
        batch = next(iterator)
        rows += tf.shape(tf.nest.flatten(batch)[0])[0]
    return rows


def _specs(shape: Shape) -> tuple[dict, dict]:
    fixed, padded = {}, {}
    for column in shape.columns:
        kind = _KINDS[column.kind]
        length = [] if column.length is None else [column.length]
        fixed[column.name] = tf.io.FixedLenFeature(length, kind)
        padded[column.name] = (
            tf.io.FixedLenSequenceFeature([], kind, allow_missing=True)
            if length
            else fixed[column.name]
        )
    return fixed, padded


def _prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.prefetch(tf.data.AUTOTUNE)
