"""Batches of a dataset version as a `tf.data.Dataset`: a training epoch, a split, held-out rows.

A batch is `dict[str, tf.Tensor]`: scalars `[batch]`, lists padded to `[batch, max_len]`, lists
without a bound as `tf.RaggedTensor`, ids with weights as `tf.SparseTensor`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import SluiceError
from conf.manifest import Manifest, bound_list
from conf.paths import ReadablePath
from conf.training.input import FilterConfig, InputConfig, OnCorrupt
from training.reader.batch_plan import Batches, BatchShape, bound_specs, build_config, check_number
from training.reader.feature_columns import select_features, split_features
from training.reader.rows import DecodedRows, RaggedList, regroup
from training.reader.shards import InputCounts, explain_error, warn_of_losses
from training.reader.training_data import InputOptions, SplitSource, build_size_error, open_version

Batch = dict[str, Any]
Features = Mapping[str, Any]
"""Features of rows by name: tensors, ragged or sparse ones."""
ARRIVALS = "arrivals"
SWAPS = "swaps"
"""Key of a batch whose value holds the rows of dynamic tables that are new in it."""
FINITE_ADVICE = (
    "leave these features out of the model, or build the dataset again with finite numbers in "
    "their place"
)
"""What helps where `tell_non_finite` names features."""

# Rows that are handed to TensorFlow at a time, where all columns have one size: a call costs
# some ten microseconds per column, which would be most of the time of a small batch.
SLAB_ROWS = 32768
_CARRIED: deque[tuple[str, SluiceError]] = deque(maxlen=64)


class CarriedError(RuntimeError):
    """Stands for an error of the input inside TensorFlow's runtime, which keeps its text alone."""


def carry(error: SluiceError) -> CarriedError:
    """Returns the error to raise inside a dataset in place of one of Sluice's own."""
    mark = f"sluice-input-error-{uuid.uuid4().hex}"
    _CARRIED.append((mark, error))
    return CarriedError(f"{mark}: {error}")


def find_carried(error: tf.errors.OpError) -> SluiceError | None:
    """Returns the error of the input that one of TensorFlow's runtime stands for, or None."""
    return next((own for mark, own in tuple(_CARRIED) if mark in error.message), None)


@contextmanager
def input_errors(version_dir: ReadablePath, manifest: Manifest, split: str) -> Iterator[None]:
    """Raises errors of datasets that are iterated inside as what they were before TensorFlow."""
    try:
        yield
    except tf.errors.OpError as error:
        carried = find_carried(error)
        if carried is None:
            raise
        explain_error(carried, version_dir, manifest, split)
        raise carried from error


@functools.cache
def close_iterators_at_exit() -> None:
    """Has iterators that are still open let go of before the interpreter finalizes.

    A finalizing interpreter stops each thread that wants to run Python, such as TensorFlow's that
    read ahead, and an iterator that is let go of after that waits for its thread for ever.
    """
    atexit.register(close_iterators)


def close_iterators() -> None:
    """Lets all iterators of this process go of what they read; none can be used any more."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, tf.data.Iterator)}
    for thing in things:
        if type(thing) in kinds:
            vars(thing).clear()


def build_dataset(shape: BatchShape, read: Callable[[], Iterator[DecodedRows]]) -> tf.data.Dataset:
    """Builds the dataset of batches; each of its iterators calls `read` for rows in parts."""
    close_iterators_at_exit()
    size, drop, is_uniform = shape.batch_size, shape.drop_remainder, shape.is_uniform
    most = max(1, SLAB_ROWS // size) * size if is_uniform else size

    names = [column.name for column in shape.columns]

    def pack(values: Iterator[Any]) -> Any:
        return dict(zip(names, values, strict=True)) if is_uniform else tuple(values)

    def generate() -> Iterator[Any]:
        try:
            for rows in regroup(read(), size, most, drop):
                yield pack(_flatten(shape, rows))
        except SluiceError as error:
            raise carry(error) from error

    dataset = tf.data.Dataset.from_generator(generate, output_signature=pack(_signature(shape)))
    if is_uniform:
        dataset = dataset.rebatch(size, drop_remainder=drop)
    else:
        dataset = dataset.map(functools.partial(_assemble, shape))
    options = tf.data.Options()
    # There is nothing to tune, and TensorFlow's tuning thread may sleep through its end: whoever
    # lets an iterator go waits for it. A prefetch still grows where it runs empty.
    options.autotune.enabled = False
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)


def _flatten(shape: BatchShape, rows: DecodedRows) -> Iterator[np.ndarray]:
    for column in shape.columns:
        value = rows.array(column.name)
        yield from value if isinstance(value, RaggedList) else (value,)


def _signature(shape: BatchShape) -> Iterator[tf.TensorSpec]:
    for column in shape.columns:
        dtype = tf.string if column.spec.dtype == "bytes" else tf.as_dtype(column.spec.dtype)
        width = (None,) if column.name in shape.cut else column.width
        yield tf.TensorSpec([None, *width], dtype)
        if not column.is_dense and column.wire.is_list:
            yield tf.TensorSpec([None], tf.int64)


def _assemble(shape: BatchShape, *tensors: tf.Tensor) -> Batch:
    batch: Batch = {}
    rows = shape.batch_size if shape.drop_remainder else None
    left = iter(tensors)
    for column in shape.columns:
        value: Any = next(left)
        if not column.is_dense and column.wire.is_list:
            value = tf.RaggedTensor.from_row_splits(value, next(left), validate=False)
            if not column.is_ragged:
                value = value.to_tensor(column.pad, shape=[None, column.length])
        if isinstance(value, tf.Tensor):
            value = tf.ensure_shape(value, [rows, *value.shape[1:]])
        batch[column.name] = value
    for ids, weights in shape.sparse.items():
        size = next(c.spec.vocabulary_size for c in shape.columns if c.name == ids)
        batch[ids] = build_sparse(batch[ids], batch.pop(weights), int(size or 0))
    return batch


def build_sparse(ids: tf.RaggedTensor, weights: tf.RaggedTensor, size: int) -> tf.SparseTensor:
    """Builds sparse rows `[batch, size]` as `tf.io.SparseFeature` does, in row-major order.

    Ids (int64, in [0, size)) and weights (float32) are as many in each row, `[batch, (len)]`; an id
    that a row holds twice is there twice.
    """
    same = tf.debugging.assert_equal(
        ids.row_splits, weights.row_splits, "as many weights as ids are needed in each row"
    )
    with tf.control_dependencies([same]):
        rows = ids.value_rowids()
    indices = tf.stack([rows, ids.values], axis=1)
    shape = tf.stack([ids.nrows(), tf.constant(size, tf.int64)])
    return tf.sparse.reorder(tf.SparseTensor(indices, weights.values, shape))


def tell_non_finite(features: Features) -> str:
    """Names features with NaN or infinity, to follow what an error received; empty: none has."""
    found = {n: getattr(v, "values", getattr(v, "flat_values", v)) for n, v in features.items()}
    numbers = {name: np.asarray(values) for name, values in found.items()}
    odd = [n for n, v in numbers.items() if v.dtype.kind == "f" and not np.isfinite(v).all()]
    return f"; NaN or infinity in {', '.join(odd)}" if odd else ""


def build_train_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    config: InputConfig,
    *,
    epoch: int,
    seed: int,
    features: Sequence[str] | None = None,
    start_batch: int = 0,
    options: InputOptions | None = None,
) -> tf.data.Dataset:
    """Returns one epoch of the train split, shuffled; the same for the same seed and epoch.

    The last, incomplete batch is dropped: an uneven tail would give its rows another weight when
    it is split over replicas. Lists are padded to `max_len`, or to the longest that the statistics
    count. From `start_batch` on it is, bit for bit, the tail of the whole epoch.
    """
    source = SplitSource(version_dir, manifest, "train", config, options or InputOptions())
    if (rows := manifest.split("train").rows) < config.batch_size:
        raise build_size_error(source, rows)
    if features is None:
        features = [spec.name for spec in manifest.schema.features if spec.role != "id"]
    specs = [bound_list(manifest, spec) for spec in select_features(manifest, features)]
    plan = Batches(source, specs, is_shuffled=True, seed=seed, drop_remainder=True).plan()
    return build_dataset(plan.shape, lambda: plan.read(epoch, start_batch))


def build_eval_dataset(
    version_dir: ReadablePath,
    manifest: Manifest,
    split: str,
    batch_size: int,
    features: Sequence[str] | None = None,
    ragged: Sequence[str] = (),
    evaluation_filter: tuple[FilterConfig, ...] = (),
    *,
    held_out: InputConfig | None = None,
    binary_labels: tuple[str, ...] = (),
    on_corrupt: OnCorrupt = "fail",
) -> tf.data.Dataset:
    """Returns a split in the manifest's order, the last batch included.

    Without `features`, all that the split's records hold are read. Features of `ragged` come as
    RaggedTensors: lists rather than padded, and scalars that records may lack, which have a row of
    length 0 there. Rows must pass `evaluation_filter`; of train and a config `held_out` they are
    those that its `validation` keeps apart. Labels of `binary_labels` must be 0 or 1.
    """
    config = held_out or InputConfig(on_corrupt=on_corrupt)
    passing = (*config.filter, *evaluation_filter)
    config = config.model_copy(update={"batch_size": batch_size, "filter": passing})
    options, is_held_out = InputOptions(binary_labels), held_out is not None
    source = SplitSource(version_dir, manifest, split, config, options, is_held_out)
    specs = select_features(manifest, features or split_features(manifest, split))
    plan = Batches(source, specs, ragged=tuple(ragged)).plan()
    return build_dataset(plan.shape, plan.read)


def read_split(
    version_dir: ReadablePath, manifest: Manifest, split: str, *how: Any, **options: Any
) -> Iterator[Batch]:
    """Yields batches of `build_eval_dataset`, with errors that name the shard or the feature."""
    with input_errors(version_dir, manifest, split):
        yield from build_eval_dataset(version_dir, manifest, split, *how, **options)


def open_dataset(
    version: str | Path,
    batch_size: int,
    split: str = "train",
    *,
    features: Sequence[str] | None = None,
    labels: str | Sequence[str] | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    first_epoch: int = 0,
    drop_remainder: bool = False,
    held_out: bool = False,
    worker: tuple[int, int] = (0, 1),
    **options: Any,
) -> tf.data.Dataset:
    """Opens a split of a dataset version for Keras' `fit`, `evaluate` and `predict`.

    An element is `(inputs, label)`, with the samples' weight as a third part where the dataset has
    one, and the inputs alone where the split has no label. Inputs are `dict[str, tf.Tensor]`:
    scalars `[batch]`, lists padded to `[batch, max_len]` (without `max_len`: to the longest list
    that the statistics count), other lists as `tf.RaggedTensor`. Several labels are a dictionary.

    An iterator gives one epoch. Each further iterator of the same dataset, or pass of `repeat()`,
    is the next epoch, shuffled anew: the same for the same seed and number. The cardinality is
    known where no option leaves rows out.

    Args:
        version: Directory or URI of a dataset (its current version), or of one version.
        batch_size: Rows per batch of this dataset.
        split: Name of the split.
        features: Inputs to read; None reads all but labels, the weight and those of role id. A
            Keras model that is made of a dictionary of inputs must be given exactly these.
        labels: Labels to read; None reads those of role label, `()` none.
        shuffle: As for `open_batches`, like `seed`, `held_out`, `options` and what is raised.
        first_epoch: Number of the first iterator's epoch, to go on where a run stopped.
        drop_remainder: Whether to drop rows at the end that fill no batch; shapes are static then,
            and all workers have the same number of batches.
        worker: Number of this worker and of all of them: each reads other rows.
    """
    check_number("worker", worker)
    rows = batch_size * worker[1]  # those of all workers
    config, is_shuffled = build_config(rows, options, split, shuffle, held_out)
    version_dir, manifest = open_version(version, config)
    inputs, targets, weight = _choose_elements(manifest, split, features, labels)
    own = InputOptions(worker=worker)
    source = SplitSource(version_dir, manifest, split, config, own, held_out)
    specs = bound_specs(manifest, (*inputs, *targets, *weight))
    batches = Batches(source, specs, is_shuffled, seed, drop_remainder)
    count, shape = batches.count(), batches.plan().shape

    def build(batch: Batch) -> Any:
        # Weights of sparse ids are part of the sparse tensor, which has the name of the ids.
        read = {name: batch[name] for name in inputs if name in batch}
        if not targets:
            return read
        wanted = {name: batch[name] for name in targets}
        label = wanted if len(wanted) > 1 else batch[targets[0]]
        return (read, label, *(batch[name] for name in weight))

    dataset = build_dataset(shape, _count_epochs(batches, first_epoch)).map(build)
    settings = tf.data.Options()
    # The workers' shares are cut here; TensorFlow would cut what each of them reads again.
    policy = tf.data.experimental.AutoShardPolicy.OFF
    settings.experimental_distribute.auto_shard_policy = policy
    dataset = dataset.with_options(settings)
    if count is None:
        return dataset
    return dataset.take(count).apply(tf.data.experimental.assert_cardinality(count))


def _choose_elements(
    manifest: Manifest,
    split: str,
    features: Sequence[str] | None,
    labels: str | Sequence[str] | None,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs, of the labels, and of the weight, if there are any."""
    specs = select_features(manifest, split_features(manifest, split))
    if labels is None:
        labels = [spec.name for spec in specs if spec.role == "label"]
    labels = (labels,) if isinstance(labels, str) else tuple(labels)
    weight = manifest.keys.weight
    if features is None:
        aside, roles = {*labels, weight}, ("id", "label", "weight")
        features = [s.name for s in specs if s.role not in roles and s.name not in aside]
    return tuple(features), labels, (weight,) if labels and weight is not None else ()


def _count_epochs(batches: Batches, first_epoch: int) -> Callable[[], Iterator[DecodedRows]]:
    """The function that reads the next epoch, and logs the damage that it met."""
    epochs, source = itertools.count(first_epoch), batches.source

    def read_next() -> Iterator[DecodedRows]:
        counts, epoch = InputCounts(), next(epochs)
        own = replace(batches, source=source.replacing(counts=counts))
        yield from own.plan().read(epoch)
        if source.config.on_corrupt != "fail":
            warn_of_losses(counts, source.split, epoch)

    return read_next
