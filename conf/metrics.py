"""Metrics: what each is called, which way it is better, what it is of. All else is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conf.errors import ConfigError, did_you_mean

Direction = Literal["higher", "lower", "neither"]
MetricKind = Literal["ranking", "binary", "value", "loss", "lists", "own"]
Interval = Literal["mean", "root_mean", "auc", "users"]

LOSS_METRIC = "loss"


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        family: Its name, without task and cut-off.
        title: As papers write it.
        direction: Which way it is better.
        kind: What it is of: ranked rows, tasks of a binary label or of a value, the loss that is
            trained, all lists together, or a function of one's own: of a task's rows, or of
            ranked rows at each cut-off.
        has_cutoff: Whether it is of the first k of a list, as in `ndcg@10`.
        may_stop: Whether it may choose the epoch and stop training.
        interval: How the interval of a difference of two runs is made: of a mean over rows, of its
            root, of the area under the curve, of a mean over users; None: there is none.
        long_title: In full, where a page has room.
    """

    family: str
    title: str
    direction: Direction
    kind: MetricKind
    has_cutoff: bool = False
    may_stop: bool = False
    interval: Interval | None = None
    long_title: str | None = None


_METRICS = (
    Metric("hit_rate", "HR", "higher", "ranking", True, True, "mean", "Hit rate"),
    Metric("ndcg", "NDCG", "higher", "ranking", True, True, "mean", "NDCG"),
    Metric("recall", "Recall", "higher", "ranking", True, True, "mean"),
    Metric("precision", "Precision", "higher", "ranking", True, False, "mean"),
    Metric("map", "MAP", "higher", "ranking", True, False, "mean"),
    Metric("mrr", "MRR", "higher", "ranking", False, True, "mean"),
    Metric(LOSS_METRIC, "Loss", "lower", "loss", False, True),
    Metric("auc", "AUC", "higher", "binary", False, True, "auc"),
    Metric("gauc", "GAUC", "higher", "binary", False, True, "users"),
    Metric("log_loss", "Log loss", "lower", "binary", False, True, "mean"),
    # 1 is best.
    Metric("calibration", "Mean prediction over label rate", "neither", "binary"),
    Metric("expected_error", "Expected calibration error", "lower", "binary"),
    Metric("mse", "MSE", "lower", "value", False, False, "mean"),
    Metric("rmse", "RMSE", "lower", "value", False, True, "root_mean"),
    Metric("mae", "MAE", "lower", "value", False, True, "mean"),
    Metric("coverage", "Coverage", "neither", "lists"),
    Metric("popularity_percentile", "Popularity percentile", "neither", "lists"),
    Metric("gini", "Gini", "neither", "lists"),
)
METRICS = {metric.family: metric for metric in _METRICS}
"""By family, in the order that pages show them."""

OWN_PREFIX = "own_"
"""What the names of metrics of one's own begin with, so that none is one of Sluice's to come."""


def register_metric(family: str, direction: Literal["higher", "lower"]) -> None:
    """Adds a metric of one's own to the table; of two configs the later one says its direction.

    Args:
        family: Its name, with `OWN_PREFIX`.
        direction: Which way it is better.

    Raises:
        ValueError: The name lacks the prefix.
    """
    if not family.startswith(OWN_PREFIX):
        raise ValueError(f"metric {family!r} does not begin with {OWN_PREFIX}")
    METRICS[family] = Metric(family, family, direction, "own", may_stop=True)


def list_families(*kinds: MetricKind, may_stop: bool | None = None) -> tuple[str, ...]:
    """Returns the families of some kinds, in order.

    Args:
        kinds: The kinds.
        may_stop: Whether those that may stop training, or those that may not; None: all.
    """
    return tuple(
        metric.family
        for metric in _METRICS
        if metric.kind in kinds and may_stop in (None, metric.may_stop)
    )


def build_stopping_pattern() -> str:
    """Returns the regular expression of the metrics that may stop training, by full name."""
    stopping = [metric for metric in _METRICS if metric.may_stop]
    plain = [m.family for m in stopping if m.kind in ("ranking", "loss") and not m.has_cutoff]
    cut = [*(m.family for m in stopping if m.has_cutoff), rf"{OWN_PREFIX}\w+"]
    of_tasks = [m.family for m in stopping if m.kind in ("binary", "value")]
    of_tasks.append(rf"{OWN_PREFIX}\w+")
    return (
        rf"^({'|'.join(cut)})@[1-9][0-9]*$|^({'|'.join(plain)})$"
        rf"|^([A-Za-z][A-Za-z0-9_]*/)?({'|'.join(of_tasks)})$"
    )


def find_family(metric: str) -> str:
    """Returns a metric's name without task and cut-off: `like/auc` -> `auc`, `mrr@5` -> `mrr`."""
    return metric.rpartition("/")[2].partition("@")[0]


def find_direction(metric: str) -> Direction | None:
    """Returns which way a metric is better; None: nothing is known of it."""
    known = METRICS.get(find_family(metric))
    return None if known is None else known.direction


def is_minimised(metric: str) -> bool:
    """Returns whether a lower value of a metric is better; of several tasks' too: `buy/rmse`.

    Raises:
        ConfigError: Nothing says which way it is better.
    """
    direction = find_direction(metric)
    if direction not in ("higher", "lower"):
        known = [found.family for found in _METRICS if found.direction != "neither"]
        raise ConfigError(
            "nothing says whether a higher or a lower value of this metric is better",
            received=metric,
            allowed=f"{', '.join(known)}; with a cut-off (ndcg@10) or a task (like/auc)",
            fix=did_you_mean(find_family(metric), known),
        )
    return direction == "lower"
