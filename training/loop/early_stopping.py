"""Early stopping: the metric that chooses an epoch, the best epoch, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.metrics import LOSS_METRIC, METRICS, is_minimised, list_families
from conf.training.models import RankingConfig, TaskConfig
from conf.training.train import EarlyStoppingConfig, TrainConfig
from training.loop.validation import is_scored_by_label, is_validated
from training.monitoring.run_logs import EpochRecord, StepValidation

TASK_METRICS = {
    "binary": list_families("binary", may_stop=True),
    "squared_error": list_families("value", may_stop=True),
}
"""Metrics of a task that may choose the epoch, by the kind of its objective."""
RETRIEVAL_METRIC = "ndcg@10"
"""What chooses the epoch of a retrieval model where nothing is said."""


def find_best_epoch(history: Sequence[EpochRecord], metric: str | None) -> int:
    """Returns the one-based epoch to keep: the first with the best metric, or the last.

    Args:
        history: At least one epoch, in order.
        metric: Metric to choose by, or None: nothing is held out, the last epoch is kept.
    """
    return history[-1 if metric is None else find_best(history, metric)].epoch


def is_measured(records: Sequence[EpochRecord], metric: str | None) -> bool:
    """Whether a metric has a value in any of the records: where it has none, it chooses nothing."""
    return metric is not None and not all(math.isnan(record.value(metric)) for record in records)


def find_best(records: Sequence[EpochRecord] | Sequence[StepValidation], metric: str) -> int:
    """Returns the position of the first record with the best metric.

    NaN is worst, and so is a metric of one's own where it is not defined; where no record has more,
    the last one is as good as any, and training goes on.
    """
    sign = -1.0 if is_minimised(metric) else 1.0
    values = [sign * record.value(metric) for record in records]
    if all(map(math.isnan, values)):
        return len(values) - 1
    comparable = [-math.inf if math.isnan(value) else value for value in values]
    return comparable.index(max(comparable))


def latest_metric(history: Sequence[EpochRecord], metric: str | None) -> tuple[str, float] | None:
    """Returns the name and the last value of a validation metric; None where there is none yet."""
    if not history or metric is None or metric not in history[-1].validation:
        return None
    return metric, history[-1].validation[metric]


def should_stop(history: Sequence[EpochRecord], config: EarlyStoppingConfig | None) -> bool:
    """Whether the metric has not improved for `patience` epochs."""
    if config is None or config.metric is None or not history:
        return False
    return history[-1].epoch - find_best_epoch(history, config.metric) >= config.patience


def find_used_metric(config: TrainConfig, manifest: Manifest) -> str | None:
    """Returns the metric that chooses the epoch where there are rows to measure it, else None."""
    metric = selection_metric(config)
    return metric if metric == LOSS_METRIC or is_validated(config, manifest) else None


def selection_metric(config: TrainConfig) -> str | None:
    """Returns the metric that chooses the epoch, or None: the last one is kept.

    Held-out rows of a retrieval model's binary objective are not ranked: the held-out loss stands
    in for a metric of ranking.

    Raises:
        ConfigError: The metric's cut-off is not evaluated.
    """
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
    if isinstance(config.model, RankingConfig):
        check_evaluated(config, metric, "fit.early_stopping.metric")
        return metric
    if is_scored_by_label(config):
        return LOSS_METRIC
    cut_off = metric.partition("@")[2]
    if cut_off and int(cut_off) not in config.evaluation.ks:
        raise ConfigError(
            "fit.early_stopping.metric has a cut-off that is not evaluated",
            received=metric,
            allowed=f"cut-offs of evaluation.ks: {config.evaluation.ks}",
            fix=f"add {cut_off} to evaluation.ks, or choose another metric",
        )
    check_evaluated(config, metric, "fit.early_stopping.metric")
    return metric


def keeps_steps_without_loss(config: TrainConfig) -> bool:
    """Whether a step's weights are kept, whose validation gives no loss, as it ranks rows."""
    stopping = config.fit.early_stopping
    return stopping is not None and stopping.by == "steps" and not measures_loss(config)


def measures_loss(config: TrainConfig) -> bool:
    """Whether held-out rows give a loss: those of a retrieval model that are ranked have none."""
    return isinstance(config.model, RankingConfig) or is_scored_by_label(config)


def default_metric(config: TrainConfig) -> str:
    """Returns the metric that chooses the epoch where the config names none."""
    model = config.model
    if isinstance(model, RankingConfig):
        first = next(iter(model.tasks.values()), TaskConfig())
        return "auc" if first.objective.kind == "binary" else "rmse"
    return LOSS_METRIC if is_scored_by_label(config) else RETRIEVAL_METRIC


def check_evaluated(config: TrainConfig, metric: str, name: str) -> None:
    """Refuses a metric that validation does not measure.

    Args:
        config: What is trained.
        metric: The metric.
        name: What it is called in the message.

    Raises:
        ConfigError: It is not measured.
    """
    known = _list_metrics(config)
    if metric not in known:
        raise ConfigError(
            f"{name} is not evaluated",
            received=metric,
            allowed=", ".join(known),
            fix=did_you_mean(metric, known),
        )


def _list_metrics(config: TrainConfig) -> list[str]:
    """The metrics that validation may measure."""
    model = config.model
    if isinstance(model, RankingConfig):
        tasks = list(model.tasks.items()) or [("", TaskConfig())]
        return [
            LOSS_METRIC,
            *(
                f"{name}/{metric}" if number else metric
                for number, (name, task) in enumerate(tasks)
                for metric in (*TASK_METRICS[task.objective.kind], *config.evaluation.metrics)
            ),
        ]
    if is_scored_by_label(config):
        return [LOSS_METRIC]
    families, ks = list_families("loss", "ranking", may_stop=True), config.evaluation.ks
    return [
        *(
            f"{family}@{k}" if k else family
            for family in families
            for k in (ks if METRICS[family].has_cutoff else [None])
        ),
        *(f"{name}@{k}" for name in config.evaluation.metrics for k in ks),
    ]
