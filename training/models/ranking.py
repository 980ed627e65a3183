"""Ranking models: a score per task from every feature of a row."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list
from conf.schema import INPUT_ROLES, FeatureSpec
from conf.training.input import InputConfig
from conf.training.models import PoolingConfig, RankingConfig, TaskConfig
from training.input.batches import Features
from training.models.calibration import Calibration, find_keep_rate
from training.models.embedded_inputs import (
    BIAS_SUFFIX,
    MASK_SUFFIX,
    MEAN,
    EmbeddedInputs,
    InputFeature,
    build_keras_inputs,
)
from training.models.embedding_tables import TableBuilder, complete_pooling, list_weights
from training.models.model import Model
from training.networks.network import (
    Network,
    StepContext,
    build_keras_model,
    building_layers,
    call_in_groups,
    plan_groups,
)
from training.networks.registry import NETWORKS, NetworkKind, build_logits, find_network
from training.reader.feature_columns import find_feature, unknown_name


@dataclass(frozen=True)
class Task:
    """A score and the label, a feature, that it is learned from.

    Of kind `binary` the score is the log-odds of label 1, of `squared_error` the label itself.
    """

    name: str
    label: str
    kind: str
    weight: float

    @property
    def is_binary(self) -> bool:
        return self.kind == "binary"


class RankingModel(Model):
    """One score for each task, from everything in a row."""

    # By task, what its log-odds go through outside of training.
    calibrations: Mapping[str, Calibration] = MappingProxyType({})

    def __init__(self, name: str, tasks: tuple[Task, ...]) -> None:
        super().__init__(name=name)
        self.tasks = tasks

    @abstractmethod
    def compute_logits(
        self, features: Features, training: StepContext | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns what the model says of each task: log-odds, or the label's value; `[batch]`.

        Log-odds are calibrated, but for those that a training step learns by. Features, at least
        `inputs`, are scalars `[batch]`, or lists `[batch, length]` padded, ragged, or sparse.
        """

    @abstractmethod
    def compute_uncalibrated_logits(self, features: Features) -> dict[str, tf.Tensor]: ...

    def predict(self, features: Features) -> dict[str, tf.Tensor]:
        """Returns the score of each task, `[batch]`: a probability, or the label's value."""
        return self._finish(self.compute_logits(features))

    def _finish(self, logits: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {
            task.name: tf.sigmoid(logits[task.name]) if task.is_binary else logits[task.name]
            for task in self.tasks
        }


class NetworkRankingModel(RankingModel):
    """A network over the embedded features of a row; one score for each task."""

    left_out: tuple[str, ...]  # Features that the network does not read.

    def __init__(
        self, config: RankingConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
    ) -> None:
        super().__init__("ranking", plan_tasks(config, manifest))
        kind = find_network(config.network)
        specs = _find_features(config, manifest)
        builder = TableBuilder(config, manifest, specs, seed)
        keys = replace(manifest.keys, history=manifest.find_history())
        params = kind.complete_params(config.params, keys)
        positions = kind.find_position_lists(params)
        pooling = complete_pooling(config.pooling, manifest, {spec.name: spec for spec in specs})
        planned = [
            _plan_input(config, kind, builder, spec, pooling.get(spec.name, MEAN), positions)
            for spec in specs
        ]
        tensors = build_keras_inputs(planned)
        with building_layers(config.network, seed, dtype):
            base = find_base_scores(self.tasks, manifest)
            logits = build_logits(config.network, kind, tensors, params, base)
            self.network = Network(build_keras_model("network", tensors, logits))
        self._groups, self._mask = 1, ""
        if kind.is_grouped and not self.network.state_variables:  # Statistics are of all rows.
            history = bound_list(manifest, manifest.schema[positions[0]])
            self._groups, self._mask = plan_groups(manifest, history), history.name + MASK_SUFFIX
        features = _drop_unread(config, planned, self.network)
        kept = {feature.name for feature in features}
        self.left_out = tuple(feature.name for feature in planned if feature.name not in kept)
        names = ", ".join(self.left_out)
        self.notes = (f"network {config.network} does not read {names}: left out",) if names else ()
        self.tables = builder.build_tables(features)
        self._inputs = builder.build_inputs(features)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self._inputs.names

    def describe_inputs(self) -> dict[str, list[str]]:
        left_out = {"left_out": list(self.left_out)} if self.left_out else {}
        labels = [task.label for task in self.tasks]
        return {"row": list(self.inputs), "labels": labels, **left_out}

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        return (self._inputs,)

    @property
    def networks(self) -> Sequence[Network]:
        return (self.network,)

    def calibrate(self, calibrations: Mapping[str, Calibration]) -> None:
        """Sets what log-odds go through, by task; before anything is compiled of the model."""
        self.calibrations = MappingProxyType(dict(calibrations))

    def compute_logits(
        self, features: Features, training: StepContext | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns what the network says of each task; outside of training it is calibrated."""
        inputs = self._inputs(features, training)
        found = call_in_groups(self.network, inputs, training, self._mask, self._groups)
        logits = self._name_logits(found)
        return self._calibrate_logits(logits) if training is None else logits

    def compute_uncalibrated_logits(self, features: Features) -> dict[str, tf.Tensor]:
        return self._name_logits(self.network(self._inputs(features)))

    def predict_candidates(
        self, rows: Features, items: Features, shape: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        return self._finish(self.compute_candidate_logits(rows, items, shape))

    def compute_candidate_logits(
        self, rows: Features, items: Features, shape: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Returns logits of several items of each row, `[rows, items]`: `shape`.

        Features of rows are `[rows, …]`, those of their items flat: `[rows * items, …]`. What is
        read of a row alone is looked up and pooled once, not once per item.
        """
        count = shape[1]
        shared = [f for f in self._inputs.features if not set(f.reads) & set(items)]
        single = [f for f in self._inputs.features if f not in shared]
        beside = {name for feature in single for name in feature.reads} - set(items)
        pairs = {**items, **{name: tf.repeat(rows[name], count, axis=0) for name in beside}}
        inputs = self._inputs(rows, features=shared)
        inputs = {name: tf.repeat(value, count, axis=0) for name, value in inputs.items()}
        inputs |= self._inputs(pairs, features=single)
        logits = self._calibrate_logits(self._name_logits(self.network(inputs)))
        return {name: tf.reshape(value, shape) for name, value in logits.items()}

    def _name_logits(self, outputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {task.name: tf.squeeze(outputs[task.name], axis=1) for task in self.tasks}

    def _calibrate_logits(self, logits: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = self.calibrations
        return {n: found[n].apply(v) if n in found else v for n, v in logits.items()}


def undo_balance(model: Model, config: InputConfig, manifest: Manifest) -> list[str]:
    """Calibrates what a balance of classes does to log-odds, and returns what is not undone."""
    balance = config.class_balance
    if balance is None:
        return []
    if not isinstance(model, NetworkRankingModel):
        return [
            "input.class_balance is not undone of a retrieval model: where it gives probabilities, "
            "they, their log loss and their calibration are those of the rows that are drawn"
        ]
    binary = [task for task in model.tasks if task.is_binary]
    rates = {task.name: find_keep_rate(config, manifest, task.label) for task in binary}
    knots = {n: math.log(rate) for n, rate in rates.items() if rate is not None}
    model.calibrate({n: Calibration((0.0,), (knot,)) for n, knot in knots.items()})
    others = ", ".join(name for name, rate in rates.items() if rate is None)
    told = f"input.class_balance draws rows by {balance.feature}: probabilities of {others} are "
    fix = "those of balanced rows; model.calibration=isotonic fits them to the rows to validate on"
    return [told + fix] if others else []


def plan_tasks(config: RankingConfig, manifest: Manifest) -> tuple[Task, ...]:
    asked = dict(config.tasks)
    if not asked:
        label = manifest.keys.label
        if label is None:
            raise ConfigError(
                "a ranking model learns from labels, and the dataset has none",
                received="model.kind = ranking",
                fix="declare `label` in the build, or choose model.kind=retrieval",
            )
        asked = {label: TaskConfig()}
    labels = [spec.name for spec in manifest.schema.features if spec.role == "label"]
    tasks = []
    for name, task in asked.items():
        found = task.label or name
        if found not in labels:
            problem = f"model.tasks.{name} learns from a label that the dataset does not have"
            raise unknown_name(problem, found, labels)
        spec = manifest.schema[found]
        if spec.dtype == "bytes" or spec.is_list:
            raise ConfigError(
                f"model.tasks.{name} needs a number for each row",
                received=f"{found}: {spec.dtype}, shape {spec.shape}",
                fix="map the label to a number in the build",
            )
        tasks.append(Task(name, found, task.objective.kind, task.weight))
    return tuple(tasks)


def find_base_scores(tasks: Sequence[Task], manifest: Manifest) -> dict[str, float]:
    """Returns what a constant would score for each task, by name; 0 where it is not known.

    It is the mean label of the train split by the rows' weights, of binary tasks its log-odds.
    """
    scores = {}
    for task in tasks:
        mean = manifest.find_label_mean(task.label, "train") or 0.0
        if task.is_binary:
            mean = math.log(mean / (1.0 - mean)) if 0.0 < mean < 1.0 else 0.0
        scores[task.name] = mean
    return scores


def _find_features(config: RankingConfig, manifest: Manifest) -> list[FeatureSpec]:
    """Returns the features that a network may read; weights of lists are none."""
    if config.features is None:
        specs = [*manifest.schema.by_role(*INPUT_ROLES)]
    else:
        specs = [find_feature(manifest, name) for name in dict.fromkeys(config.features)]
        labels = [spec.name for spec in specs if spec.role not in INPUT_ROLES]
        if labels:
            raise ConfigError(
                "model.features names what is not known when a row is scored",
                received=", ".join(f"{n} (role {manifest.schema[n].role})" for n in labels),
                allowed="features of role user, item or context",
            )
    if not specs:
        raise ConfigError(
            "the model has no input feature", allowed=", ".join(manifest.schema.names)
        )
    weights = list_weights(config.pooling, manifest)
    return [spec for spec in specs if spec.name not in weights]


def _plan_input(
    config: RankingConfig,
    kind: NetworkKind,
    builder: TableBuilder,
    spec: FeatureSpec,
    pooling: PoolingConfig,
    positions: Sequence[str],
) -> InputFeature:
    """Returns how a feature enters the network; `positions` are lists read position by position."""
    name = spec.name
    combiner = config.pooling[name].combiner if name in config.pooling else None
    allowed = {"sum", "none"} if not kind.has_vectors and builder.is_embedded(spec) else None
    if name in positions:
        allowed, pooling = {"none"}, pooling.model_copy(update={"combiner": "none"})
    if allowed is not None and combiner not in (None, *allowed):
        raise ConfigError(
            f"network {config.network} reads {name} in another way than model.pooling says",
            received=f"model.pooling.{name}.combiner = {combiner}",
            allowed=" or ".join(sorted(allowed)),
            fix="leave the combiner out",
        )
    # Numbers of a fixed length are a vector, unless something is asked for.
    is_asked = name in config.pooling or pooling != MEAN
    has_biases = _reads_biases(config, kind)
    # `max` and `last` make one field of a list, `none` one of each position.
    elements = {None: "sum", "sum": "sum", "mean": "mean"}.get(combiner)
    return replace(
        builder.plan_input(spec, pooling if is_asked else None, bias=has_biases),
        has_vector=kind.has_vectors,
        elements=elements if kind.sums_fields else None,
        has_order=kind.has_order,
        is_cut=name in positions,
    )


def _reads_biases(config: RankingConfig, kind: NetworkKind) -> bool:
    if config.biases and config.network in NETWORKS and not kind.has_biases:
        raise ConfigError(
            f"network {config.network} reads no weights of ids",
            received="model.biases = true",
            fix="leave model.biases out, or choose another model.network",
        )
    return kind.has_biases if config.biases is None else config.biases


def _drop_unread(
    config: RankingConfig, planned: Sequence[InputFeature], network: Network
) -> list[InputFeature]:
    """Returns the features that the network reads, without vectors and weights that it does not."""
    read = set(network.input_names)
    kept = [feature for feature in planned if read & set(feature.shapes)]
    ignored = [feature.name for feature in planned if feature not in kept]
    if ignored and config.features is not None:
        raise ConfigError(
            f"network {config.network} does not read every feature of model.features",
            received=f"it ignores {', '.join(ignored)}",
            fix="leave these out of model.features, or connect them to the output",
        )
    return [
        replace(
            feature,
            has_vector=feature.has_vector
            and bool(read & {feature.name, feature.name + MASK_SUFFIX, *feature.field_names}),
            has_bias=feature.has_bias and feature.name + BIAS_SUFFIX in read,
        )
        for feature in kept
    ]
