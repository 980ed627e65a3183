"""Down-sampling of negatives, and the weights of samples."""

from __future__ import annotations

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict
from conf.etl.negatives import EventSplit


class DownSamplingConfig(Strict):
    """Rows with label 0 are kept at a rate; 1/rate goes into the weight of those kept."""

    rate: float = Field(gt=0, le=1)
    splits: tuple[EventSplit, ...] = Field(("train",), min_length=1)
    name: Name = Field("keep_rate", description="Column of the rate by which a row was kept.")
    seed: int | None = Field(None, description="Salt of the choice; None: output.seed.")


class WeightsConfig(Strict):
    """The weight of a sample: the product of the declared parts and of down-sampling's 1/rate."""

    name: Name = "weight"
    column: str | None = Field(None, description="Numeric column of the log; null counts as 1.")
    positive: float | None = Field(None, ge=0, description="Factor of samples with a label > 0.")
    negative: float | None = Field(None, ge=0, description="Factor of samples with label 0.")
    half_life_days: float | None = Field(
        None, gt=0, description="Halves with each such span before the latest event."
    )

    @model_validator(mode="after")
    def _has_a_part(self) -> WeightsConfig:
        parts = (self.column, self.positive, self.negative, self.half_life_days)
        if "name" not in self.model_fields_set and all(part is None for part in parts):
            raise ValueError(
                "weights need a column, positive, negative or half_life_days, or a `name`"
            )
        return self
