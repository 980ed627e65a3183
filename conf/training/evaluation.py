"""What follows training: evaluation and ranked lists."""

from __future__ import annotations

from pydantic import Field, field_validator

from conf.training.base import Finite


class EvaluationConfig(Finite):
    """Protocols; the full catalogue is always ranked."""

    ks: tuple[int, ...] = (1, 5, 10, 20, 50)
    mask_seen: bool = True
    sampled_negatives: int | None = Field(99, ge=1)
    batch_size: int = Field(1024, ge=1)

    @field_validator("ks")
    @classmethod
    def _sorted_positive(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if not ks or min(ks) < 1:
            raise ValueError("cut-offs must be 1 or more")
        return tuple(sorted(set(ks)))


class PredictConfig(Finite):
    """Ranked lists per user."""

    k: int = Field(20, ge=1)
    mask_seen: bool = True
