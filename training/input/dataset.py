"""Datasets of batches: an epoch of training, a split in its order, what is held out.

A batch is `dict[str, tf.Tensor]`: scalars `[batch]`, lists padded to `[batch, max_len]`, lists
without a bound (and those asked for) as `tf.RaggedTensor`, ids with weights as `tf.SparseTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.place import Place
from conf.schema import FeatureSpec
from conf.training.input import InputConfig
from training.input.columns import Column, plan_columns, select_features
from training.input.counting import build_size_error
from training.input.mix import build_mixed_reader
from training.input.reading import ReadOptions, Source, build_stream
from training.input.rows import Rows
from training.input.sampling import bucket_batches, skip_batches
from training.input.sparse import find_sparse_pairs
from training.input.stream import read_epoch
from training.input.tensors import Batch, BatchLayout
from training.input_errors import input_errors
from training.list_lengths import bound_list

# Splits whose records hold one side of the model alone.
ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}
EVAL_POOL_ROWS = 16_384
"""Rows that are decoded at a time where they keep their order."""

_Select = Sequence[str] | None


def build_train_dataset(
    version_dir: Place,
    manifest: Manifest,
    config: InputConfig,
    *,
    epoch: int,
    seed: int,
    features: _Select = None,
    start_batch: int = 0,
    options: ReadOptions | None = None,
) -> tf.data.Dataset:
    """Returns one epoch of the train split, shuffled; the same for the same seed and epoch.

    All draws are derived from `seed` and `epoch`, so an epoch can be replayed on its own, or from
    any batch on. The last, incomplete batch is dropped: an uneven tail would give its rows
    another weight when it is split over replicas.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        config: Batch size (global), rows shuffled together, shards read at once, and the rest.
        epoch: Zero-based epoch.
        seed: The run's seed.
        features: Names to read; None reads all but those of role id.
        start_batch: Batch of the epoch to begin with: what follows is, bit for bit, the tail of
            the whole epoch. Nothing before it is decoded, unless rows are left out (`filter`,
            `validation`, `on_corrupt`) or batches depend on more than their own rows
            (`bucket_boundaries`, `mix`): then the rows before it are read and dropped.
        options: What the run asks for beside its config.

    Returns:
        Dataset of batches of exactly `config.batch_size` rows (of one worker: its part of them).
        Lists are padded to `max_len`, or to the longest list of the split where the manifest's
        statistics tell it.

    Raises:
        InputDataError: The split is missing or smaller than a batch, or a feature is unknown.
        ConfigError: The config does not fit the dataset.
    """
    options = options or ReadOptions()
    source = Source(version_dir, manifest, "train", config, options)
    if (rows := manifest.split("train").rows) < config.batch_size:
        raise build_size_error(source, rows)
    excluded = () if features else ("id",)
    specs = [bound_list(manifest, spec) for spec in select_features(manifest, features, excluded)]
    pairs = find_sparse_pairs(version_dir, manifest) if config.sparse else {}
    names = {spec.name for spec in specs}
    pairs = {ids: weights for ids, weights in pairs.items() if {ids, weights} <= names}
    columns = plan_columns(manifest, specs, (*pairs, *pairs.values()))
    cut = _padded_lists(columns) if config.bucket_boundaries else {}
    read = _build_train_reader(source, columns, seed, cut)
    layout = BatchLayout(columns, source.batch_size, True, tuple(cut), pairs)

    def read_epochs() -> Iterator[Iterator[Rows]]:
        yield read(epoch, start_batch)
        for later in range(epoch + 1, epoch + options.epochs):
            yield read(later, 0)

    return layout.build_dataset(read_epochs)


def build_eval_dataset(
    version_dir: Place,
    manifest: Manifest,
    split: str,
    batch_size: int,
    features: _Select = None,
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
    config = InputConfig(batch_size=batch_size)
    source = Source(version_dir, manifest, split, config)
    return _build_ordered(source, features or _split_features(manifest, split), ragged)


def build_held_out_dataset(
    version_dir: Place,
    manifest: Manifest,
    config: InputConfig,
    batch_size: int,
    features: _Select = None,
    ragged: Sequence[str] = (),
    options: ReadOptions | None = None,
) -> tf.data.Dataset:
    """Returns the rows of train that `config.validation` keeps apart, in the manifest's order.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        config: The input's config.
        batch_size: Rows per batch; the last batch may have fewer.
        features: Names to read; None reads all.
        ragged: As for `build_eval_dataset`.
        options: What the run asks for beside its config.

    Raises:
        ConfigError: Nothing is held out.
        InputDataError: A feature is unknown.
    """
    if config.validation is None:
        raise ConfigError(
            "no rows of train are held out", fix="set input.validation.hash_of and .share"
        )
    own = config.model_copy(update={"batch_size": batch_size, "mix": ()})
    source = Source(version_dir, manifest, "train", own, options or ReadOptions(), True)
    return _build_ordered(source, features or manifest.schema.names, ragged)


def read_batches(
    dataset: tf.data.Dataset, version_dir: Place, manifest: Manifest, split: str
) -> Iterator[Batch]:
    """Iterates a dataset of this module, with errors that name the shard or the feature."""
    with input_errors(version_dir, manifest, split):
        yield from dataset


def _build_ordered(
    source: Source, features: Sequence[str], ragged: Sequence[str]
) -> tf.data.Dataset:
    manifest = source.manifest
    select_features(manifest, ragged)
    columns = plan_columns(manifest, select_features(manifest, features), ragged)
    stream = replace(build_stream(source, columns, None), pool_rows=EVAL_POOL_ROWS)
    layout = BatchLayout(columns, source.batch_size, drop_remainder=False)
    return layout.build_dataset(lambda: iter([read_epoch(stream, 0)]))


def _build_train_reader(
    source: Source, columns: tuple[Column, ...], seed: int, cut: dict[str, int]
) -> Callable[[int, int], Iterator[Rows]]:
    """Returns the function of epoch and first batch to the rows of the epoch from there on."""
    config, size = source.config, source.batch_size
    read_columns = _with_class(source, columns)
    stream = build_stream(source, read_columns, seed)
    if config.mix:
        return build_mixed_reader(source, read_columns, stream, seed)
    if not cut:
        return lambda epoch, batch: read_epoch(stream, epoch, batch * size)
    if not stream.pools.has_lengths:
        raise ConfigError("input.bucket_boundaries needs a list feature")

    def read(epoch: int, batch: int) -> Iterator[Rows]:
        batches = bucket_batches(
            read_epoch(stream, epoch), config.bucket_boundaries or (), cut, size, [seed, epoch]
        )
        return skip_batches(batches, batch)

    return read


def _with_class(source: Source, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns, and the class that rows are drawn by where the model does not read it."""
    balance = source.config.class_balance
    if balance is None or any(column.name == balance.feature for column in columns):
        return columns
    specs: tuple[FeatureSpec, ...] = select_features(source.manifest, [balance.feature])
    return (*columns, *plan_columns(source.manifest, specs))


def _padded_lists(columns: Sequence[Column]) -> dict[str, int]:
    lists = {c.name: c.length or 0 for c in columns if c.is_dense and c.spec.is_ragged}
    if not lists:
        raise ConfigError(
            "input.bucket_boundaries needs a list feature whose length is bounded",
            received=", ".join(column.name for column in columns),
            fix="leave bucket_boundaries out, or set the feature's max_len in the build",
        )
    return lists


def _split_features(manifest: Manifest, split: str) -> tuple[str, ...]:
    role = ROLE_OF_SPLIT.get(split)
    seen = manifest.keys.seen if role == "user" else None
    return tuple(
        spec.name
        for spec in manifest.schema.features
        if role is None or spec.role == role or spec.name == seen
    )
