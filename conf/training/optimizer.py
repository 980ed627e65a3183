"""Update rules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from conf.training.base import Finite


class OptimizerConfig(Finite):
    """Adam for dense weights, its lazy form (touched rows only) for embedding tables."""

    learning_rate: float = Field(1e-3, gt=0)
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-7, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    clip_norm: float | None = Field(None, gt=0)
