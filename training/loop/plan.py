"""What a run will do, as its config and manifest say it, without TensorFlow or a shard read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.metrics import LOSS_METRIC, METRICS, list_families
from conf.schema import INPUT_ROLES, FeatureSpec
from conf.training.models import (
    MFConfig,
    ModelConfig,
    RankingConfig,
    SequenceSettings,
    TaskConfig,
    YouTubeDNNConfig,
    learns_label,
)
from conf.training.tables import DynamicTableConfig, StaticTableConfig
from conf.training.train import FitConfig, TrainConfig
from training.objectives.softmax_memory import count_softmax_bytes
from training.reader.feature_columns import find_feature
from training.reader.training_data import TrainingData, read_current_data

if TYPE_CHECKING:
    from training.checkpoint.checkpoint_files import Position

TASK_METRICS = {
    "binary": list_families("binary", may_stop=True),
    "squared_error": list_families("value", may_stop=True),
}
"""Metrics of a task that may choose the epoch, by the kind of its objective."""
RETRIEVAL_METRIC = "ndcg@10"
"""What chooses the epoch of a retrieval model where nothing is said."""
KNOWN_AT_START = "known at the start"
"""What a plan says of steps where the input leaves rows out, which only a pass over them counts."""
SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2, "ftrl": 2}
"""Numbers that the optimizer of a table keeps for each number of it."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class StepPlan:
    """How many steps a run has, and where its compiled calls end.

    A call has at most `steps_per_loop` steps, and ends at multiples of `stops`, counted over the
    run.
    """

    steps_per_epoch: int
    total: int
    steps_per_loop: int
    stops: tuple[int, ...] = ()

    @classmethod
    def of(cls, fit: FitConfig, steps_per_epoch: int) -> StepPlan:
        between = None if fit.validation is None else fit.validation.every_steps
        stops = tuple(n for n in (fit.checkpoint.every_steps, between) if n is not None)
        return cls(steps_per_epoch, fit.count_steps(steps_per_epoch), fit.steps_per_loop, stops)

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.total // self.steps_per_epoch)

    def count_steps_of_epoch(self, epoch: int) -> int:
        return min(self.steps_per_epoch, self.total - epoch * self.steps_per_epoch)

    def count_steps_of_call(self, position: Position) -> int:
        """Returns how many steps to run in one call, which ends where it would unresumed."""
        batch, done = position.batch, position.step(self.steps_per_epoch)
        loop = self.steps_per_loop - batch % self.steps_per_loop
        left = self.count_steps_of_epoch(position.epoch) - batch
        return min([left, loop, *(stop - done % stop for stop in self.stops)])


@dataclass(frozen=True)
class TrainPlan:
    """A run whose config fits its dataset, as far as the manifest says it.

    Attributes:
        features: Names by the side of the model that reads them.
        tables: Rows and row length, without biases; of a table that grows, the reserved rows.
        steps_per_epoch: Whole batches of an epoch; None: known at the start.
        metric: What chooses the epoch where there are rows to measure it on; None: the last one.
        softmax_bytes: What a softmax over the catalogue takes; None: there is no such.
    """

    config: TrainConfig
    data: TrainingData
    features: dict[str, list[str]]
    tables: dict[str, list[int]]
    steps_per_epoch: int | None
    metric: str | None
    softmax_bytes: int | None

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables with what their optimizers keep, float32."""
        optimizer, found = self.config.optimizer, 0
        for name, (rows, dim) in self.tables.items():
            settings = self.config.model.embeddings.get(name) or StaticTableConfig()
            slots = SLOTS[(settings.optimizer or optimizer.sparse).kind]
            found += _FLOAT_BYTES * rows * dim * (1 + slots * settings.trainable)
        return found

    def to_json(self) -> dict[str, Any]:
        manifest, steps = self.data.manifest, self.steps_per_epoch
        measured = self.metric == LOSS_METRIC or is_validated(self.config, manifest)
        return {
            "config": self.config.resolved(),
            "dataset": str(self.data.version_dir),
            "rows": {split.name: split.rows for split in manifest.splits},
            "steps_per_epoch": steps or KNOWN_AT_START,
            "steps": self.config.fit.count_steps(steps) if steps else KNOWN_AT_START,
            "features": self.features,
            "tables": self.tables,
            "table_bytes": self.table_bytes,
            "catalogue_softmax_bytes": self.softmax_bytes,
            "selected_by": self.metric if measured else None,
        }


def check(config: TrainConfig, data: TrainingData) -> TrainPlan:
    """Checks a config against a dataset version's manifest; no shard is read."""
    metric = selection_metric(config)
    features = list_features(config.model, data.manifest)
    steps = data.steps_per_epoch(config.input) if config.input.is_exact else None
    names = {side: [spec.name for spec in specs] for side, specs in features.items()}
    specs = [spec for side in features.values() for spec in side]
    tables = _size_tables(config.model, data.manifest, specs)
    part_size = config.input.batch_size // (config.optimizer.accumulate_steps or 1)
    softmax_bytes = count_softmax_bytes(config.model, data.manifest, part_size)
    return TrainPlan(config, data, names, tables, steps, metric, softmax_bytes)


def read_plan(config: TrainConfig) -> TrainPlan:
    return check(config, read_current_data(config))


def list_features(config: ModelConfig, manifest: Manifest) -> dict[str, list[FeatureSpec]]:
    """Returns the features that a model reads, by the side that reads them."""
    if isinstance(config, RankingConfig):
        inputs = [spec.name for spec in manifest.schema.by_role(*INPUT_ROLES)]
        return _find_specs(
            manifest, features=inputs if config.features is None else config.features
        )
    if isinstance(config, MFConfig):
        keys = {f"{side}_features": (manifest.require_key(side),) for side in ("user", "item")}
        return _find_specs(manifest, **keys)
    users, items = config.user_features, getattr(config, "item_features", None)
    if users is None:
        users = tuple(spec.name for spec in manifest.schema.by_role("user"))
    if isinstance(config, YouTubeDNNConfig):
        items = (manifest.require_key("item"),)
        if config.user_features is None:
            users = tuple(name for name in users if name != manifest.keys.user)
    if isinstance(config, SequenceSettings):
        history = manifest.find_history()
        users = (*(config.sequence or ((history,) if history else ())), *users)
    if items is None:
        items = tuple(spec.name for spec in manifest.schema.by_role("item"))
    return _find_specs(manifest, user_features=users, item_features=items)


def _find_specs(manifest: Manifest, **sides: Sequence[str]) -> dict[str, list[FeatureSpec]]:
    return {
        side: [find_feature(manifest, name) for name in dict.fromkeys(names)]
        for side, names in sides.items()
    }


def _size_tables(
    config: ModelConfig, manifest: Manifest, specs: Sequence[FeatureSpec]
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    dynamic = {
        feature: name
        for name, table in config.embeddings.items()
        if isinstance(table, DynamicTableConfig)
        for feature in table.features or [s.name for s in specs if s.table == name]
    }
    for spec in specs:
        name = dynamic.get(spec.name, spec.table)
        settings = config.embeddings.get(name) or StaticTableConfig()
        rows = settings.capacity if isinstance(settings, DynamicTableConfig) else None
        rows = rows or spec.vocabulary_size
        if rows is not None:
            dim = settings.dim or config.embedding_dim
            size = manifest.schema[spec.name].vocabulary_size or rows
            found[name] = [rows, 6 * math.isqrt(math.isqrt(size)) if dim == "auto" else int(dim)]
    return found


def is_validated(config: TrainConfig, manifest: Manifest) -> bool:
    return config.input.validation is not None or manifest.has_split("validation")


def is_scored_by_label(config: TrainConfig) -> bool:
    """Whether validation compares scores with labels, rather than ranking targets."""
    if isinstance(config.model, RankingConfig):
        return True
    return config.input.validation is not None and learns_label(config.model)


def selection_metric(config: TrainConfig) -> str | None:
    """Returns the metric that chooses the epoch, or None: the last one is kept."""
    stopping = config.fit.early_stopping
    if stopping is None:
        return None
    metric = stopping.metric or default_metric(config)
    if metric == LOSS_METRIC and keeps_steps_without_loss(config):
        raise ConfigError(
            "fit.early_stopping chooses a step by validation, whose rows are ranked and have no "
            "loss",
            received="fit.early_stopping.metric=loss with by=steps",
            allowed=f"metrics of ranking, such as {RETRIEVAL_METRIC}; the training loss of epochs",
            fix=f"set fit.early_stopping.metric={RETRIEVAL_METRIC}, or by=epochs",
        )
    if is_scored_by_label(config) and not isinstance(config.model, RankingConfig):
        return LOSS_METRIC
    check_evaluated(config, metric, "fit.early_stopping.metric")
    return metric


def keeps_steps_without_loss(config: TrainConfig) -> bool:
    """Whether a step's weights are kept, whose validation gives no loss, as it ranks rows."""
    stopping = config.fit.early_stopping
    return stopping is not None and stopping.by == "steps" and not is_scored_by_label(config)


def default_metric(config: TrainConfig) -> str:
    """Returns the metric that chooses the epoch where the config names none."""
    model = config.model
    if isinstance(model, RankingConfig):
        first = next(iter(model.tasks.values()), TaskConfig())
        return "auc" if first.objective.kind == "binary" else "rmse"
    return LOSS_METRIC if is_scored_by_label(config) else RETRIEVAL_METRIC


def check_evaluated(config: TrainConfig, metric: str, key: str) -> None:
    """Refuses a metric of a config's key that validation does not measure."""
    known = _list_metrics(config)
    if metric not in known:
        raise ConfigError(
            f"{key} is not evaluated; its cut-off must be one of evaluation.ks",
            received=metric,
            allowed=", ".join(known),
            fix=did_you_mean(metric, known),
        )


def _list_metrics(config: TrainConfig) -> list[str]:
    model, own, ks = config.model, config.evaluation.metrics, config.evaluation.ks
    if isinstance(model, RankingConfig):
        tasks = list(model.tasks.items()) or [("", TaskConfig())]
        names = [LOSS_METRIC, *TASK_METRICS[tasks[0][1].objective.kind], *own]
        for name, task in tasks[1:]:
            names += [f"{name}/{metric}" for metric in (*TASK_METRICS[task.objective.kind], *own)]
        return names
    if is_scored_by_label(config):
        return [LOSS_METRIC]
    names = []
    for family in list_families("loss", "ranking", may_stop=True):
        names += [f"{family}@{k}" for k in ks] if METRICS[family].has_cutoff else [family]
    return [*names, *(f"{name}@{k}" for name in own for k in ks)]
