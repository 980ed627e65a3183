"""Further datasets whose train rows are mixed in, and the check that their ids mean the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.storage.locations import find_path
from conf.training.input import InputConfig
from training.encoders.vocabularies import match_keys, read_encoded_version
from training.reader.decoded_rows import DecodedRows
from training.reader.feature_columns import (
    FeatureColumn,
    check_specs,
    plan_columns,
    select_features,
)
from training.reader.row_sampling import mix_rows, skip_batches
from training.reader.shards import compare_begun
from training.reader.shuffle_buffer import ReadPlan, read_epoch
from training.reader.split_source import SplitSource, count_steps


def find_mixed(
    config: InputConfig, manifest: Manifest, names: Sequence[str]
) -> list[tuple[ReadablePath, Manifest]]:
    """Finds the datasets of `input.mix`: directory and manifest of each version.

    Args:
        config: The input's config.
        manifest: The dataset that they are mixed into.
        names: Features that are read.

    Raises:
        InputDataError: A dataset lacks a feature or has it with another type, shape or
            vocabulary; names the feature and both.
        UpstreamNotReadyError: There is no such dataset.
    """
    found: list[tuple[ReadablePath, Manifest]] = []
    specs = select_features(manifest, names)
    for part in config.mix:
        version_dir = resolve_version(find_path(part.dataset))
        other = read_manifest(version_dir, config.tolerates)
        check_specs(other, specs)
        found.append((version_dir, other))
    return found


def build_mixed_reader(
    source: SplitSource, columns: tuple[FeatureColumn, ...], own: ReadPlan, seed: int
) -> Callable[[int, int], Iterator[DecodedRows]]:
    """Returns the function of epoch and first batch to the mixed batches from there on.

    Args:
        source: The dataset that the run trains on.
        columns: Features to deliver.
        own: How its rows are read.
        seed: The run's seed.

    Raises:
        InputDataError: Another dataset has no such version, or other features.
    """
    config, size = source.config, source.batch_size
    plans = [own, *_plan_mixed(source, columns, seed)]
    batches = count_steps(source)

    def read(epoch: int, batch: int) -> Iterator[DecodedRows]:
        # Each pass of a dataset is an epoch of its own, which no other pass has.
        sources = [functools.partial(_read_pass, plan, epoch * (batches + 1)) for plan in plans]
        mixed = mix_rows(sources, config.mix_shares, batches, size, [seed, epoch])
        yield from skip_batches(mixed, batch)
        compare_begun(own.damage)

    return read


def _read_pass(plan: ReadPlan, first: int, number: int) -> Iterator[DecodedRows]:
    return read_epoch(plan, first + number)


def _plan_mixed(
    source: SplitSource, columns: Sequence[FeatureColumn], seed: int
) -> Iterator[ReadPlan]:
    names = [column.name for column in columns]
    for version_dir, manifest in find_mixed(source.config, source.manifest, names):
        other = replace(source, version_dir=version_dir, manifest=manifest)
        theirs = [
            replace(column, is_sequence=found.is_sequence)
            for column, found in zip(
                columns, plan_columns(manifest, select_features(manifest, names)), strict=True
            )
        ]
        yield other.plan(theirs, seed)


def check_mixed_ids(
    version_dir: ReadablePath,
    manifest: Manifest,
    mixed: Sequence[tuple[ReadablePath, Manifest]],
    features: Sequence[str],
) -> None:
    """Refuses datasets whose ids stand for other tokens: they would train the wrong rows.

    Vocabularies of one length need not hold the same tokens in the same order.

    Args:
        version_dir: Directory of the dataset that others are mixed into.
        manifest: Its manifest.
        mixed: Directory and manifest of the others, whose features have the same specs.
        features: Names of the features that are read.

    Raises:
        InputDataError: A feature's ids do not agree, or the encoders of a version are damaged.
    """
    names = [name for name in features if manifest.schema[name].vocabulary_size is not None]
    mixed = [
        part for part in mixed if part[1].encoders_fingerprint != manifest.encoders_fingerprint
    ]
    if not names or not mixed:
        return
    own = read_encoded_version(version_dir, manifest)
    for other_dir, other_manifest in mixed:
        other = read_encoded_version(other_dir, other_manifest)
        encoded = {column.feature for plan in (own.plan, other.plan) for column in plan.columns}
        for name in names:
            if name not in encoded:
                continue  # Ids as they came: nothing tells what they stand for.
            keys = np.arange(1, manifest.schema[name].vocabulary_size)
            found = match_keys(name, keys, own, other)
            if found is None or not np.array_equal(found, keys):
                raise InputDataError(
                    f"ids of feature {name!r} stand for other tokens in a dataset of input.mix",
                    received=f"encoders of dataset {other_manifest.dataset_name!r}",
                    allowed=f"those of dataset {manifest.dataset_name!r}",
                    fix="leave it out of the mix, or encode the feature by hashing in both builds",
                )
