"""Objectives: the loss of a batch, per row, given the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.input import InputConfig
from conf.training.models import ModelConfig, RankingConfig
from conf.training.objectives import BinaryConfig, DrawnNegativesConfig, SoftmaxConfig
from training.input.batches import Batch, mask_unlabelled
from training.models.model import Model
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel, score_rows
from training.networks.network import TrainingPass
from training.networks.probabilities import find_bounded, refuse_probabilities
from training.objectives.item_objectives import build_item_objective
from training.objectives.loss_trial import check_loss
from training.objectives.network_trial import check_networks
from training.objectives.own_loss import OwnLoss, build_item_loss, build_label_loss
from training.objectives.softmax_memory import (
    SoftmaxMemory,
    count_item_tower,
    estimate_softmax_memory,
    require_softmax_memory,
)
from training.objectives.user_items import TrainRows


def compute_binary_loss(
    user_vectors: tf.Tensor,
    item_vectors: tf.Tensor,
    labels: tf.Tensor,
    *,
    temperature: float = 1.0,
) -> tf.Tensor:
    """Cross-entropy of `sigmoid(<u_i, v_i> / temperature)` against the label, see `score_rows`.

    Args:
        user_vectors: float32 `[batch, dim]` or `[batch, interests, dim]`.
        item_vectors: float32 `[batch, dim]`.
        labels: `[batch]`, each in `[0, 1]`.
        temperature: Above 0.

    Returns:
        float32 `[batch]`.
    """
    logits = score_rows(user_vectors, item_vectors) / temperature
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


class Objective(Protocol):
    """Loss of a batch.

    Attributes:
        inputs: Features that it reads beside the model's own.
        binary_labels: Those of them whose values must be 0 or 1.
        state_variables: What its passes set, such as counts of items; none if left out.
        notes: What to tell those who train; nothing if left out.
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


def list_state(objective: Any) -> tuple[tf.Variable, ...]:
    """Returns the variables that an objective's passes set."""
    return tuple(getattr(objective, "state_variables", ()))


def list_notes(objective: Any) -> tuple[str, ...]:
    """Returns what an objective tells those who train."""
    return tuple(getattr(objective, "notes", ()))


class BinaryCrossEntropy:
    """Sigmoid cross-entropy on the label.

    Args:
        label: Name of the label feature.
        loss: A formula of one's own in its place, or None.
        may_lack: Whether rows may lack the label (NaN): they weigh 0.
    """

    def __init__(self, label: str, loss: OwnLoss | None = None, may_lack: bool = False) -> None:
        beside = () if loss is None else loss.inputs
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys((label, *beside)))
        self.binary_labels: tuple[str, ...] = (label,)
        self._label, self._loss, self._may_lack = label, loss, may_lack

    def __call__(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        if self._may_lack:
            return compute_where_known(
                lambda labelled: self._compute(model, labelled, training), batch, self._label
            )
        return self._compute(model, batch, training)

    def _compute(self, model: RetrievalModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        if self._loss is not None:
            users = model.embed_users(batch, training)
            logits = score_rows(users, model.embed_items(batch, training))
            return self._loss(batch[self._label], logits / model.temperature, batch=batch)
        return compute_binary_loss(
            model.embed_users(batch, training),
            model.embed_items(batch, training),
            batch[self._label],
            temperature=model.temperature,
        )


def compute_where_known(
    compute: Callable[[Batch], tf.Tensor], batch: Batch, label: str
) -> tf.Tensor:
    """Returns losses of rows, 0 where a row lacks the label: it weighs nothing."""
    labels, is_known = mask_unlabelled(batch[label])
    losses = compute({**batch, label: labels})
    return tf.where(tf.reshape(is_known, tf.shape(losses)), losses, tf.zeros_like(losses))


class TaskLosses:
    """Sum of the losses of a ranking model's tasks, each by its weight.

    Args:
        tasks: The tasks.
        notes: What to tell those who train.
        losses: Formulas of one's own, by task.
        may_lack: Labels that rows may lack (NaN): they weigh 0 in their task, as `Weighted` has it.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        notes: Sequence[str] = (),
        losses: Mapping[str, OwnLoss] | None = None,
        may_lack: Collection[str] = (),
    ) -> None:
        self.notes, self._losses = tuple(notes), dict(losses or {})
        self._may_lack = frozenset(may_lack)
        labels = [task.label for task in tasks]
        beside = [name for loss in self._losses.values() for name in loss.inputs]
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys((*labels, *beside)))
        self.binary_labels = tuple(task.label for task in tasks if task.is_binary)
        self._tasks = tuple(tasks)

    def __call__(self, model: RankingModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        logits = model.compute_logits(batch, training)
        losses = [task.weight * self._weigh(task, logits[task.name], batch) for task in self._tasks]
        return tf.add_n(losses)

    def _weigh(self, task: Task, logits: tf.Tensor, batch: Batch) -> tf.Tensor:
        if task.label not in self._may_lack:
            return self._compute(task, logits, batch)
        return compute_where_known(
            lambda labelled: self._compute(task, logits, labelled), batch, task.label
        )

    def _compute(self, task: Task, logits: tf.Tensor, batch: Batch) -> tf.Tensor:
        own = self._losses.get(task.name)
        if own is None:
            return compute_task_loss(task.kind, logits, batch[task.label])
        return own(batch[task.label], logits, batch=batch)


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
        self.state_variables, self.notes = list_state(objective), list_notes(objective)
        self._objective = objective
        self._weight = weight

    def __call__(self, model: Any, batch: Batch, training: TrainingPass) -> tf.Tensor:
        """Returns the weighted loss of each row, `[local_batch]`."""
        losses = self._objective(model, batch, training)
        return losses * tf.cast(tf.reshape(batch[self._weight], tf.shape(losses)), losses.dtype)


def plan_memory(config: ModelConfig, manifest: Manifest, rows: int) -> SoftmaxMemory | None:
    """Returns what a softmax over the catalogue takes; None: the objective is another one.

    That is before the model is built, so its item tower is not counted: see `complete_memory`.

    Args:
        config: The model's config.
        manifest: The dataset version.
        rows: Rows that are ranked together.

    Raises:
        ConfigError: It takes more than is free.
    """
    memory = estimate_softmax_memory(config, manifest, rows)
    require_softmax_memory(memory)
    return memory


def complete_memory(
    memory: SoftmaxMemory | None, model: Model, manifest: Manifest
) -> SoftmaxMemory | None:
    """Returns what a softmax over the catalogue takes, the item tower of the model included.

    Args:
        memory: What `plan_memory` has returned.
        model: The model.
        manifest: The dataset version.

    Raises:
        ConfigError: It takes more than was free before the model was built.
    """
    complete = None if memory is None else count_item_tower(memory, model, manifest)
    require_softmax_memory(complete)
    return complete


def build_objective(
    config: ModelConfig,
    version_dir: ReadablePath,
    manifest: Manifest,
    model: Model,
    batch_size: int,
    source: InputConfig | None = None,
) -> Objective:
    """Builds the objective that a model's config asks for, weighted where rows have weights.

    Call it under the strategy's scope.

    Args:
        config: The model's config.
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        model: The model, for the item features that it reads.
        batch_size: Rows that are ranked together: those of a step over all replicas, or of one
            of its parts where gradients are accumulated.
        source: How the train split is read; None: all rows.

    Raises:
        ConfigError: The objective is not for this dataset or model.
        InputDataError: The dataset is damaged, or has too few items.
    """
    train = TrainRows(version_dir, manifest, batch_size, source)
    check_networks(config, model, train)
    built: Objective
    if isinstance(model, RankingModel):
        losses = _build_task_losses(config, train, model.tasks)
        labels = [manifest.schema[task.label] for task in model.tasks]
        may_lack = [label.name for label in labels if manifest.may_lack(label)]
        built = TaskLosses(model.tasks, _check_logits(config, model), losses, may_lack)
    elif isinstance(model, RetrievalModel):
        built = _build_retrieval(config, train, model)
    else:
        raise TypeError(f"no objective is known for a {type(model).__name__}")
    weight = manifest.find_weight()
    return built if weight is None else Weighted(built, weight)


def _build_task_losses(
    config: ModelConfig, train: TrainRows, tasks: Sequence[Task]
) -> dict[str, OwnLoss]:
    """Returns the losses of one's own by task, each tried on rows of train."""
    asked = config.tasks if isinstance(config, RankingConfig) else {}
    found = {}
    for task in tasks:
        own = asked[task.name].objective.loss if task.name in asked else None
        if own is not None:
            loss = build_label_loss(own, f"model.tasks.{task.name}.objective.loss")
            check_loss(loss, train, label=task.label)
            found[task.name] = loss
    return found


def _check_logits(config: ModelConfig, model: RankingModel) -> list[str]:
    """Refuses a network of one's own that gives probabilities; notes what looks like them."""
    if not isinstance(config, RankingConfig) or ":" not in config.network:
        return []
    binary = [task.name for task in model.tasks if task.is_binary]
    refuse_probabilities(config.network, model.network, binary)
    return [
        f"warning: whatever network {config.network} reads, its output of task {task} lies "
        "between 0 and 1, like a probability; Sluice applies the sigmoid itself: return logits"
        for task in find_bounded(model.network, binary)
    ]


def _build_retrieval(config: ModelConfig, train: TrainRows, model: RetrievalModel) -> Objective:
    if isinstance(config, RankingConfig):
        raise TypeError("a ranking model has no users and items to compare")
    objective = config.objective
    if not isinstance(objective, BinaryConfig) or not objective.reads_label:
        if not isinstance(objective, SoftmaxConfig) and (own := build_item_loss(objective.loss)):
            negatives = objective.negatives or DrawnNegativesConfig()
            compared = negatives.count_compared(train.batch_size)
            check_loss(own, train, compared=compared)
        return build_item_objective(objective, train, model)
    if train.manifest.keys.label is None:
        raise ConfigError(
            "a binary objective needs a label, and the dataset has none",
            received="model.objective.kind = binary",
            allowed="a dataset with keys.label, negatives to draw, or another kind",
            fix="set model.objective.negatives={source: uniform, count: 4}, or declare `label` in "
            "the build",
        )
    label, own = train.manifest.keys.label, None
    if objective.loss is not None:
        own = build_label_loss(objective.loss, "model.objective.loss")
        check_loss(own, train, label=label)
    return BinaryCrossEntropy(label, own, train.manifest.may_lack(train.manifest.schema[label]))
