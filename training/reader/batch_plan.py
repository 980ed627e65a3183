"""Which rows make which batches of a split, and of which columns, in whatever form they come."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conf.encoders.bags import SparseIndices, Weights
from conf.errors import ConfigError, InputDataError
from conf.load import override_config
from conf.manifest import Manifest, bound_list
from conf.paths import ReadablePath
from conf.schema import FeatureSpec
from conf.training.input import InputConfig
from training.encoders.vocabularies import (
    EncodedVersion,
    is_computed_alike,
    match_keys,
    read_encoded_version,
    read_plan,
)
from training.reader.epoch_plan import BatchShare
from training.reader.feature_columns import (
    FeatureColumn,
    check_specs,
    plan_columns,
    select_features,
)
from training.reader.rows import DecodedRows, bucket_batches, mix_rows, regroup
from training.reader.shards import compare_begun
from training.reader.shuffle_buffer import ReadPlan, read_epoch
from training.reader.training_data import (
    SHUFFLED_ONLY,
    SplitSource,
    build_size_error,
    count_steps,
    open_version,
)

EVAL_BUFFER_ROWS = 16_384
"""Rows that are decoded at a time where they keep their order."""
_Remade = Callable[[int, int], Iterator[DecodedRows]]


@dataclass(frozen=True)
class BatchShape:
    """What a batch is made of."""

    columns: tuple[FeatureColumn, ...]
    batch_size: int
    drop_remainder: bool  # whether every batch has that many rows
    cut: tuple[str, ...] = ()  # padded lists whose length differs from batch to batch
    sparse: Mapping[str, str] = field(default_factory=dict)  # ids to weights

    @property
    def is_uniform(self) -> bool:
        """Whether every row of every batch has the same size."""
        return not self.cut and all(column.is_dense for column in self.columns)


@dataclass(frozen=True)
class BatchPlan:
    """Batches of a split, as they are read."""

    shape: BatchShape
    rows: ReadPlan
    # Batches from a first one on, where they depend on more than their own rows.
    remade: _Remade | None = None

    def read(self, epoch: int = 0, first_batch: int = 0) -> Iterator[DecodedRows]:
        """Reads the rows of an epoch from a batch on, in parts of any size."""
        if self.remade is not None:
            return self.remade(epoch, first_batch)
        return read_epoch(self.rows, epoch, first_batch * self.shape.batch_size)

    def read_part(self, epoch: int, first_batch: int, share: BatchShare) -> Iterator[DecodedRows]:
        """Reads this rank's rows of every n-th batch, from a batch on."""
        size, drop = self.shape.batch_size, self.shape.drop_remainder
        if not share.is_whole and self.remade is None and self.rows.can_skip:
            total = self.rows.rows - (self.rows.rows % size if drop else 0)
            own = size // share.ranks
            read = read_epoch(self.rows, epoch, first_batch * size, share, total)
            yield from regroup(read, own, own, drop_remainder=False)
            return
        batches = regroup(self.read(epoch, first_batch), size, size, drop)
        for number, batch in enumerate(batches):
            first, last = share.find_rows(batch.count)
            if number % share.workers == share.worker and first < last:
                yield batch.slice(first, last)


@dataclass(frozen=True)
class Batches:
    """Batches that somebody asks of a split."""

    source: SplitSource
    specs: Sequence[FeatureSpec]
    is_shuffled: bool = False
    seed: int = 0
    drop_remainder: bool = False
    ragged: tuple[str, ...] = ()  # features that stay lists although they are bounded

    def plan(self) -> BatchPlan:
        """Plans how they are read."""
        source = self.source if self.is_shuffled else self.source.in_order(EVAL_BUFFER_ROWS)
        pairs: dict[str, str] = {}
        if source.config.sparse:
            names = {spec.name for spec in self.specs}
            found = find_sparse_pairs(source.version_dir, source.manifest)
            pairs = {ids: weights for ids, weights in found.items() if {ids, weights} <= names}
        select_features(source.manifest, self.ragged)
        ragged = (*self.ragged, *pairs, *pairs.values())
        columns = plan_columns(source.manifest, self.specs, ragged)
        boundaries = source.config.bucket_boundaries
        cut = _padded_lists(columns) if boundaries else {}
        shape = BatchShape(columns, source.batch_size, self.drop_remainder, tuple(cut), pairs)
        rows = source.plan(columns, self.seed if self.is_shuffled else None)
        if source.config.mix:
            return BatchPlan(shape, rows, _plan_mix(source, rows, self.seed))
        if boundaries:
            return BatchPlan(shape, rows, functools.partial(_read_bucketed, rows, boundaries, cut))
        return BatchPlan(shape, rows)

    def count(self, ranks: int = 1) -> int | None:
        """Batches of an epoch with a row for each rank, None where only reading tells."""
        source, config, drop = self.source, self.source.config, self.drop_remainder
        number, workers = source.options.worker
        if config.mix or (drop and workers > 1):
            return count_steps(source)
        if not config.is_exact or config.bucket_boundaries:
            return None
        rows = sum(count for _, count in source.ranges(number))
        batches, rest = divmod(rows, source.batch_size)
        batches += rest >= ranks and not drop
        if not batches:
            raise build_size_error(source, rows, ranks)
        return batches


def _padded_lists(columns: Sequence[FeatureColumn]) -> dict[str, int]:
    lists = {c.name: c.length or 0 for c in columns if c.is_dense and c.spec.is_ragged}
    if not lists:
        raise ConfigError(
            "input.bucket_boundaries needs a list feature whose length is bounded",
            received=", ".join(column.name for column in columns),
            fix="leave bucket_boundaries out, or set the feature's max_len in the build",
        )
    return lists


def _read_bucketed(
    rows: ReadPlan, boundaries: Sequence[int], cut: Mapping[str, int], epoch: int, batch: int
) -> Iterator[DecodedRows]:
    seed = [rows.seed or 0, epoch]
    batches = bucket_batches(read_epoch(rows, epoch), boundaries, cut, rows.batch_size, seed)
    return itertools.islice(batches, batch, None)


def build_config(
    batch_size: int, options: Mapping[str, Any], split: str, shuffle: bool | None, held_out: bool
) -> tuple[InputConfig, bool]:
    """Builds the config of batches that are asked for, and tells whether they are shuffled."""
    is_shuffled = split == "train" and not held_out if shuffle is None else shuffle
    config = override_config(InputConfig(), {**options, "batch_size": batch_size}, "of the input")
    unfit = [name for name in SHUFFLED_ONLY if getattr(config, name) and not is_shuffled]
    if unfit:
        raise ConfigError(
            f"{unfit[0]} needs shuffled rows",
            received="shuffle=False",
            fix=f"set shuffle=True, or leave {unfit[0]} out",
        )
    return config, is_shuffled


def bound_specs(manifest: Manifest, names: Sequence[str]) -> list[FeatureSpec]:
    """Specs of features; lists are bounded by the longest of any split."""
    splits = [found.name for found in manifest.splits]
    return [bound_list(manifest, spec, splits) for spec in select_features(manifest, names)]


def check_number(what: str, given: tuple[int, int]) -> None:
    number, count = given
    if not 0 <= number < count:
        raise ConfigError(
            f"there is no such {what}",
            received=repr(given),
            allowed=f"(number, {what}s) with 0 <= number < {what}s",
        )


def find_sparse_pairs(version_dir: ReadablePath, manifest: Manifest) -> dict[str, str]:
    """Finds the halves of sparse rows: feature of the weights by feature of the indices.

    Weights are encoded from columns of weights and, behind these, the indices' own columns.
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


def find_mixed(
    config: InputConfig, manifest: Manifest, names: Sequence[str]
) -> list[tuple[ReadablePath, Manifest]]:
    """Finds the datasets of `input.mix`, which must have the features of these names alike."""
    found = [open_version(part.dataset, config) for part in config.mix]
    for _, other in found:
        check_specs(other, select_features(manifest, names))
    return found


def _plan_mix(source: SplitSource, own: ReadPlan, seed: int) -> _Remade:
    names = [column.name for column in own.columns]
    plans = [own]
    for version_dir, manifest in find_mixed(source.config, source.manifest, names):
        lists = manifest.find_feature_lists()
        theirs = [replace(column, is_sequence=column.name in lists) for column in own.columns]
        other = replace(source, version_dir=version_dir, manifest=manifest)
        plans.append(other.plan(theirs, seed))
    batches = count_steps(source)

    def read(epoch: int, batch: int) -> Iterator[DecodedRows]:
        # Each pass of a dataset is an epoch of its own, which no other pass has.
        first = epoch * (batches + 1)
        sources = [lambda number, p=plan: read_epoch(p, first + number) for plan in plans]
        shares, size = source.config.mix_shares, source.batch_size
        mixed = mix_rows(sources, shares, batches, size, [seed, epoch])
        yield from itertools.islice(mixed, batch, None)
        compare_begun(own.damage)

    return read


def check_mixed_ids(
    version_dir: ReadablePath,
    manifest: Manifest,
    mixed: Sequence[tuple[ReadablePath, Manifest]],
    features: Sequence[str],
) -> None:
    """Refuses datasets whose ids stand for other tokens, or whose numbers were scaled otherwise."""
    mixed = [one for one in mixed if one[1].encoders_fingerprint != manifest.encoders_fingerprint]
    if not mixed:
        return
    own = read_encoded_version(version_dir, manifest)
    for other_dir, other_manifest in mixed:
        other = read_encoded_version(other_dir, other_manifest)
        encoded = {column.feature for plan in (own.plan, other.plan) for column in plan.columns}
        # Of values as they came nothing tells what they stand for.
        for name in (name for name in features if name in encoded):
            if not _means_the_same(manifest.schema[name], own, other):
                raise InputDataError(
                    f"values of feature {name!r} mean something else in a dataset of input.mix",
                    received=f"encoders of dataset {other_manifest.dataset_name!r}",
                    allowed=f"those of dataset {manifest.dataset_name!r}",
                    fix="leave it out of the mix, or encode the feature alike in both builds: ids "
                    "by hashing, numbers by `constants` of normalize",
                )


def _means_the_same(spec: FeatureSpec, own: EncodedVersion, other: EncodedVersion) -> bool:
    if spec.vocabulary_size is None:
        return is_computed_alike(spec.name, own, other)
    keys = np.arange(1, spec.vocabulary_size)
    found = match_keys(spec.name, keys, own, other)
    return found is not None and np.array_equal(found, keys)
