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
from conf.manifest import Manifest, bound_list
from conf.paths import ReadablePath
from conf.training.input import FilterConfig, InputConfig, OnCorrupt
from training.input.carried_errors import carry, input_errors
from training.input.open_iterators import close_iterators_at_exit
from training.reader.batch_plan import BatchShape, plan_ordered, plan_shuffled
from training.reader.decoded_rows import DecodedRows, RaggedList, regroup
from training.reader.feature_columns import plan_columns, select_features, split_features
from training.reader.split_source import InputOptions, SplitSource, build_size_error

Batch = dict[str, Any]
Features = Mapping[str, Any]
"""Features of rows by name: tensors, ragged or sparse ones."""
ARRIVALS = "arrivals"
"""Key of a batch whose value holds the rows of dynamic tables that are new in it."""

FINITE_ADVICE = (
    "leave these features out of the model, or build the dataset again with finite numbers in "
    "their place"
)
"""What helps where `tell_non_finite` names features."""

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
        shape: What a batch is made of; ids with weights become sparse tensors.
    """

    def __init__(self, shape: BatchShape) -> None:
        self._shape = shape

    def build_dataset(self, read: Callable[[], Iterator[DecodedRows]]) -> tf.data.Dataset:
        """Builds the dataset of batches.

        Args:
            read: Begins to read the rows, in parts of any size (which are batches already where
                lists are cut); called by each iterator of the dataset.
        """
        close_iterators_at_exit()
        size, drop = self._shape.batch_size, self._shape.drop_remainder
        is_uniform = self._shape.is_uniform
        most = max(1, SLAB_ROWS // size) * size if is_uniform else size

        def generate() -> Iterator[Any]:
            try:
                for rows in regroup(read(), size, most, drop):
                    flat = self._flatten(rows)
                    yield dict(zip(names, flat, strict=True)) if is_uniform else tuple(flat)
            except SluiceError as error:
                raise carry(error) from error

        names, signature = [column.name for column in self._shape.columns], self._signature()
        if is_uniform:
            specs = dict(zip(names, signature, strict=True))
            dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
            dataset = dataset.rebatch(size, drop_remainder=drop)
        else:
            dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
            dataset = dataset.map(self._assemble)
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(_untuned())

    def _flatten(self, rows: DecodedRows) -> Iterator[np.ndarray]:
        for column in self._shape.columns:
            value = rows.array(column.name)
            yield from value if isinstance(value, RaggedList) else (value,)

    def _signature(self) -> tuple[tf.TensorSpec, ...]:
        specs = []
        for column in self._shape.columns:
            dtype = tf.string if column.spec.dtype == "bytes" else tf.as_dtype(column.spec.dtype)
            if column.is_dense and column.length is not None:
                length = None if column.name in self._shape.cut else column.length
                specs.append(tf.TensorSpec([None, length], dtype))
            else:
                specs.append(tf.TensorSpec([None], dtype))
            if not column.is_dense and column.wire.is_list:
                specs.append(tf.TensorSpec([None], tf.int64))
        return tuple(specs)

    def _assemble(self, *tensors: tf.Tensor) -> Batch:
        batch: Batch = {}
        rows = self._shape.batch_size if self._shape.drop_remainder else None
        left = iter(tensors)
        for column in self._shape.columns:
            value: Any = next(left)
            if not column.is_dense and column.wire.is_list:
                value = tf.RaggedTensor.from_row_splits(value, next(left), validate=False)
                if not column.is_ragged:
                    value = value.to_tensor(column.pad, shape=[None, column.length])
            if isinstance(value, tf.Tensor):
                value = tf.ensure_shape(value, [rows, *value.shape[1:]])
            batch[column.name] = value
        for ids, weights in self._shape.sparse.items():
            size = next(c.spec.vocabulary_size for c in self._shape.columns if c.name == ids)
            batch[ids] = build_sparse(batch[ids], batch.pop(weights), int(size or 0))
        return batch


def tell_non_finite(features: Features) -> str:
    """Names features with NaN or infinity, to follow what an error received; empty: none has."""
    odd = [name for name, value in features.items() if not _is_finite(value)]
    return f"; NaN or infinity in {', '.join(odd)}" if odd else ""


def _is_finite(value: Any) -> bool:
    found = getattr(value, "values", getattr(value, "flat_values", value))
    numbers = np.asarray(found)
    return numbers.dtype.kind != "f" or bool(np.isfinite(numbers).all())


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


def mask_unlabelled(labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns labels, 0 where a row lacks its own (NaN), and which rows have one; same shape."""
    is_known = ~tf.math.is_nan(labels)
    return tf.where(is_known, labels, tf.zeros_like(labels)), is_known


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
    plan = plan_shuffled(source, specs, seed, drop_remainder=True)
    return BatchLayout(plan.shape).build_dataset(lambda: plan.read(epoch, start_batch))


def build_eval_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    split: str,
    batch_size: int,
    features: _Select = None,
    ragged: Sequence[str] = (),
    evaluation_filter: tuple[FilterConfig, ...] = (),
    on_corrupt: OnCorrupt = "fail",
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
        evaluation_filter: What rows must pass; others are left out.
        on_corrupt: What becomes of damaged records of train.

    Raises:
        InputDataError: The version has no such split, or a feature is unknown.
        ConfigError: A value of `evaluation_filter` is not of its feature's type.
    """
    config = InputConfig(batch_size=batch_size, on_corrupt=on_corrupt)
    options = InputOptions(evaluation_filter=evaluation_filter)
    source = SplitSource(version_dir, manifest, split, config, options)
    return _build_ordered(source, features or split_features(manifest, split), ragged)


def build_held_out_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    config: InputConfig,
    batch_size: int,
    features: _Select = None,
    ragged: Sequence[str] = (),
    evaluation_filter: tuple[FilterConfig, ...] = (),
    binary_labels: tuple[str, ...] = (),
) -> tf.data.Dataset:
    """Returns the rows of train that `config.validation` keeps apart, in the manifest's order.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        config: The input's config.
        batch_size: Rows per batch; the last batch may have fewer.
        features: Names to read; None reads all.
        ragged: As for `build_eval_dataset`.
        evaluation_filter: As for `build_eval_dataset`.
        binary_labels: Features whose values must be 0 or 1.

    Raises:
        ConfigError: Nothing is held out.
        InputDataError: A feature is unknown.
    """
    if config.validation is None:
        raise ConfigError(
            "no rows of train are held out", fix="set input.validation.hash_of and .share"
        )
    own = config.model_copy(update={"batch_size": batch_size, "mix": ()})
    options = InputOptions(binary_labels, evaluation_filter=evaluation_filter)
    source = SplitSource(version_dir, manifest, "train", own, options, is_held_out=True)
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
    plan = plan_ordered(source, columns, drop_remainder=False)
    return BatchLayout(plan.shape).build_dataset(plan.read)
