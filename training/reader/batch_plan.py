"""Which rows make which batches of a split, and of which columns; in whatever form they come out.

`training.input` makes tensors of them, `training.reader.batch_reader` arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conf.encoders.bags import SparseIndices, Weights
from conf.errors import ConfigError, TooFewRowsError
from conf.load import override_config
from conf.manifest import Manifest, bound_list
from conf.paths import ReadablePath
from conf.schema import FeatureSpec
from conf.training.input import InputConfig
from training.encoders.vocabularies import read_plan
from training.reader.damage import InputCounts
from training.reader.decoded_rows import DecodedRows, regroup
from training.reader.feature_columns import FeatureColumn, plan_columns, select_features
from training.reader.mixing import build_mixed_reader
from training.reader.row_sampling import bucket_batches, skip_batches
from training.reader.shares import BatchShare
from training.reader.shuffle_buffer import ReadPlan, read_epoch
from training.reader.split_source import InputOptions, SplitSource, build_size_error, count_steps

EVAL_BUFFER_ROWS = 16_384
"""Rows that are decoded at a time where they keep their order."""
# Options of `input` that decide which rows are drawn, and in which order.
_SHUFFLED_ONLY = ("class_balance", "mix", "bucket_boundaries", "sparse")


@dataclass(frozen=True)
class BatchShape:
    """What a batch is made of.

    Attributes:
        columns: The features.
        batch_size: Rows per batch.
        drop_remainder: Whether every batch has that many.
        cut: Padded lists whose length differs from batch to batch.
        sparse: Feature of the weights by feature of the ids.
    """

    columns: tuple[FeatureColumn, ...]
    batch_size: int
    drop_remainder: bool
    cut: tuple[str, ...] = ()
    sparse: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_uniform(self) -> bool:
        """Whether every row of every batch has the same size."""
        return not self.cut and all(column.is_dense for column in self.columns)


@dataclass(frozen=True)
class BatchPlan:
    """Batches of a split.

    Attributes:
        shape: What a batch is made of.
        rows: How the rows are read.
        remade: Function of epoch and first batch to the batches from there on, where they depend
            on more than their own rows; None where they are the rows in their order.
    """

    shape: BatchShape
    rows: ReadPlan
    remade: Callable[[int, int], Iterator[DecodedRows]] | None = None

    def read(self, epoch: int = 0, first_batch: int = 0) -> Iterator[DecodedRows]:
        """Reads the rows of an epoch from a batch on, in parts of any size."""
        if self.remade is not None:
            return self.remade(epoch, first_batch)
        return read_epoch(self.rows, epoch, first_batch * self.shape.batch_size)

    def read_part(self, epoch: int, first_batch: int, share: BatchShare) -> Iterator[DecodedRows]:
        """Reads a part of each batch, or of every so manieth, from a batch on.

        Rows of the other parts are not decoded, unless rows are left out or drawn anew: only then
        it is known which rows a batch has.
        """
        size, drop = self.shape.batch_size, self.shape.drop_remainder
        if not share.is_whole and self.remade is None and self.rows.can_skip:
            rows = self.rows.rows - (self.rows.rows % size if drop else 0)
            own = size // share.ranks
            read = read_epoch(self.rows, epoch, first_batch * size, (share, rows))
            yield from regroup(read, own, own, drop_remainder=False)
            return
        batches = regroup(self.read(epoch, first_batch), size, size, drop)
        for number, batch in enumerate(batches):
            first, last = share.find_rows(batch.count)
            if number % share.workers == share.worker and first < last:
                yield batch.slice(first, last)


def find_sparse_pairs(version_dir: ReadablePath, manifest: Manifest) -> dict[str, str]:
    """Finds the features that are the two halves of sparse rows.

    The encoders tell: weights are made from the columns of weights and, behind these, the very
    columns of ids that the indices are made from.

    Args:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.

    Returns:
        Feature of the weights by feature of the indices.
    """
    plan = read_plan(version_dir, manifest)
    names = set(manifest.schema.names)
    columns = [column for column in plan.columns if column.feature in names]
    weights = {
        tuple(c.name for c in column.inputs[len(column.inputs) // 2 :]): column.feature
        for column in columns
        if isinstance(column.operation, Weights)
    }
    found = {}
    for column in columns:
        ids = tuple(c.name for c in column.inputs) or (column.column,)
        is_indices = isinstance(column.operation, SparseIndices)
        if (is_indices or manifest.schema[column.feature].vocabulary_size) and ids in weights:
            found[column.feature] = weights[ids]
    return found


def plan_ordered(
    source: SplitSource, columns: Sequence[FeatureColumn], *, drop_remainder: bool
) -> BatchPlan:
    """Plans the batches of a split in the manifest's order.

    Args:
        source: The split, as it is read.
        columns: Features to deliver.
        drop_remainder: Whether to drop rows at the end that fill no batch.

    Raises:
        InputDataError: There is no such split.
        ConfigError: The config does not fit the dataset.
    """
    rows = source.plan(columns, None, EVAL_BUFFER_ROWS)
    return BatchPlan(BatchShape(tuple(columns), source.batch_size, drop_remainder), rows)


def plan_shuffled(
    source: SplitSource,
    specs: Sequence[FeatureSpec],
    seed: int,
    *,
    drop_remainder: bool,
    ragged: Sequence[str] = (),
) -> BatchPlan:
    """Plans the batches of a shuffled split.

    Args:
        source: The split, as it is read.
        specs: Features to deliver.
        seed: The run's seed.
        drop_remainder: Whether to drop rows at the end that fill no batch.
        ragged: Names of features to leave ragged although their length is bounded.

    Raises:
        InputDataError: A dataset of `mix` lacks a feature.
        ConfigError: The config does not fit the dataset.
    """
    manifest, config = source.manifest, source.config
    pairs = find_sparse_pairs(source.version_dir, manifest) if config.sparse else {}
    names = {spec.name for spec in specs}
    pairs = {ids: weights for ids, weights in pairs.items() if {ids, weights} <= names}
    columns = plan_columns(manifest, specs, (*ragged, *pairs, *pairs.values()))
    cut = _padded_lists(columns) if config.bucket_boundaries else {}
    shape = BatchShape(columns, source.batch_size, drop_remainder, tuple(cut), pairs)
    read_columns = _with_class(source, columns)
    rows = source.plan(read_columns, seed)
    if config.mix:
        return BatchPlan(shape, rows, build_mixed_reader(source, read_columns, rows, seed))
    if not cut:
        return BatchPlan(shape, rows)
    if not rows.has_lengths:
        raise ConfigError("input.bucket_boundaries needs a list feature")
    remade = functools.partial(_read_bucketed, rows, config.bucket_boundaries or (), cut)
    return BatchPlan(shape, rows, remade)


def _read_bucketed(
    rows: ReadPlan, boundaries: Sequence[int], cut: Mapping[str, int], epoch: int, batch: int
) -> Iterator[DecodedRows]:
    seed = [rows.seed or 0, epoch]
    read = read_epoch(rows, epoch)
    return skip_batches(bucket_batches(read, boundaries, cut, rows.batch_size, seed), batch)


def _with_class(
    source: SplitSource, columns: tuple[FeatureColumn, ...]
) -> tuple[FeatureColumn, ...]:
    """The columns, and the class that rows are drawn by where the model does not read it."""
    balance = source.config.class_balance
    if balance is None or any(column.name == balance.feature for column in columns):
        return columns
    specs: tuple[FeatureSpec, ...] = select_features(source.manifest, [balance.feature])
    return (*columns, *plan_columns(source.manifest, specs))


def _padded_lists(columns: Sequence[FeatureColumn]) -> dict[str, int]:
    lists = {c.name: c.length or 0 for c in columns if c.is_dense and c.spec.is_ragged}
    if not lists:
        raise ConfigError(
            "input.bucket_boundaries needs a list feature whose length is bounded",
            received=", ".join(column.name for column in columns),
            fix="leave bucket_boundaries out, or set the feature's max_len in the build",
        )
    return lists


@dataclass(frozen=True)
class BatchRequest:
    """Which batches somebody asks for, beside the keys of `input`.

    Attributes:
        split: Name of the split.
        shuffle: Whether rows are drawn in random order; None: those of train alone.
        seed: Seed of the order.
        drop_remainder: Whether rows at the end that fill no batch are dropped.
        held_out: Whether the rows that `validation` keeps out of train are the ones to read.
        ragged: Names of features that stay ragged although their length is bounded.
    """

    split: str = "train"
    shuffle: bool | None = None
    seed: int = 0
    drop_remainder: bool = False
    held_out: bool = False
    ragged: tuple[str, ...] = ()

    @property
    def is_shuffled(self) -> bool:
        """Whether rows are drawn in random order."""
        if self.shuffle is None:
            return self.split == "train" and not self.held_out
        return self.shuffle

    def build_config(self, batch_size: int, options: Mapping[str, Any], asked: str) -> InputConfig:
        """Builds the config of the input.

        Args:
            batch_size: Rows of a batch, of all workers.
            options: Keys of `input`.
            asked: Name of the function that was called, for errors.

        Raises:
            ConfigError: An option is unknown, or does not fit the request.
        """
        values = {**options, "batch_size": batch_size}
        config = override_config(InputConfig(), values, f"of {asked}")
        unfit = [name for name in _SHUFFLED_ONLY if getattr(config, name) and not self.is_shuffled]
        if unfit:
            raise ConfigError(
                f"{unfit[0]} needs shuffled rows",
                received="shuffle=False",
                fix=f"set shuffle=True, or leave {unfit[0]} out",
            )
        if self.held_out and (config.validation is None or self.split != "train"):
            raise ConfigError(
                "no rows are held out",
                received=f"split={self.split!r}, validation={config.validation}",
                allowed="split='train' and validation={'hash_of': FEATURE, 'share': SHARE}",
            )
        return config


@dataclass(frozen=True)
class RequestedBatches:
    """The batches that somebody asked for.

    Attributes:
        source: The split, as it is read.
        request: What was asked for.
        specs: Features that are read.
    """

    source: SplitSource
    request: BatchRequest
    specs: tuple[FeatureSpec, ...]

    def plan(self, counts: InputCounts | None = None) -> BatchPlan:
        """Plans the batches.

        Args:
            counts: Counts what is left out.

        Raises:
            InputDataError: A dataset of `mix` lacks a feature.
            ConfigError: The config does not fit the dataset.
        """
        source, request = self.source, self.request
        if counts is not None:
            source = replace(source, options=replace(source.options, counts=counts))
        drop, ragged = request.drop_remainder, request.ragged
        if request.is_shuffled:
            return plan_shuffled(
                source, self.specs, request.seed, drop_remainder=drop, ragged=ragged
            )
        columns = plan_columns(source.manifest, self.specs, ragged)
        return plan_ordered(source, columns, drop_remainder=drop)

    def count(self, ranks: int = 1) -> int | None:
        """Batches of an epoch, None where only reading tells; the same for workers in step.

        Args:
            ranks: Ranks that share each batch; one with fewer rows than that is dropped.

        Raises:
            InputDataError: There is no batch.
        """
        source, config = self.source, self.source.config
        number, workers = source.options.worker
        drop = self.request.drop_remainder
        if config.mix or (drop and workers > 1):
            return count_steps(source)
        if not config.is_exact or config.bucket_boundaries:
            return None
        rows = sum(count for _, count in source.ranges(number))
        batches = rows // source.batch_size if drop else -(-rows // source.batch_size)
        if not batches:
            raise build_size_error(source, rows)
        if 0 < rows % source.batch_size < ranks and not drop:
            batches -= 1
        if not batches:
            raise build_share_error(source.split, ranks)
        return batches


def build_share_error(split: str, ranks: int) -> TooFewRowsError:
    """Returns the error of an epoch without a batch that has a row for each rank.

    Args:
        split: Name of the split.
        ranks: How many there are.
    """
    return TooFewRowsError(
        f"an epoch of the {split} split has no batch",
        received=f"fewer rows than the {ranks} ranks that share them" if ranks > 1 else "no row",
        allowed="a batch with a row for each rank",
        fix="let filter, validation, take and on_corrupt leave rows, or open it with fewer ranks",
    )


def request_batches(
    source: SplitSource, request: BatchRequest, names: Sequence[str]
) -> RequestedBatches:
    """Plans which features of a split are read; lists are bounded by the longest of any split.

    Args:
        source: The split, as it is read.
        request: What is asked for.
        names: Features to read.

    Raises:
        InputDataError: There is no such feature.
    """
    manifest = source.manifest
    splits = [found.name for found in manifest.splits]
    select_features(manifest, request.ragged)
    specs = [bound_list(manifest, spec, splits) for spec in select_features(manifest, names)]
    return RequestedBatches(source, request, tuple(specs))


def build_source(
    version_dir: ReadablePath,
    manifest: Manifest,
    config: InputConfig,
    request: BatchRequest,
    worker: tuple[int, int] = (0, 1),
) -> SplitSource:
    """Builds the split of a request, as it is read."""
    options = InputOptions(worker=worker)
    return SplitSource(version_dir, manifest, request.split, config, options, request.held_out)
