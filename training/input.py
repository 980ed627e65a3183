"""Shards to batches: what a manifest lists, read by `tf.data`.

A batch is `dict[str, tf.Tensor]`: scalars `[batch]`, lists padded to `[batch, max_len]`, lists
without a bound (and those asked for) as `tf.RaggedTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import InputDataError, did_you_mean
from conf.manifest import Manifest, SplitInfo
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from conf.training import InputConfig
from training.input_errors import input_errors
from training.list_lengths import bound_list
from training.shards import open_shard, shard_paths

Batch = dict[str, tf.Tensor]

# Splits whose records hold one side of the model alone.
ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}


def build_train_dataset(
    version_dir: Path,
    manifest: Manifest,
    config: InputConfig,
    *,
    epoch: int,
    seed: int,
    features: Sequence[str] | None = None,
    start_batch: int = 0,
) -> tf.data.Dataset:
    """Returns one epoch of the train split, shuffled; the same for the same seed and epoch.

    The order of shards and the draws of the shuffle buffer are derived from `seed` and `epoch`,
    so an epoch can be replayed on its own. The last, incomplete batch is dropped: an uneven tail
    would give its rows another weight when it is split over replicas.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        config: Batch size (global), shuffle buffer in records, shards read at once.
        epoch: Zero-based epoch.
        seed: The run's seed.
        features: Names to read; None reads all but those of role id.
        start_batch: Batches of the epoch to leave out: the rest is the tail of the whole epoch.

    Returns:
        Dataset of batches of exactly `config.batch_size` rows. Lists are padded to `max_len`, or
        to the longest list of the split where the manifest's statistics tell it.

    Raises:
        InputDataError: The split is missing or smaller than a batch, or a feature is unknown.
    """
    split = check_train_rows(manifest, config.batch_size)
    rng = np.random.default_rng([seed, epoch])
    paths = shard_paths(version_dir, manifest, "train")
    shards = tf.data.Dataset.from_tensor_slices([paths[i] for i in rng.permutation(len(paths))])
    records = shards.interleave(
        lambda path: open_shard(path, manifest),
        cycle_length=min(config.interleave_shards, len(paths)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    # Records are shuffled, not batches: a shuffle after `batch` would keep rows together.
    records = records.shuffle(
        min(config.shuffle_buffer, split.rows),
        seed=int(rng.integers(2**31)),
        reshuffle_each_iteration=False,
    )
    # Batches of one shape train faster, and collectives between replicas need them.
    excluded = () if features else ("id",)
    specs = [bound_list(manifest, spec) for spec in select_features(manifest, features, excluded)]
    return (
        records.batch(config.batch_size, drop_remainder=True)
        .skip(start_batch)
        .map(
            build_parser(specs, batch_size=config.batch_size),
            num_parallel_calls=config.parallel_parses or tf.data.AUTOTUNE,
            deterministic=True,
        )
        .prefetch(tf.data.AUTOTUNE)
    )


def check_train_rows(manifest: Manifest, batch_size: int) -> SplitInfo:
    """Returns the train split where it holds at least one batch.

    Raises:
        InputDataError: The split is missing or smaller than a batch.
    """
    split = manifest.split("train")
    if split.rows < batch_size:
        raise InputDataError(
            "the train split is smaller than one batch",
            received=f"{split.rows} rows",
            allowed=f"at least input.batch_size = {batch_size} rows",
            fix=f"set input.batch_size to {max(1, split.rows)} or less, or add data",
        )
    return split


def build_eval_dataset(
    version_dir: Path,
    manifest: Manifest,
    split: str,
    batch_size: int,
    features: Sequence[str] | None = None,
    ragged: Sequence[str] = (),
) -> tf.data.Dataset:
    """Returns a split in the manifest's order, every record once, the last batch included.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        split: Name of the split.
        batch_size: Rows per batch; the last batch may have fewer.
        features: Names to read; None reads all that the split's records hold: of the catalogue
            those of role item, of the users those of role user and their seen items.
        ragged: Features to return as RaggedTensors: lists rather than padded, and scalars that
            records may lack, which have a row of length 0 there.

    Raises:
        InputDataError: The version has no such split, or a feature is unknown.
    """
    paths = shard_paths(version_dir, manifest, split)
    specs = select_features(manifest, features or _split_features(manifest, split))
    select_features(manifest, ragged)
    if not paths:
        return _empty_dataset(specs, ragged)
    records = open_shard(paths, manifest)
    return (
        records.batch(batch_size)
        .map(build_parser(specs, ragged), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def select_features(
    manifest: Manifest, names: Sequence[str] | None, exclude_roles: Sequence[str] = ()
) -> tuple[FeatureSpec, ...]:
    """Returns the specs of the named features, or of all but some roles.

    Raises:
        InputDataError: A name is not in the schema.
    """
    schema = manifest.schema
    if names is None:
        return tuple(spec for spec in schema.features if spec.role not in exclude_roles)
    for name in names:
        if name not in schema:
            raise InputDataError(
                f"dataset {manifest.dataset_name!r} has no such feature",
                received=name,
                allowed=", ".join(schema.names),
                fix=did_you_mean(name, schema.names),
            )
    return tuple(schema[name] for name in dict.fromkeys(names))


def build_parser(
    specs: Sequence[FeatureSpec], ragged: Sequence[str] = (), batch_size: int | None = None
) -> Callable[[tf.Tensor], Batch]:
    """Returns the function that turns a batch of serialized records into features.

    Records are parsed a batch at a time: parsing one by one costs about twenty times as much.

    Args:
        specs: Features to read.
        ragged: Features to leave ragged; scalars among them may be absent.
        batch_size: Static number of rows, where it is known.
    """
    specs = tuple(specs)
    wire = {spec.name: _wire_feature(spec, spec.name in ragged) for spec in specs}

    def parse(serialized: tf.Tensor) -> Batch:
        parsed = tf.io.parse_example(serialized, wire)
        return {spec.name: _finish(spec, parsed[spec.name], batch_size) for spec in specs}

    return parse


def read_batches(
    dataset: tf.data.Dataset, version_dir: Path, manifest: Manifest, split: str
) -> Iterator[Batch]:
    """Iterates a dataset of this module, with errors that name the shard or the feature."""
    with input_errors(version_dir, manifest, split):
        yield from dataset


def _split_features(manifest: Manifest, split: str) -> tuple[str, ...]:
    role = ROLE_OF_SPLIT.get(split)
    seen = manifest.keys.seen if role == "user" else None
    return tuple(
        spec.name
        for spec in manifest.schema.features
        if role is None or spec.role == role or spec.name == seen
    )


def _dtype(spec: FeatureSpec) -> tf.DType:
    return tf.string if spec.dtype == "bytes" else tf.as_dtype(spec.dtype)


def _stays_ragged(spec: FeatureSpec, asked: bool) -> bool:
    return asked or (spec.is_ragged and spec.max_len is None)


def _wire_feature(spec: FeatureSpec, asked_ragged: bool) -> Any:
    dtype = _dtype(spec)
    default = _pad_value(spec)
    if _stays_ragged(spec, asked_ragged):
        return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
    if spec.is_ragged:
        # Pads to the longest list of the batch inside the parser, without a sparse detour.
        return tf.io.FixedLenSequenceFeature([], dtype, allow_missing=True, default_value=default)
    if spec.is_list:
        length = int(spec.shape[0] or 0)
        known = spec.pad_value is not None or spec.vocabulary_size is not None
        fill = [default] * length if known else None
        return tf.io.FixedLenFeature([length], dtype, default_value=fill)
    if spec.vocabulary_size is not None:
        return tf.io.FixedLenFeature([], dtype, default_value=OOV_ID)
    return tf.io.FixedLenFeature([], dtype, default_value=spec.pad_value)


def _pad_value(spec: FeatureSpec) -> int | float | str:
    if spec.vocabulary_size is not None:
        return PAD_ID
    if spec.pad_value is not None:
        return spec.pad_value
    zeros: dict[str, int | float | str] = {"int64": 0, "float32": 0.0, "bytes": ""}
    return zeros[spec.dtype]


def _finish(spec: FeatureSpec, value: Any, batch_size: int | None) -> Any:
    """Gives a parsed feature its static shape; padded lists grow from the longest to max_len."""
    if isinstance(value, tf.RaggedTensor):
        return value
    if spec.is_ragged:
        width = spec.max_len
        value = value[:, :width]
        missing = width - tf.shape(value)[1]
        value = tf.pad(value, [[0, 0], [0, missing]], constant_values=_pad_value(spec))
        return tf.ensure_shape(value, [batch_size, width])
    return tf.ensure_shape(value, [batch_size, *spec.shape])


def _empty_dataset(specs: Sequence[FeatureSpec], ragged: Sequence[str]) -> tf.data.Dataset:
    """A dataset of the right structure without any batch: a split may be empty."""
    parse = build_parser(specs, ragged)
    return tf.data.Dataset.from_tensor_slices(tf.constant([], tf.string)).batch(1).map(parse)
