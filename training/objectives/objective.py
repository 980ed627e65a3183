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
from conf.training.objectives import BinaryConfig
from training.input.batches import Batch, mask_unlabelled
from training.models.model import Model
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel, score_rows
from training.networks.network import TrainingPass
from training.objectives.item_losses import RowLoss, build_user_loss
from training.objectives.item_objectives import build_item_objective
from training.objectives.trial import try_user_code
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
    """Loss of each row of a task, float32 `[batch]`: `binary` cross-entropy or `squared_error`."""
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
        """Returns the loss of each row of this replica's part of the batch, `[local_batch]`."""
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
        loss: A user's formula in its place, or None.
        may_lack: Whether rows may lack the label (NaN): they weigh 0.
    """

    def __init__(self, label: str, loss: RowLoss | None = None, may_lack: bool = False) -> None:
        self.inputs: tuple[str, ...] = (label,)
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
        users, items = model.embed_users(batch, training), model.embed_items(batch, training)
        labels, temperature = batch[self._label], model.temperature
        if self._loss is not None:
            return self._loss(labels, score_rows(users, items) / temperature)
        return compute_binary_loss(users, items, labels, temperature=temperature)


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
        losses: Users' formulas, by task.
        may_lack: Labels that rows may lack (NaN): they weigh 0 in their task, as `Weighted` has it.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        losses: Mapping[str, RowLoss] | None = None,
        may_lack: Collection[str] = (),
    ) -> None:
        self._tasks, self._losses = tuple(tasks), dict(losses or {})
        self._may_lack = frozenset(may_lack)
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys(task.label for task in tasks))
        self.binary_labels = tuple(task.label for task in tasks if task.is_binary)

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
        return own(batch[task.label], logits)


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
    source: InputConfig | None = None,
) -> Objective:
    """Builds the objective that a model's config asks for, and tries the user code in both.

    Rows with weights weigh the loss. Call it under the strategy's scope.

    Args:
        config: The model's config.
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        model: The model.
        batch_size: Rows that are ranked together: those of a step over all replicas, or of one
            of its parts where gradients are accumulated.
        source: How the train split is read; None: all rows.
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
