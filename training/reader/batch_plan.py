"""Which rows make which batches of a split, and of which columns; in whatever form they come out.

`training.input` makes tensors of them, `training.reader.batch_reader` arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.encoders.bags import SparseIndices, Weights
from conf.errors import ConfigError, InputDataError, TooFewRowsError
from conf.load import override_config
from conf.manifest import Manifest, bound_list
from conf.paths import ReadablePath
from conf.schema import FeatureSpec
from conf.storage.locations import find_path
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
from training.reader.training_data import SplitSource, build_size_error, count_steps

EVAL_BUFFER_ROWS = 16_384
"""Rows that are decoded at a time where they keep their order."""
# Options of `input` that decide which rows are drawn, and in which order.
_SHUFFLED_ONLY = ("class_balance", "mix", "bucket_boundaries", "sparse")
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
        """Reads this rank's rows of every n-th batch, from a batch on.

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
        source, manifest = self.source, self.source.manifest
        if not self.is_shuffled:
            columns = plan_columns(manifest, self.specs, self.ragged)
            rows = source.plan(columns, None, EVAL_BUFFER_ROWS)
            return BatchPlan(BatchShape(columns, source.batch_size, self.drop_remainder), rows)
        pairs = self._find_sparse()
        columns = plan_columns(manifest, self.specs, (*self.ragged, *pairs, *pairs.values()))
        cut = _padded_lists(columns) if source.config.bucket_boundaries else {}
        shape = BatchShape(columns, source.batch_size, self.drop_remainder, tuple(cut), pairs)
        read_columns = _with_class(source, columns)
        rows = source.plan(read_columns, self.seed)
        if source.config.mix:
            return BatchPlan(shape, rows, _plan_mix(source, read_columns, rows, self.seed))
        if cut:
            boundaries = source.config.bucket_boundaries or ()
            return BatchPlan(shape, rows, functools.partial(_read_bucketed, rows, boundaries, cut))
        return BatchPlan(shape, rows)

    def count(self, ranks: int = 1) -> int | None:
        """Batches of an epoch, None where only reading tells; the same for workers in step.

        A batch with fewer rows than the `ranks` that share it is dropped.
        """
        source, config, drop = self.source, self.source.config, self.drop_remainder
        number, workers = source.options.worker
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

    def _find_sparse(self) -> dict[str, str]:
        if not self.source.config.sparse:
            return {}
        names = {spec.name for spec in self.specs}
        pairs = find_sparse_pairs(self.source.version_dir, self.source.manifest)
        return {ids: weights for ids, weights in pairs.items() if {ids, weights} <= names}


def _with_class(
    source: SplitSource, columns: tuple[FeatureColumn, ...]
) -> tuple[FeatureColumn, ...]:
    """The columns, and the class that rows are drawn by where the model does not read it."""
    balance = source.config.class_balance
    if balance is None or any(column.name == balance.feature for column in columns):
        return columns
    specs = select_features(source.manifest, [balance.feature])
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


def _read_bucketed(
    rows: ReadPlan, boundaries: Sequence[int], cut: Mapping[str, int], epoch: int, batch: int
) -> Iterator[DecodedRows]:
    seed = [rows.seed or 0, epoch]
    batches = bucket_batches(read_epoch(rows, epoch), boundaries, cut, rows.batch_size, seed)
    return itertools.islice(batches, batch, None)


def build_share_error(split: str, ranks: int) -> TooFewRowsError:
    return TooFewRowsError(
        f"an epoch of the {split} split has no batch",
        received=f"fewer rows than the {ranks} ranks that share them" if ranks > 1 else "no row",
        allowed="a batch with a row for each rank",
        fix="let filter, validation and on_corrupt leave rows, or open it with fewer ranks",
    )


def build_config(
    batch_size: int, options: Mapping[str, Any], split: str, shuffle: bool | None, held_out: bool
) -> tuple[InputConfig, bool]:
    """Builds the config of batches that are asked for, and tells whether they are shuffled.

    `shuffle` None shuffles train alone; `held_out` asks for the rows that `validation` keeps apart.
    """
    is_shuffled = split == "train" and not held_out if shuffle is None else shuffle
    config = override_config(InputConfig(), {**options, "batch_size": batch_size}, "of the input")
    unfit = [name for name in _SHUFFLED_ONLY if getattr(config, name) and not is_shuffled]
    if unfit:
        raise ConfigError(
            f"{unfit[0]} needs shuffled rows",
            received="shuffle=False",
            fix=f"set shuffle=True, or leave {unfit[0]} out",
        )
    if held_out and (config.validation is None or split != "train"):
        raise ConfigError(
            "no rows are held out",
            received=f"split={split!r}, validation={config.validation}",
            allowed="split='train' and validation={'hash_of': FEATURE, 'share': SHARE}",
        )
    return config, is_shuffled


def bound_specs(
    manifest: Manifest, names: Sequence[str], ragged: Sequence[str] = ()
) -> list[FeatureSpec]:
    """Specs of features, and `ragged` ones known; lists are bounded by the longest of any split."""
    splits = [found.name for found in manifest.splits]
    select_features(manifest, ragged)
    return [bound_list(manifest, spec, splits) for spec in select_features(manifest, names)]


def check_number(what: str, given: tuple[int, int]) -> None:
    is_pair = isinstance(given, Sequence) and len(given) == 2
    if not is_pair or not all(map(is_whole, given)) or not given[0] < given[1]:
        raise ConfigError(
            f"there is no such {what}",
            received=repr(given),
            allowed=f"(number, {what}s), whole numbers with 0 <= number < {what}s",
        )


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, 0 or more; arrays of checkpoints have such of NumPy's."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_number and int(value) >= 0


def find_sparse_pairs(version_dir: ReadablePath, manifest: Manifest) -> dict[str, str]:
    """Finds the halves of sparse rows: feature of the weights by feature of the indices.

    The encoders tell: weights are made from the columns of weights and, behind these, the very
    columns of ids that the indices are made from.
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
    """Finds the datasets of `input.mix`: directory and manifest of each version.

    One that lacks a feature of these names, or has it with another type, shape or vocabulary, is
    refused.
    """
    found: list[tuple[ReadablePath, Manifest]] = []
    specs = select_features(manifest, names)
    for part in config.mix:
        version_dir = resolve_version(find_path(part.dataset))
        other = read_manifest(version_dir, config.tolerates)
        check_specs(other, specs)
        found.append((version_dir, other))
    return found


def _plan_mix(
    source: SplitSource, columns: Sequence[FeatureColumn], own: ReadPlan, seed: int
) -> _Remade:
    names = [column.name for column in columns]
    plans = [own]
    for version_dir, manifest in find_mixed(source.config, source.manifest, names):
        lists = manifest.find_feature_lists()
        theirs = [replace(column, is_sequence=column.name in lists) for column in columns]
        other = replace(source, version_dir=version_dir, manifest=manifest)
        plans.append(other.plan(theirs, seed))
    batches = count_steps(source)

    def read(epoch: int, batch: int) -> Iterator[DecodedRows]:
        # Each pass of a dataset is an epoch of its own, which no other pass has.
        sources = [functools.partial(_read_pass, plan, epoch * (batches + 1)) for plan in plans]
        shares, size = source.config.mix_shares, source.batch_size
        mixed = mix_rows(sources, shares, batches, size, [seed, epoch])
        yield from itertools.islice(mixed, batch, None)
        compare_begun(own.damage)

    return read


def _read_pass(plan: ReadPlan, first: int, number: int) -> Iterator[DecodedRows]:
    return read_epoch(plan, first + number)


def check_mixed_ids(
    version_dir: ReadablePath,
    manifest: Manifest,
    mixed: Sequence[tuple[ReadablePath, Manifest]],
    features: Sequence[str],
) -> None:
    """Refuses datasets whose values mean something else: they would train the wrong rows.

    Vocabularies of one length need not hold the same tokens in the same order, and numbers of one
    column may have been scaled by another mean.
    """
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
