"""How long to train, what ends it, and what is kept on the way."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from conf.training.base import Finite

METRIC_PATTERN = r"^(hit_rate|recall|ndcg)@[1-9][0-9]*$|^mrr$|^loss$"


class EarlyStoppingConfig(Finite):
    """Stops when the metric has not improved for `patience` epochs; the best epoch is kept."""

    metric: str = Field("ndcg@10", pattern=METRIC_PATTERN)
    patience: int = Field(3, ge=1)


class CheckpointConfig(Finite):
    """When the state of training is saved, beside the end of each epoch, and how much is kept."""

    every_steps: int | None = Field(None, ge=1, description="Steps, counted over the whole run.")
    every_minutes: float | None = Field(
        None, gt=0, description="Saved at the end of the compiled loop that is running by then."
    )
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept, to resume from.")
    keep_best: int = Field(1, ge=1, description="Best epochs so far kept, the newest to use.")
    asynchronous: bool = Field(
        True, description="Write while training goes on, at the price of one copy of the state."
    )


class WarmStartConfig(Finite):
    """Weights of an earlier run to begin with."""

    path: str = Field(description="A run, a series of runs (its last finished one) or a checkpoint")
    moments: Literal["reset", "transfer"] = Field(
        "reset", description="transfer: the optimizers' state, their step count included."
    )
    mismatched: Literal["refuse", "fresh"] = Field(
        "refuse", description="fresh: weights of another shape start as in a new run."
    )


def _path_alone(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class HistogramsConfig(Finite):
    """Histograms in TensorBoard at the end of each epoch: dense weights, norms of tables' rows."""

    sampled_rows: int = Field(
        100_000, ge=1, description="Rows of a larger table that are read, evenly spread."
    )


def _switch(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


class FitConfig(Finite):
    """How long to train."""

    epochs: int = Field(10, ge=1)
    early_stopping: EarlyStoppingConfig | None = EarlyStoppingConfig()
    log_every_seconds: float = Field(10.0, gt=0)
    steps_per_loop: int = Field(64, ge=1, description="Steps inside one compiled loop.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    warm_start: Annotated[WarmStartConfig | None, BeforeValidator(_path_alone)] = None
    check_gradients: bool = Field(
        False, description="Stop at gradients that are not finite, too, not at the loss alone."
    )
    histograms: Annotated[HistogramsConfig | None, BeforeValidator(_switch)] = Field(
        None, description="true, or a mapping; null: scalars alone."
    )
