"""A dataset version as a `tf.data.Dataset` that any Keras model trains on, without the trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.storage.locations import find_path
from training.input.batches import Batch, BatchLayout
from training.reader.batch_plan import (
    BatchRequest,
    RequestedBatches,
    build_source,
    request_batches,
)
from training.reader.damage import InputCounts, warn_of_losses
from training.reader.decoded_rows import DecodedRows
from training.reader.feature_columns import select_features, split_features


@dataclass(frozen=True)
class _Elements:
    """What an element of the dataset holds.

    Attributes:
        features: Names of the model's inputs.
        labels: Names of the labels; without them an element is the inputs alone.
        weight: Name of the samples' weight, if they have one.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """All features that are read."""
        weight = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((*self.features, *self.labels, *weight)))

    def build(self, batch: Batch) -> Any:
        """Builds `inputs`, `(inputs, labels)` or `(inputs, labels, weight)` of a batch."""
        # Weights of sparse ids are part of the sparse tensor, which has the name of the ids.
        inputs = {name: batch[name] for name in self.features if name in batch}
        if not self.labels:
            return inputs
        labels: Any = {name: batch[name] for name in self.labels}
        if len(labels) == 1:
            [labels] = labels.values()
        return (inputs, labels) if self.weight is None else (inputs, labels, batch[self.weight])


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
    is the next epoch, shuffled anew: the same for the same seed and number.

    Args:
        version: Directory or URI of a dataset (its current version), or of one version.
        batch_size: Rows per batch of this dataset.
        split: Name of the split.
        features: Inputs to read; None reads all but labels, the weight and those of role id. A
            Keras model that is made of a dictionary of inputs must be given exactly these.
        labels: Labels to read; None reads those of role label, `()` none.
        shuffle: Whether to draw rows in random order; None: those of train alone.
        seed: Seed of the order.
        first_epoch: Number of the first iterator's epoch, to go on where a run stopped.
        drop_remainder: Whether to drop rows at the end that fill no batch; shapes are static then,
            and all workers have the same number of batches.
        held_out: Whether to read the rows of train that `validation` keeps apart instead.
        worker: Number of this worker and of all of them: each reads other rows.
        options: Keys of the config's `input` section, such as `shuffle_buffer`, `filter`, `take`,
            `cache`, `on_corrupt`, `validation`.

    Returns:
        A finite dataset. Its cardinality is known where no option leaves rows out.

    Raises:
        ConfigError: An option is unknown or does not fit the dataset.
        InputDataError: There is no such split or feature, or the split does not fill a batch.
        UpstreamNotReadyError: There is no such dataset.
    """
    number, workers = worker
    if not 0 <= number < workers:
        raise ConfigError(
            "there is no such worker",
            received=f"worker={worker}",
            allowed="(number, workers) with 0 <= number < workers",
        )
    request = BatchRequest(split, shuffle, seed, drop_remainder, held_out)
    # The config counts the rows of all workers.
    config = request.build_config(batch_size * workers, options, "open_dataset")
    version_dir = resolve_version(find_path(version))
    manifest = read_manifest(version_dir, config.tolerates)
    elements = _choose_elements(manifest, split, features, labels)
    source = build_source(version_dir, manifest, config, request, worker)
    batches = request_batches(source, request, elements.names)
    count = batches.count()
    layout = BatchLayout(batches.plan().shape)
    dataset = layout.build_dataset(_count_epochs(batches, first_epoch))
    return _finish(dataset.map(elements.build), count)


def _choose_elements(
    manifest: Manifest,
    split: str,
    features: Sequence[str] | None,
    labels: str | Sequence[str] | None,
) -> _Elements:
    specs = select_features(manifest, split_features(manifest, split))
    if labels is None:
        labels = [spec.name for spec in specs if spec.role == "label"]
    labels = (labels,) if isinstance(labels, str) else tuple(labels)
    weight = manifest.keys.weight if labels else None
    if features is None:
        aside = {*labels, manifest.keys.weight}
        roles = ("id", "label", "weight")
        features = [s.name for s in specs if s.role not in roles and s.name not in aside]
    return _Elements(tuple(features), labels, weight)


def _count_epochs(
    batches: RequestedBatches, first_epoch: int
) -> Callable[[], Iterator[DecodedRows]]:
    """Returns the function that reads the next epoch, and logs the damage that it met."""
    epochs, source = itertools.count(first_epoch), batches.source

    def read_next() -> Iterator[DecodedRows]:
        counts, epoch = InputCounts(), next(epochs)
        yield from batches.plan(counts).read(epoch)
        if source.config.on_corrupt != "fail":
            warn_of_losses(counts, source.split, epoch)

    return read_next


def _finish(dataset: tf.data.Dataset, count: int | None) -> tf.data.Dataset:
    options = tf.data.Options()
    # The workers' shares are cut here; TensorFlow would cut what each of them reads again.
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    dataset = dataset.with_options(options)
    if count is None:
        return dataset
    return dataset.take(count).apply(tf.data.experimental.assert_cardinality(count))
