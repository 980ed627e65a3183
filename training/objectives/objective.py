"""Objectives: the loss of a batch, per row, given the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FeatureSpec
from conf.training.models import ModelConfig, RankingConfig, SampledSoftmaxConfig
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import read_keys
from training.input.batches import Batch
from training.models.model import Model
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel
from training.networks.network import TrainingPass
from training.objectives.item_catalog import ItemFeatures, read_drawable_items, read_item_counts
from training.objectives.sampled_softmax import (
    SoftmaxCandidates,
    compute_log_expected_counts,
    compute_sampled_softmax,
    draw_uniform_items,
    gather_replicas,
    replica_offset,
)


def compute_binary_loss(
    user_vectors: tf.Tensor,
    item_vectors: tf.Tensor,
    labels: tf.Tensor,
    *,
    temperature: float = 1.0,
) -> tf.Tensor:
    """Cross-entropy of `sigmoid(<u_i, v_i> / temperature)` against the label.

    Args:
        user_vectors: float32 `[batch, dim]`.
        item_vectors: float32 `[batch, dim]`.
        labels: `[batch]`, each in `[0, 1]`.
        temperature: Above 0.

    Returns:
        float32 `[batch]`.
    """
    logits = tf.reduce_sum(user_vectors * item_vectors, axis=1) / temperature
    return tf.nn.sigmoid_cross_entropy_with_logits(
        labels=tf.cast(labels, logits.dtype), logits=logits
    )


def compute_task_loss(kind: str, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Loss of each row of a task.

    Args:
        kind: `binary`: sigmoid cross-entropy; `squared_error`.
        logits: float32 `[batch]`.
        labels: `[batch]`; of binary tasks in `[0, 1]`.

    Returns:
        float32 `[batch]`.
    """
    labels = tf.cast(tf.reshape(labels, tf.shape(logits)), logits.dtype)
    if kind == "squared_error":
        return tf.square(logits - labels)
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)


NEGATIVES_STREAM = 1
DROPOUT_STREAM = 2


class Objective(Protocol):
    """Loss of a batch.

    Attributes:
        inputs: Features that it reads beside the model's own.
        binary_labels: Those of them whose values must be 0 or 1.
    """

    inputs: tuple[str, ...]
    binary_labels: tuple[str, ...]

    def __call__(self, model: Any, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row of this replica's part of the batch, `[local_batch]`.

        Args:
            model: The model in training, of the kind that the objective is for.
            batch: This replica's rows.
            training: The pass; its seed is another one for each step.
        """
        ...


class SampledSoftmax:
    """Softmax over the items of the global batch and, if asked for, uniform negatives.

    Args:
        config: Which corrections are on.
        item_key: Name of the item id.
        log_expected_counts: float32 `[vocabulary_size]`, or None without logQ correction.
        items: Features of catalogue items; needed for uniform negatives.
        drawable: int64 `[items]`, ids that uniform negatives are drawn from; needed for them.
    """

    def __init__(
        self,
        config: SampledSoftmaxConfig,
        item_key: str,
        log_expected_counts: tf.Tensor | None,
        items: ItemFeatures | None,
        drawable: tf.Tensor | None = None,
    ) -> None:
        self.inputs: tuple[str, ...] = (item_key,)
        self.binary_labels: tuple[str, ...] = ()
        self._config = config
        self._item_key = item_key
        self._log_expected_counts = log_expected_counts
        self._items = items
        self._drawable = drawable

    def __call__(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        queries = model.embed_queries(batch, self._item_key, training)
        item_vectors = model.embed_items(batch, training)
        ids = read_keys(batch, self._item_key)
        local_batch = tf.shape(ids)[0]
        positions = tf.range(local_batch) + replica_offset(local_batch)
        # Every replica ranks its rows among the whole batch's items: R replicas, same loss.
        candidate_ids = gather_replicas(ids)
        vectors = gather_replicas(item_vectors)
        if self._items is not None and self._config.uniform_negatives is not None:
            drawn = draw_uniform_items(
                self._config.uniform_negatives,
                self._drawable,
                training.seed + tf.constant([0, NEGATIVES_STREAM], training.seed.dtype),
            )
            # The same negatives on every replica; each adds the gradient of its own rows.
            with training.drawing_from(DROPOUT_STREAM):
                negatives = model.embed_items(self._items.lookup(drawn), training)
            vectors = tf.concat([vectors, negatives], axis=0)
            candidate_ids = tf.concat([candidate_ids, drawn], axis=0)
        log_counts = None
        if self._log_expected_counts is not None:
            log_counts = tf.gather(self._log_expected_counts, candidate_ids)
        losses = compute_sampled_softmax(
            queries.vectors,
            SoftmaxCandidates(vectors, candidate_ids, log_counts),
            positions,
            temperature=model.temperature,
            mask_accidental_hits=self._config.mask_accidental_hits,
        )
        return queries.sum_losses(losses)


class BinaryCrossEntropy:
    """Sigmoid cross-entropy on the label.

    Args:
        label: Name of the label feature.
    """

    def __init__(self, label: str) -> None:
        self.inputs: tuple[str, ...] = (label,)
        self.binary_labels: tuple[str, ...] = (label,)
        self._label = label

    def __call__(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        return compute_binary_loss(
            model.embed_users(batch, training),
            model.embed_items(batch, training),
            batch[self._label],
            temperature=model.temperature,
        )


class TaskLosses:
    """Sum of the losses of a ranking model's tasks, each by its weight.

    Args:
        tasks: The tasks.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys(task.label for task in tasks))
        self.binary_labels = tuple(task.label for task in tasks if task.is_binary)
        self._tasks = tuple(tasks)

    def __call__(self, model: RankingModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        logits = model.compute_logits(batch, training)
        losses = [
            task.weight * compute_task_loss(task.kind, logits[task.name], batch[task.label])
            for task in self._tasks
        ]
        return tf.add_n(losses)


class Weighted:
    """Another objective, each row's loss multiplied by the row's weight.

    The step divides the sum by the number of rows, not by the sum of weights: a weight of 2 is as
    good as the row twice, and weights that are 1 in the mean leave the learning rate as it is.

    Args:
        objective: Loss of each row.
        weight: Name of the feature that holds the weights.
    """

    def __init__(self, objective: Objective, weight: str) -> None:
        self.inputs: tuple[str, ...] = (*objective.inputs, weight)
        self.binary_labels = objective.binary_labels
        self._objective = objective
        self._weight = weight

    def __call__(self, model: Any, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the weighted loss of each row, `[local_batch]`."""
        losses = self._objective(model, batch, training)
        return losses * tf.cast(tf.reshape(batch[self._weight], tf.shape(losses)), losses.dtype)


def build_objective(
    config: ModelConfig,
    version_dir: ReadablePath,
    manifest: Manifest,
    model: Model,
    batch_size: int,
) -> Objective:
    """Builds the objective that a model's config asks for, weighted where rows have weights.

    Args:
        config: The model's config.
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        model: The model, for the item features that it reads.
        batch_size: Rows that are ranked together: those of a step over all replicas, or of one
            of its parts where gradients are accumulated.

    Raises:
        ConfigError: A binary objective on a dataset without label, a softmax over items on one
            without items or with drawn negatives, or uniform negatives where no item is left.
    """
    built: Objective
    if isinstance(model, RankingModel):
        built = TaskLosses(model.tasks)
    elif isinstance(model, RetrievalModel):
        built = _build_retrieval(config, version_dir, manifest, model, batch_size)
    else:
        raise TypeError(f"no objective is known for a {type(model).__name__}")
    weight = _find_weight(manifest)
    return built if weight is None else Weighted(built, weight)


def _build_retrieval(
    config: ModelConfig,
    version_dir: ReadablePath,
    manifest: Manifest,
    model: RetrievalModel,
    batch_size: int,
) -> Objective:
    if isinstance(config, RankingConfig):
        raise TypeError("a ranking model has no users and items to compare")
    objective = config.objective
    if isinstance(objective, SampledSoftmaxConfig):
        return _build_softmax(objective, version_dir, manifest, model, batch_size)
    if manifest.keys.label is None:
        raise ConfigError(
            "a binary objective needs a label, and the dataset has none",
            received="model.objective.kind = binary",
            allowed="sampled_softmax, or a dataset with keys.label",
            fix="set model.objective.kind=sampled_softmax, or declare `label` in the build",
        )
    return BinaryCrossEntropy(manifest.keys.label)


def _build_softmax(
    config: SampledSoftmaxConfig,
    version_dir: ReadablePath,
    manifest: Manifest,
    model: RetrievalModel,
    batch_size: int,
) -> SampledSoftmax:
    item = manifest.require_key("item")
    _refuse_drawn_negatives(manifest)
    _refuse_keyed_items(config, manifest.schema[item], model)
    items = drawable = log_counts = None
    if config.uniform_negatives is not None:
        items = ItemFeatures(version_dir, manifest, model.item_inputs)
        drawable = read_drawable_items(version_dir, manifest)
    if config.logq_correction:
        counts = read_item_counts(version_dir, manifest)
        log_counts = tf.constant(
            compute_log_expected_counts(counts, batch_size, config.uniform_negatives, drawable)
        )
    return SampledSoftmax(
        config, item, log_counts, items, None if drawable is None else tf.constant(drawable)
    )


def _find_weight(manifest: Manifest) -> str | None:
    """Name of the feature that rows are weighted by, or None."""
    if manifest.keys.weight is not None:
        return manifest.keys.weight
    names = [spec.name for spec in manifest.schema.features if spec.role == "weight"]
    return names[0] if names else None


def _refuse_drawn_negatives(manifest: Manifest) -> None:
    """To a softmax over items each row is a positive: drawn negatives would be taught as such."""
    drawn = manifest.counts.drawn.get("train", 0)
    if drawn:
        raise ConfigError(
            "a softmax over items takes its negatives from the batch, and the dataset has drawn "
            "ones, which it would take for positives",
            received=f"{drawn:,} drawn negatives in the train split",
            allowed="model.objective.kind = binary, or a dataset without drawn negatives",
            fix="set model.objective.kind=binary, or build without `negatives`",
        )


def _refuse_keyed_items(
    config: SampledSoftmaxConfig, item: FeatureSpec, model: RetrievalModel
) -> None:
    """Refuses a softmax that needs a vocabulary where items are keys.

    Args:
        config: The objective's config.
        item: The item's id.
        model: The model.

    Raises:
        ConfigError: Items that no vocabulary counts shall be corrected by their counts, or items
            be drawn whose rows the step does not know.
    """
    if config.logq_correction and item.vocabulary_size is None:
        raise ConfigError(
            "the logQ correction needs the counts of a vocabulary, and the item's id has none",
            received=f"model.objective.logq_correction = true, {item.name}: {item.encoding}",
            fix="set model.objective.logq_correction=false, or encode the item's id by a "
            "vocabulary and embed its key beside it",
        )
    keyed = [
        name
        for name in model.item_inputs
        if isinstance(model.embedded_features.get(name), DynamicTable)
    ]
    if keyed and config.uniform_negatives is not None:
        raise ConfigError(
            "uniform negatives are drawn inside the step, and keys of dynamic tables get their "
            "rows before it",
            received=", ".join(keyed),
            fix="set model.objective.uniform_negatives=null, or embed items by vocabularies",
        )
