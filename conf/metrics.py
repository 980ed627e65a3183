"""Which way each metric is better: the one place that comparisons, early stopping and pages ask."""

from __future__ import annotations

from typing import Literal

from conf.errors import ConfigError, did_you_mean

Direction = Literal["higher", "lower", "neither"]

LOSS_METRIC = "loss"
DIRECTIONS: dict[str, Direction] = {
    "hit_rate": "higher",
    "ndcg": "higher",
    "recall": "higher",
    "precision": "higher",
    "map": "higher",
    "mrr": "higher",
    "auc": "higher",
    "gauc": "higher",
    LOSS_METRIC: "lower",
    "log_loss": "lower",
    "mse": "lower",
    "rmse": "lower",
    "mae": "lower",
    "expected_error": "lower",
    "calibration": "neither",  # Mean prediction over label rate: 1 is best.
    "coverage": "neither",
    "popularity_percentile": "neither",
    "gini": "neither",
}
"""By family: the name without its task and its cut-off."""


def find_family(metric: str) -> str:
    """Returns a metric's name without task and cut-off: `like/auc` -> `auc`, `mrr@5` -> `mrr`."""
    return metric.rpartition("/")[2].partition("@")[0]


def find_direction(metric: str) -> Direction | None:
    """Returns which way a metric is better; None: nothing is known of it."""
    return DIRECTIONS.get(find_family(metric))


def is_minimised(metric: str) -> bool:
    """Returns whether a lower value of a metric is better; of several tasks' too: `buy/rmse`.

    Raises:
        ConfigError: Nothing says which way it is better.
    """
    direction = find_direction(metric)
    if direction not in ("higher", "lower"):
        known = [family for family, way in DIRECTIONS.items() if way != "neither"]
        raise ConfigError(
            "nothing says whether a higher or a lower value of this metric is better",
            received=metric,
            allowed=f"{', '.join(known)}; with a cut-off (ndcg@10) or a task (like/auc)",
            fix=did_you_mean(find_family(metric), known),
        )
    return direction == "lower"
