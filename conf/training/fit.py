"""How long to train, and what ends it."""

from __future__ import annotations

from pydantic import Field

from conf.training.base import Finite

METRIC_PATTERN = r"^(hit_rate|recall|ndcg)@[1-9][0-9]*$|^mrr$|^loss$"


class EarlyStoppingConfig(Finite):
    """Stops when the metric has not improved for `patience` epochs; the best epoch is kept."""

    metric: str = Field("ndcg@10", pattern=METRIC_PATTERN)
    patience: int = Field(3, ge=1)


class FitConfig(Finite):
    """How long to train."""

    epochs: int = Field(10, ge=1)
    early_stopping: EarlyStoppingConfig | None = EarlyStoppingConfig()
    log_every_seconds: float = Field(10.0, gt=0)
    steps_per_loop: int = Field(64, ge=1, description="Steps inside one compiled loop.")
