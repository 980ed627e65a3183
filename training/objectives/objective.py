"""Objectives: the loss of a batch, per row, given the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.training.input import InputConfig
from conf.training.models import ModelConfig, RankingConfig
from conf.training.objectives import BinaryConfig
from training.input.batches import Batch
from training.models.model import Model
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel, score_rows
from training.networks.network import StepContext
from training.objectives.item_losses import RowLoss, build_user_loss
from training.objectives.item_objectives import build_item_objective
from training.objectives.trial import try_user_code
from training.objectives.user_items import TrainRows


def compute_binary_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Sigmoid cross-entropy of rows, float32 `[batch]`; labels in `[0, 1]`."""
    labels = tf.cast(tf.reshape(labels, tf.shape(logits)), logits.dtype)
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)


def compute_squared_error(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Squared difference of rows, float32 `[batch]`."""
    return tf.square(logits - tf.cast(tf.reshape(labels, tf.shape(logits)), logits.dtype))


LABEL_LOSSES: Mapping[str, RowLoss] = {
    "binary": compute_binary_loss,
    "squared_error": compute_squared_error,
}


class Objective(Protocol):
    """Loss of a batch; it may have `state_variables`, which passes set, and `notes` to tell."""

    inputs: tuple[str, ...]  # Features that it reads beside the model's own.
    binary_labels: tuple[str, ...]  # Those of them whose values must be 0 or 1.

    def __call__(self, model: Any, batch: Batch, training: StepContext) -> tf.Tensor:
        """Returns the loss of each row of this replica's part of the batch, `[local_batch]`."""
        ...


def list_state(objective: Any) -> tuple[tf.Variable, ...]:
    """Returns the variables that an objective's passes set."""
    return tuple(getattr(objective, "state_variables", ()))


def list_notes(objective: Any) -> tuple[str, ...]:
    """Returns what an objective tells those who train."""
    return tuple(getattr(objective, "notes", ()))


def compute_where_known(loss: RowLoss, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns losses of rows, 0 where a row lacks the label (NaN): it weighs nothing."""
    is_known = ~tf.math.is_nan(labels)
    losses = loss(tf.where(is_known, labels, tf.zeros_like(labels)), logits)
    return tf.where(tf.reshape(is_known, tf.shape(losses)), losses, tf.zeros_like(losses))


class BinaryCrossEntropy:
    """Sigmoid cross-entropy of a label by `score_rows`, or a user's formula in its place."""

    def __init__(self, label: str, loss: RowLoss | None = None, may_lack: bool = False) -> None:
        self.inputs: tuple[str, ...] = (label,)
        self.binary_labels: tuple[str, ...] = (label,)
        loss = loss or compute_binary_loss
        self._loss = partial(compute_where_known, loss) if may_lack else loss

    def __call__(self, model: RetrievalModel, batch: Batch, training: StepContext) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        users, items = model.embed_users(batch, training), model.embed_items(batch, training)
        return self._loss(batch[self.inputs[0]], score_rows(users, items) / model.temperature)


class TaskLosses:
    """Sum of the losses of a ranking model's tasks, each by its weight; users' formulas by task."""

    def __init__(
        self,
        tasks: Sequence[Task],
        losses: Mapping[str, RowLoss] | None = None,
        may_lack: Collection[str] = (),
    ) -> None:
        own, self._tasks = dict(losses or {}), tuple(tasks)
        each = {task.name: own.get(task.name) or LABEL_LOSSES[task.kind] for task in tasks}
        lacking = {task.name for task in tasks if task.label in may_lack}
        self._losses = {
            name: partial(compute_where_known, loss) if name in lacking else loss
            for name, loss in each.items()
        }
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys(task.label for task in tasks))
        self.binary_labels = tuple(task.label for task in tasks if task.is_binary)

    def __call__(self, model: RankingModel, batch: Batch, training: StepContext) -> tf.Tensor:
        """Returns the loss of each row, `[local_batch]`."""
        logits = model.compute_logits(batch, training)
        losses = [
            task.weight * self._losses[task.name](batch[task.label], logits[task.name])
            for task in self._tasks
        ]
        return tf.add_n(losses)


class Weighted:
    """Another objective, each row's loss multiplied by the row's weight, a feature.

    The step divides the sum by the number of rows, not by the sum of weights: a weight of 2 is as
    good as the row twice, and weights that are 1 in the mean leave the learning rate as it is.
    """

    def __init__(self, objective: Objective, weight: str) -> None:
        self.inputs: tuple[str, ...] = (*objective.inputs, weight)
        self.binary_labels = objective.binary_labels
        self.state_variables, self.notes = list_state(objective), list_notes(objective)
        self._objective, self._weight = objective, weight

    def __call__(self, model: Any, batch: Batch, training: StepContext) -> tf.Tensor:
        """Returns the weighted loss of each row, `[local_batch]`."""
        losses = self._objective(model, batch, training)
        return losses * tf.cast(tf.reshape(batch[self._weight], tf.shape(losses)), losses.dtype)


def build_objective(
    config: ModelConfig,
    version_dir: ReadablePath,
    manifest: Manifest,
    model: Model,
    batch_size: int,
    source: InputConfig | None = None,
) -> Objective:
    """Builds the objective that a model's config asks for, and tries the user code in both.

    Call it under the strategy's scope. The last arguments are those of `TrainRows`.
    """
    train = TrainRows(version_dir, manifest, batch_size, source)
    built: Objective
    if isinstance(model, RankingModel):
        built = _build_tasks(config, manifest, model)
    elif isinstance(model, RetrievalModel):
        built = _build_retrieval(config, train, model)
    else:
        raise TypeError(f"no objective is known for a {type(model).__name__}")
    weight = manifest.find_weight()
    built = built if weight is None else Weighted(built, weight)
    state = [*model.state_variables, *list_state(built)]
    try_user_code(config, model, built, state, train)
    return built


def _build_tasks(config: ModelConfig, manifest: Manifest, model: RankingModel) -> TaskLosses:
    asked = config.tasks if isinstance(config, RankingConfig) else {}
    own = {name: build_user_loss(task.objective.loss) for name, task in asked.items()}
    losses = {name: loss for name, loss in own.items() if loss is not None}
    labels = [manifest.schema[task.label] for task in model.tasks]
    return TaskLosses(model.tasks, losses, [s.name for s in labels if manifest.may_lack(s)])


def _build_retrieval(config: ModelConfig, train: TrainRows, model: RetrievalModel) -> Objective:
    if isinstance(config, RankingConfig):
        raise TypeError("a ranking model has no users and items to compare")
    objective, label = config.objective, train.manifest.keys.label
    if not isinstance(objective, BinaryConfig) or not objective.reads_label:
        return build_item_objective(objective, train, model)
    if label is None:
        raise ConfigError(
            "a binary objective needs a label, and the dataset has none",
            received="model.objective.kind = binary",
            fix="set model.objective.negatives={source: uniform, count: 4}, or declare `label` in "
            "the build",
        )
    may_lack = train.manifest.may_lack(train.manifest.schema[label])
    return BinaryCrossEntropy(label, build_user_loss(objective.loss), may_lack)
