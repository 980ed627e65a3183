"""Batches of a dataset version as a `tf.data.Dataset`: a training epoch, a split, held-out rows.

A batch is `dict[str, tf.Tensor]`: scalars `[batch]`, lists padded to `[batch, max_len]`, lists
without a bound (and those asked for) as `tf.RaggedTensor`, ids with weights as
`tf.SparseTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, SluiceError
from conf.manifest import Manifest
from conf.operations import SparseIndices, Weights
from conf.paths import ReadablePath
from conf.schema import FeatureSpec
from conf.training.input import FilterConfig, InputConfig
from training.input.carried_errors import carry, input_errors
from training.input.open_iterators import close_iterators_at_exit
from training.raw_inputs.vocabularies import read_plan
from training.reader.decoded_rows import DecodedRows, regroup
from training.reader.feature_columns import FeatureColumn, bound_list, plan_columns, select_features
from training.reader.mixing import build_mixed_reader
from training.reader.row_sampling import bucket_batches, skip_batches
from training.reader.shuffle_buffer import read_epoch
from training.reader.split_source import InputOptions, SplitSource, build_size_error

Batch = dict[str, Any]
Features = Mapping[str, Any]
"""Features of rows by name: tensors, ragged or sparse ones."""
ARRIVALS = "arrivals"
"""Key of a batch whose value holds the rows of dynamic tables that are new in it."""

# Rows that are handed to TensorFlow at a time, where all columns have one size: a call costs
# some ten microseconds per column, which would be most of the time of a small batch.
SLAB_ROWS = 32768


def _untuned() -> tf.data.Options:
    """Options without TensorFlow's tuning thread; a prefetch still grows where it runs empty.

    There is nothing to tune here, and the thread may sleep through its end: whoever lets an
    iterator go then waits for it, up to a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


class BatchLayout:
    """How columns cross into TensorFlow, and what is made of them there.

    Args:
        columns: The features.
        batch_size: Rows per batch.
        drop_remainder: Whether every batch has that many.
        cut: Padded lists whose length differs from batch to batch.
        sparse: Feature of the weights by feature of the ids: these become sparse tensors.
    """

    def __init__(
        self,
        columns: Sequence[FeatureColumn],
        batch_size: int,
        drop_remainder: bool,
        cut: Sequence[str] = (),
        sparse: Mapping[str, str] | None = None,
    ) -> None:
        self._columns = tuple(columns)
        self._batch_size, self._drop_remainder = batch_size, drop_remainder
        self._cut, self._sparse = frozenset(cut), dict(sparse or {})

    @property
    def is_uniform(self) -> bool:
        """Whether every row of every batch has the same size."""
        return not self._cut and all(column.is_dense for column in self._columns)

    def build_dataset(self, read: Callable[[], Iterator[DecodedRows]]) -> tf.data.Dataset:
        """Builds the dataset of batches.

        Args:
            read: Begins to read the rows, in parts of any size (which are batches already where
                lists are cut); called by each iterator of the dataset.
        """
        close_iterators_at_exit()
        size, is_uniform = self._batch_size, self.is_uniform
        most = max(1, SLAB_ROWS // size) * size if is_uniform else size

        def generate() -> Iterator[Any]:
            try:
                for rows in regroup(read(), size, most, self._drop_remainder):
                    flat = self._flatten(rows)
                    yield dict(zip(names, flat, strict=True)) if is_uniform else tuple(flat)
            except SluiceError as error:
                raise carry(error) from error

        names, signature = [column.name for column in self._columns], self._signature()
        if is_uniform:
            specs = dict(zip(names, signature, strict=True))
            dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
            dataset = dataset.rebatch(size, drop_remainder=self._drop_remainder)
        else:
            dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
            dataset = dataset.map(self._assemble)
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(_untuned())

    def _flatten(self, rows: DecodedRows) -> Iterator[np.ndarray]:
        for column in self._columns:
            if column.is_dense:
                yield rows.dense[column.name]
            elif not column.wire.is_list:
                yield rows.lists[column.name].to_numpy(zero_copy_only=False)
            else:
                lists = rows.lists[column.name]
                yield lists.flatten().to_numpy(zero_copy_only=False)
                offsets = np.frombuffer(lists.buffers()[1], np.int32)
                offsets = offsets[lists.offset : lists.offset + len(lists) + 1]
                yield offsets.astype(np.int64) - offsets[0]

    def _signature(self) -> tuple[tf.TensorSpec, ...]:
        specs = []
        for column in self._columns:
            dtype = tf.string if column.spec.dtype == "bytes" else tf.as_dtype(column.spec.dtype)
            if column.is_dense and column.length is not None:
                length = None if column.name in self._cut else column.length
                specs.append(tf.TensorSpec([None, length], dtype))
            else:
                specs.append(tf.TensorSpec([None], dtype))
            if not column.is_dense and column.wire.is_list:
                specs.append(tf.TensorSpec([None], tf.int64))
        return tuple(specs)

    def _assemble(self, *tensors: tf.Tensor) -> Batch:
        batch: Batch = {}
        rows = self._batch_size if self._drop_remainder else None
        left = iter(tensors)
        for column in self._columns:
            value: Any = next(left)
            if not column.is_dense and column.wire.is_list:
                value = tf.RaggedTensor.from_row_splits(value, next(left), validate=False)
                if not column.is_ragged:
                    value = value.to_tensor(column.pad, shape=[None, column.length])
            if isinstance(value, tf.Tensor):
                value = tf.ensure_shape(value, [rows, *value.shape[1:]])
            batch[column.name] = value
        for ids, weights in self._sparse.items():
            size = next(c.spec.vocabulary_size for c in self._columns if c.name == ids)
            batch[ids] = build_sparse(batch[ids], batch.pop(weights), int(size or 0))
        return batch


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


def build_sparse(ids: tf.RaggedTensor, weights: tf.RaggedTensor, size: int) -> tf.SparseTensor:
    """Builds sparse rows as `tf.io.SparseFeature` does.

    Args:
        ids: int64 `[batch, (len)]`, each in [0, size).
        weights: float32 `[batch, (len)]`, as many as there are ids.
        size: Length of a dense row.

    Returns:
        `[batch, size]`, in row-major order; an id that a row holds twice is there twice.
    """
    same = tf.debugging.assert_equal(
        ids.row_splits, weights.row_splits, "as many weights as ids are needed in each row"
    )
    with tf.control_dependencies([same]):
        rows = ids.value_rowids()
    indices = tf.stack([rows, ids.values], axis=1)
    shape = tf.stack([ids.nrows(), tf.constant(size, tf.int64)])
    return tf.sparse.reorder(tf.SparseTensor(indices, weights.values, shape))


# Splits whose records hold one side of the model alone.
ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}
EVAL_BUFFER_ROWS = 16_384
"""Rows that are decoded at a time where they keep their order."""

_Select = Sequence[str] | None


def build_train_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    config: InputConfig,
    *,
    epoch: int,
    seed: int,
    features: _Select = None,
    start_batch: int = 0,
    options: InputOptions | None = None,
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
    options = options or InputOptions()
    source = SplitSource(version_dir, manifest, "train", config, options)
    if (rows := manifest.split("train").rows) < config.batch_size:
        raise build_size_error(source, rows)
    excluded = () if features else ("id",)
    specs = [bound_list(manifest, spec) for spec in select_features(manifest, features, excluded)]
    layout, read = plan_shuffled(source, specs, seed, drop_remainder=True)
    return layout.build_dataset(lambda: read(epoch, start_batch))


def build_eval_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    split: str,
    batch_size: int,
    features: _Select = None,
    ragged: Sequence[str] = (),
    measured: tuple[FilterConfig, ...] = (),
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
        measured: What rows must pass; others are left out.

    Raises:
        InputDataError: The version has no such split, or a feature is unknown.
        ConfigError: A value of `measured` is not of its feature's type.
    """
    config = InputConfig(batch_size=batch_size)
    options = InputOptions(measured=measured)
    source = SplitSource(version_dir, manifest, split, config, options)
    return _build_ordered(source, features or split_features(manifest, split), ragged)


def build_held_out_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    config: InputConfig,
    batch_size: int,
    features: _Select = None,
    ragged: Sequence[str] = (),
    options: InputOptions | None = None,
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
    source = SplitSource(version_dir, manifest, "train", own, options or InputOptions(), True)
    return _build_ordered(source, features or manifest.schema.names, ragged)


def read_batches(
    dataset: tf.data.Dataset, version_dir: ReadablePath, manifest: Manifest, split: str
) -> Iterator[Batch]:
    """Iterates a dataset of this module, with errors that name the shard or the feature."""
    with input_errors(version_dir, manifest, split):
        yield from dataset


def _build_ordered(
    source: SplitSource, features: Sequence[str], ragged: Sequence[str]
) -> tf.data.Dataset:
    manifest = source.manifest
    select_features(manifest, ragged)
    columns = plan_columns(manifest, select_features(manifest, features), ragged)
    layout, read = plan_ordered(source, columns, drop_remainder=False)
    return layout.build_dataset(read)


def plan_ordered(
    source: SplitSource, columns: Sequence[FeatureColumn], *, drop_remainder: bool
) -> tuple[BatchLayout, Callable[[], Iterator[DecodedRows]]]:
    """Plans the batches of a split in the manifest's order.

    Args:
        source: The split, as it is read.
        columns: Features to deliver.
        drop_remainder: Whether to drop rows at the end that fill no batch.

    Returns:
        The layout of the batches, and the function that reads the rows.

    Raises:
        InputDataError: There is no such split.
        ConfigError: The config does not fit the dataset.
    """
    plan = source.plan(columns, None, EVAL_BUFFER_ROWS)
    layout = BatchLayout(columns, source.batch_size, drop_remainder)
    return layout, lambda: read_epoch(plan, 0)


def plan_shuffled(
    source: SplitSource, specs: Sequence[FeatureSpec], seed: int, *, drop_remainder: bool
) -> tuple[BatchLayout, Callable[[int, int], Iterator[DecodedRows]]]:
    """Plans the batches of a shuffled split.

    Args:
        source: The split, as it is read.
        specs: Features to deliver.
        seed: The run's seed.
        drop_remainder: Whether to drop rows at the end that fill no batch.

    Returns:
        The layout of the batches; the function of epoch and first batch to the rows of the epoch
        from there on.

    Raises:
        InputDataError: A dataset of `mix` lacks a feature.
        ConfigError: The config does not fit the dataset.
    """
    manifest, config = source.manifest, source.config
    pairs = find_sparse_pairs(source.version_dir, manifest) if config.sparse else {}
    names = {spec.name for spec in specs}
    pairs = {ids: weights for ids, weights in pairs.items() if {ids, weights} <= names}
    columns = plan_columns(manifest, specs, (*pairs, *pairs.values()))
    cut = _padded_lists(columns) if config.bucket_boundaries else {}
    layout = BatchLayout(columns, source.batch_size, drop_remainder, tuple(cut), pairs)
    return layout, _build_train_reader(source, columns, seed, cut)


def _build_train_reader(
    source: SplitSource, columns: tuple[FeatureColumn, ...], seed: int, cut: dict[str, int]
) -> Callable[[int, int], Iterator[DecodedRows]]:
    """Returns the function of epoch and first batch to the rows of the epoch from there on."""
    config, size = source.config, source.batch_size
    read_columns = _with_class(source, columns)
    plan = source.plan(read_columns, seed)
    if config.mix:
        return build_mixed_reader(source, read_columns, plan, seed)
    if not cut:
        return lambda epoch, batch: read_epoch(plan, epoch, batch * size)
    if not plan.has_lengths:
        raise ConfigError("input.bucket_boundaries needs a list feature")

    def read(epoch: int, batch: int) -> Iterator[DecodedRows]:
        batches = bucket_batches(
            read_epoch(plan, epoch), config.bucket_boundaries or (), cut, size, [seed, epoch]
        )
        return skip_batches(batches, batch)

    return read


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


def split_features(manifest: Manifest, split: str) -> tuple[str, ...]:
    """Names of the features that the records of a split hold."""
    role = ROLE_OF_SPLIT.get(split)
    seen = manifest.keys.seen if role == "user" else None
    return tuple(
        spec.name
        for spec in manifest.schema.features
        if role is None or spec.role == role or spec.name == seen
    )
