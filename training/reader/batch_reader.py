"""Batches as dictionaries of NumPy arrays, without TensorFlow: of a dataset version, or bare files.

Files without a manifest are described as a dataset version that has them as one split.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from conf.errors import ConfigError, SluiceError
from conf.local_paths import local_path
from conf.manifest import DatasetKeys, Manifest, RowCounts, ShardInfo, SourceSnapshot, SplitInfo
from conf.paths import ReadablePath
from conf.schema import FeatureSchema, FeatureSpec, fingerprint
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.framing import (
    HEADER_BYTES,
    BadRange,
    detect_compression,
    read_record_blocks,
)
from etl.tfrecord.codec.infer import infer_features
from training.reader.batch_plan import (
    Batches,
    BatchShape,
    bound_specs,
    build_config,
    check_number,
    find_mixed,
)
from training.reader.epoch_plan import BatchShare
from training.reader.feature_columns import select_features, split_features
from training.reader.rows import DecodedRows, RaggedList
from training.reader.shards import WIRE_COMPRESSIONS, InputCounts, explain_error, warn_of_losses
from training.reader.training_data import (
    WHICH_ROWS,
    SplitSource,
    build_size_error,
    open_version,
)

Arrays = dict[str, np.ndarray | RaggedList]
"""A batch: numbers `[batch]` or `[batch, length]`, byte strings as objects, lists of any length."""
T = TypeVar("T")

_FORMAT = 1
# A number in JSON is exact up to 2^53, which is 13 digits of 16.
_DIGITS = 13
# Keys of `input` that decide in which order rows come.
_WHICH_ORDER = ("class_balance", "bucket_boundaries", "shuffle_buffer", "interleave_shards")


class BatchReader:
    """Reads epoch after epoch of batches; `open_batches` makes it.

    An iterator gives the rest of the epoch that the reader stands in, and the next one the next
    epoch. It may be copied and pickled into other processes.

    Attributes:
        epoch: Epoch that the reader stands in, from 0.
        batch: Batches of it that have been handed out.
        batches_per_epoch: Batches of a whole epoch, the same for all ranks; None where only
            reading tells.
    """

    def __init__(self, batches: Batches, share: BatchShare, first_epoch: int = 0) -> None:
        self._batches, self._share = batches, share
        self.epoch, self.batch = first_epoch, 0
        self.batches_per_epoch = batches.count(share.ranks)
        # What does not fit the dataset is said here, not by the first batch.
        self._threads = batches.plan().rows.threads
        self._identity = _identify(batches)

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The features of a batch, with types, shapes and sizes of vocabularies."""
        return tuple(self._batches.specs)

    def __iter__(self) -> Iterator[Arrays]:
        """Reads the rest of the epoch."""
        return self.track(self.read_part())

    def read_part(self, worker: int = 0, workers: int = 1) -> Iterator[Arrays]:
        """Reads every n-th batch of the epoch's rest, in worker `worker` of a data loader.

        Batches in turn from worker 0, 1, … are those of one reader, in its order. The main
        process counts them by `track`.
        """
        check_number("worker", (worker, workers))
        share = replace(self._share, worker=worker, workers=workers)
        # Where the reader stands now, not where it stands when the first batch is taken.
        return self._read(self.epoch, self.batch, share)

    def _read(self, epoch: int, batch: int, share: BatchShare) -> Iterator[Arrays]:
        # Workers share the threads of the machine.
        counts, threads = InputCounts(), max(1, self._threads // share.workers)
        source = self._batches.source.replacing(counts=counts, threads=threads)
        plan = replace(self._batches, source=source).plan()
        is_empty = batch == 0 and share.worker == 0
        try:
            for rows in plan.read_part(epoch, batch, share):
                is_empty = False
                yield _build_arrays(plan.shape, rows)
        except SluiceError as error:
            explain_error(error, source.version_dir, source.manifest, source.split)
            raise
        if is_empty:
            raise build_size_error(source, None, share.ranks)
        if source.config.on_corrupt != "fail":
            warn_of_losses(counts, source.split, epoch)
        # A reader that `track` moves stands where batches are handed out, not where a thread that
        # reads ahead has come to.
        if (self.epoch, self.batch) == (epoch, batch):
            self.epoch, self.batch = epoch + 1, 0

    def track(self, batches: Iterable[T]) -> Iterator[T]:
        """Hands on what a data loader makes of the epoch's rest, and moves the reader by it."""
        epoch, batch = self.epoch, self.batch
        for number, one in enumerate(batches, start=batch + 1):
            self.epoch, self.batch = epoch, number
            yield one
        self.epoch, self.batch = epoch + 1, 0

    def state(self) -> dict[str, int]:
        """Returns where the reader stands, behind the batch that was handed out last.

        The numbers fit into JSON. They do not depend on the rank or the number of ranks.
        """
        return {"epoch": self.epoch, "batch": self.batch, **self._identity}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes to where a reader stood; what follows is, bit for bit, what followed there.

        The state may be of a reader of any rank and number of ranks.

        Raises:
            ConfigError: It is no state, or one of another version, seed, batch size or choice of
                rows.
        """
        expected = self.state()
        if set(state) != set(expected) or min(state["epoch"], state["batch"]) < 0:
            raise ConfigError(
                "this is no state of a reader",
                received=str(state)[:300],
                fix="restore what state() returned",
            )
        for name, own in self._identity.items():
            if state[name] != own:
                keys = ", ".join((*WHICH_ROWS, "mix", *_WHICH_ORDER))
                raise ConfigError(
                    f"the state of a reader is of another {name}",
                    received=state[name],
                    allowed=own,
                    fix="give the version or the files, split, seed, batch_size (of all ranks), "
                    f"held_out, shuffle, drop_remainder, {keys} as they were, or begin anew",
                )
        self.epoch, self.batch = operator.index(state["epoch"]), operator.index(state["batch"])


def open_batches(
    source: str | Path | Sequence[str | Path],
    batch_size: int,
    split: str = "train",
    *,
    features: Sequence[str] | None = None,
    ragged: Sequence[str] = (),
    schema: Sequence[FeatureSpec] | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    first_epoch: int = 0,
    drop_remainder: bool = False,
    held_out: bool = False,
    rank: tuple[int, int] = (0, 1),
    **options: Any,
) -> BatchReader:
    """Opens a split of a dataset version, or bare TFRecord files, for your own training loop.

    A batch is a dictionary of NumPy arrays: scalars `[batch]`, lists padded to `[batch, max_len]`
    (without `max_len`: to the longest list that the statistics count), other lists as
    `RaggedList`. Rows, order and values are those of `open_dataset`. Needs neither TensorFlow nor
    Spark.

    Args:
        source: Directory or URI of a dataset (its current version), or of one version; or a list
            of TFRecord files, which are read as one split.
        batch_size: Rows per batch of all ranks together; a multiple of their number.
        split: Name of the split.
        features: Features to read; None reads all but those of role id.
        ragged: Features to give as `RaggedList` although their length is bounded.
        schema: What bare files hold; None finds out by reading them through.
        shuffle: Whether to draw rows in random order; None: those of train alone.
        seed: Seed of the order.
        first_epoch: Epoch to begin with.
        drop_remainder: Whether to drop rows at the end that fill no batch.
        held_out: Whether to read the rows of train that `validation` keeps apart instead.
        rank: Number of this rank and of all of them. Each takes its rows of every batch, so all
            have as many batches; what is left at the end without a row for each is dropped.
        options: Keys of the config's `input` section, such as `filter` and `validation`.

    Raises:
        ConfigError: There is no such rank, or an option is unknown or does not fit the dataset.
        InputDataError: There is no such split or feature, or the split does not fill a batch.
        UpstreamNotReadyError: There is no such dataset.
    """
    check_number("rank", rank)
    # NumPy's whole numbers would stay what they are in a state, which JSON does not take.
    batch_size, seed, first_epoch = map(operator.index, (batch_size, seed, first_epoch))
    share = BatchShare(*map(operator.index, rank))
    config, is_shuffled = build_config(batch_size, options, split, shuffle, held_out)
    if config.batch_size % share.ranks:
        raise ConfigError(
            "batch_size must be a multiple of the number of ranks",
            received=f"{batch_size} rows on {share.ranks} ranks",
            allowed=f"a multiple of {share.ranks}; it counts the rows of all ranks",
        )
    if not isinstance(source, str | Path):
        version_dir, manifest = describe_shards(source, split, schema, config.on_corrupt)
    else:
        version_dir, manifest = open_version(source, config)
    if features is None:
        found = select_features(manifest, split_features(manifest, split))
        features = [spec.name for spec in found if spec.role != "id"]
    chosen = SplitSource(version_dir, manifest, split, config, is_held_out=held_out)
    specs = bound_specs(manifest, features)
    batches = Batches(chosen, specs, is_shuffled, seed, drop_remainder, tuple(ragged))
    return BatchReader(batches, share, first_epoch)


def _identify(batches: Batches) -> dict[str, int]:
    """What a state must agree with, as numbers."""
    source, config = batches.source, batches.source.config
    names, is_shuffled = [spec.name for spec in batches.specs], batches.is_shuffled
    mixed = find_mixed(config, source.manifest, names)
    versions = [source.manifest, *(manifest for _, manifest in mixed)]
    shards = [[[s.path, s.rows, s.crc32c] for s in m.split(source.split).shards] for m in versions]
    outlines = [
        [m.dataset_name, m.dataset_version, files]
        for m, files in zip(versions, shards, strict=True)
    ]
    keys = (*WHICH_ROWS, *(_WHICH_ORDER if is_shuffled else ()))
    rows = {
        "split": [source.split, source.is_held_out, batches.drop_remainder, is_shuffled],
        **config.model_dump(mode="json", include=set(keys)),
        "mix": [part.weight for part in config.mix],
        # The length of a row is that of the longest list that is read of it.
        "lists": names if config.bucket_boundaries else [],
    }
    return {
        "format": _FORMAT,
        "seed": batches.seed,
        "batch_size": config.batch_size,
        "version": int(fingerprint(outlines)[:_DIGITS], 16),
        "rows": int(fingerprint(rows)[:_DIGITS], 16),
    }


def _build_arrays(shape: BatchShape, rows: DecodedRows) -> Arrays:
    arrays: Arrays = {}
    for column in shape.columns:
        value = rows.array(column.name)
        if isinstance(value, RaggedList):
            if column.is_ragged:  # Arrow's memory cannot be written to.
                value = RaggedList(value.values.copy(), value.offsets)
            else:
                value = value.pad(column.length, column.pad)
        arrays[column.name] = value
    return arrays


def describe_shards(
    files: Sequence[str | Path],
    split: str,
    schema: Sequence[FeatureSpec] | None = None,
    on_corrupt: str = "fail",
) -> tuple[ReadablePath, Manifest]:
    """Describes local files of `tf.train.Example` as a version in the folder around them.

    Without a schema, reading them tells what they hold: scalars, and lists without a bound.
    """
    paths = [local_path(file).absolute() for file in files]
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    compression = _find_compression(paths)
    is_salvaging = on_corrupt != "fail"
    shards = tuple(_describe_shard(folder, path, is_salvaging) for path in paths)
    if schema is None:
        schema = [
            FeatureSpec(one.name, one.kind, "context", (None,) if one.is_list else ())
            for one in infer_features(paths, is_lenient=is_salvaging)
        ]
    return folder, Manifest(
        dataset_name="bare files", dataset_version="", created_at="", record_type="Example",
        compression=compression, splits=(SplitInfo(split, shards),),
        schema=FeatureSchema(tuple(schema)), keys=DatasetKeys(None, None), encoder_files=(),
        encoders_fingerprint="", statistics={}, label_rate={},
        source=SourceSnapshot((), None, {}, ""), counts=RowCounts({}, {}, 0, {}, {}),
        code_version="",
    )  # fmt: skip


def _find_compression(paths: Sequence[Path]) -> str | None:
    found = set()
    for path in paths:
        with path.open("rb") as file:
            found.add(detect_compression(file.read(HEADER_BYTES)))
    if len(found) > 1:
        raise ConfigError(
            "files that are read as one split must be compressed alike",
            received=", ".join(kind or "plain" for kind in found),
            fix="open them apart, or write them anew in one way",
        )
    (wire,) = found
    return next(name for name, kind in WIRE_COMPRESSIONS.items() if kind == wire)


def _describe_shard(folder: Path, path: Path, is_salvaging: bool) -> ShardInfo:
    bad: list[BadRange] = []
    blocks = read_record_blocks(path, verify=False, on_corrupt=bad.append if is_salvaging else None)
    # What reads them counts a range of bad bytes as a record.
    rows = sum(len(block.index) for block in blocks) + sum(not one.continues for one in bad)
    file = describe_file(folder, path)
    return ShardInfo(file.path, rows, file.bytes, file.crc32c)
