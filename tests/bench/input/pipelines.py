"""The compared ways from shards to batches, and the shards themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import tensorflow as tf

from conf.manifest import DatasetKeys, Manifest, RowCounts, ShardInfo, SourceSnapshot, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import InputConfig
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.encode import build_encoder
from tests.bench.shapes import SHAPES, RowShape, build_batch
from training.input.batches import build_train_dataset
from training.reader import batch_plan
from training.reader.batch_reader import Arrays, BatchReader
from training.reader.epoch_plan import BatchShare
from training.reader.training_data import InputOptions, SplitSource

_PIECE_ROWS = 20_000


def write_shards(
    name: str, rows: int, shards: int, directory: Path
) -> tuple[tuple[str, int, int], ...]:
    """Writes the shards of a shape, unless they are there.

    Args:
        name: Name of the shape.
        rows: Records in all.
        shards: Files.
        directory: Folder.

    Returns:
        Name, records and bytes of each file.
    """
    shape, found = SHAPES[name], []
    encoder = build_encoder(build_batch(shape, 0).schema)
    for number in range(shards):
        count = rows * (number + 1) // shards - rows * number // shards
        path = directory / f"{name}-{number}-of-{shards}-{count}.tfrecord"
        if not path.exists():
            with path.open("wb") as file:
                for first in range(0, count, _PIECE_ROWS):
                    piece = min(_PIECE_ROWS, count - first)
                    batch = build_batch(shape, piece, seed=number * rows + first)
                    file.writelines(chunk.data for chunk in encoder.encode_chunks(batch))
        found.append((path.name, count, path.stat().st_size))
    return tuple(found)


RAW = "raw TFRecordDataset"
PER_RECORD = "parse_single_example per record"
BATCHED = "batched parse_example"
BATCHED_SHUFFLED = "batched parse_example, shuffled"
BATCHED_RAGGED = "batched parse_example, padded"
BLOCK = "block decoder, {} thread(s)"
ARRAYS = "block decoder as NumPy arrays, {} thread(s)"

_KINDS = {"int64": tf.int64, "float32": tf.float32}
_READ_BUFFER_BYTES = 1 << 20
_RECORDS_IN_TURN = 16
_SEED = 0


@dataclass(frozen=True)
class InputFiles:
    """Shards on disk.

    Attributes:
        shape: What the records hold.
        directory: Folder of the shards.
        shards: Name, records and bytes of each.
    """

    shape: RowShape
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
        sums = [describe_file(self.directory, Path(path)).crc32c for path in self.paths]
        shards = tuple(ShardInfo(*s, crc) for s, crc in zip(self.shards, sums, strict=True))
        return Manifest(
            dataset_name="bench", dataset_version="1", created_at="", record_type="Example",
            compression=None, splits=(SplitInfo("train", shards),),
            schema=describe_shape(self.shape), keys=DatasetKeys(None, None), encoder_files=(),
            encoders_fingerprint="", statistics={}, label_rate={},
            source=SourceSnapshot((), None, {}, ""), counts=RowCounts({}, {}, 0, {}, {}),
            code_version="",
        )  # fmt: skip


def describe_shape(shape: RowShape) -> FeatureSchema:
    """The schema of a dataset of a shape's rows."""
    return FeatureSchema(
        tuple(
            FeatureSpec(
                column.name,
                "float32" if column.kind == "float32" else "int64",
                "context",
                shape=() if column.length is None else (None,),
                max_len=column.length,
                pad_value=0,
            )
            for column in shape.columns
        )
    )


def build_pipelines(
    files: InputFiles, batch_size: int, shuffle_buffer: int, threads: tuple[int, ...]
) -> dict[str, Callable[[], Batches]]:
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
    own = _Own(files, batch_size, shuffle_buffer)

    def batched(spec: dict, source: tf.data.Dataset) -> tf.data.Dataset:
        return _parse_batches(source, batch_size, lambda x: tf.io.parse_example(x, spec))

    def per_record() -> tf.data.Dataset:
        parsed = _records(files).map(
            lambda x: tf.io.parse_single_example(x, fixed), num_parallel_calls=tf.data.AUTOTUNE
        )
        return _prefetch(parsed.batch(batch_size, drop_remainder=True))

    pipelines = {
        RAW: lambda: _prefetch(_records(files).batch(batch_size, drop_remainder=True)),
        PER_RECORD: per_record,
        BATCHED: lambda: batched(fixed, _records(files)),
        BATCHED_SHUFFLED: lambda: batched(
            fixed, _records(files).shuffle(shuffle_buffer, seed=_SEED)
        ),
    }
    if files.shape.has_lists:
        pipelines[BATCHED_RAGGED] = lambda: batched(padded, _records(files))
    return {**pipelines, **own.build(threads)}


class ArrayBatches:
    """Batches as `open_batches` gives them; each iterator begins anew."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader, self._start = reader, reader.state()

    def __iter__(self) -> Iterator[Arrays]:
        self._reader.restore(self._start)
        return iter(self._reader)


Batches: TypeAlias = "tf.data.Dataset | ArrayBatches"


@dataclass(frozen=True)
class _Own:
    """This project's own input."""

    files: InputFiles
    batch_size: int
    shuffle_buffer: int

    def build(self, threads: tuple[int, ...]) -> dict[str, Callable[[], Batches]]:
        pipelines = {BLOCK.format(count): self._read(count) for count in threads}
        pipelines |= {ARRAYS.format(count): self._read_arrays(count) for count in threads}
        return pipelines

    def _read(self, count: int) -> Callable[[], Batches]:
        config, where = self._config, (self.files.directory, self.files.manifest)
        options = InputOptions(threads=count)
        return lambda: build_train_dataset(*where, config, epoch=0, seed=_SEED, options=options)

    def _read_arrays(self, count: int) -> Callable[[], Batches]:
        manifest, options = self.files.manifest, InputOptions(threads=count)
        source = SplitSource(self.files.directory, manifest, "train", self._config, options)
        specs = batch_plan.bound_specs(manifest, manifest.schema.names)
        batches = batch_plan.Batches(
            source, specs, is_shuffled=True, seed=_SEED, drop_remainder=True
        )
        return lambda: ArrayBatches(BatchReader(batches, BatchShare()))

    @property
    def _config(self) -> InputConfig:
        return InputConfig(batch_size=self.batch_size, shuffle_buffer=self.shuffle_buffer)


def _records(files: InputFiles) -> tf.data.Dataset:
    """Records of the shards, some of each in turn.

    `num_parallel_reads` takes them one by one, at a tenth of the speed: a lock for each record.
    """
    return tf.data.Dataset.from_tensor_slices(files.paths).interleave(
        lambda path: tf.data.TFRecordDataset(path, buffer_size=_READ_BUFFER_BYTES),
        block_length=_RECORDS_IN_TURN,
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _parse_batches(
    source: tf.data.Dataset, batch_size: int, parse: Callable[[tf.Tensor], dict]
) -> tf.data.Dataset:
    batches = source.batch(batch_size, drop_remainder=True)
    return _prefetch(batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE))


def drain(dataset: Batches, batches: int) -> int:
    """Takes batches in a compiled loop, as a training loop does; returns their rows.

    Arrays are taken by a loop of Python, as loops of PyTorch and JAX take them.
    """
    if isinstance(dataset, ArrayBatches):
        taken = itertools.islice(dataset, batches)
        return sum(len(next(iter(batch.values()))) for batch in taken)
    return int(_drain(iter(dataset), tf.constant(batches)))


@tf.function(reduce_retracing=True)
def _drain(iterator: tf.data.Iterator, batches: tf.Tensor) -> tf.Tensor:
    rows = tf.constant(0)
    for _ in tf.range(batches):
        batch = next(iterator)
        rows += tf.shape(tf.nest.flatten(batch)[0])[0]
    return rows


def _specs(shape: RowShape) -> tuple[dict, dict]:
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
