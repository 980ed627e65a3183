"""Labels of examples, drawn negatives, and weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from conf.config_base import Name, Strict
from conf.etl.events import EventConditionConfig
from conf.splits import EventSplit

LabelValue = int | float | str


class ConversionConfig(Strict):
    """Positive if a conversion of the same keys follows within the attribution window."""

    source: str = Field(description="Source of the conversions: one row each.")
    keys: dict[str, str] = Field(
        min_length=1, description="Column of the event to the conversion's column of equal type."
    )
    time: str = Field(description="Time column of the conversions.")
    within_hours: float = Field(gt=0, description="Attribution window, from the event on.")
    immature: Literal["drop", "keep"] = Field(
        "drop",
        description="Events whose window ends after `until_ts`: no samples (of several labels "
        "without this one), or with what is known: 1 if a conversion came, else 0.",
    )
    until_ts: int | None = Field(
        None,
        description="What the conversions are complete up to (their unit); None: the time of the "
        "latest one.",
    )


class LabelConfig(EventConditionConfig):
    """The label of an event: exactly one rule.

    `at_least`: 1 from that value of a numeric column on (a rating, a dwell time), else 0.
    `one_of`: 1 for those values (an action), else 0. Neither: the numeric column as it is.
    `conversion`: 1 if a conversion followed in time.
    """

    column: str | None = Field(  # type: ignore[assignment]
        None, description="Column that the rule reads; every rule but `conversion` needs it."
    )
    conversion: ConversionConfig | None = None
    name: Name = Field("label", description="Name of the feature.")

    @model_validator(mode="after")
    def _one_condition(self) -> LabelConfig:
        if self.at_least is not None and self.one_of is not None:
            raise ValueError("a label has one rule: at_least or one_of; received both")
        if (self.column is None) != (self.conversion is not None):
            raise ValueError("`column` goes with every rule but `conversion`")
        if self.column is None and (self.at_least is not None or self.one_of is not None):
            raise ValueError("at_least and one_of do not go with `conversion`")
        return self

    @property
    def is_binary(self) -> bool:
        """Whether every row has 0 or 1."""
        return not self.graded

    @property
    def graded(self) -> bool:
        """Whether the label is the column's own number."""
        return self.column is not None and self.at_least is None and self.one_of is None

    @property
    def values(self) -> tuple[LabelValue, ...]:
        """The values that make a positive, of `one_of`."""
        return self.one_of or ()


DEFAULT_ALPHA = 0.75
"""Exponent of Mikolov et al. 2013, "Distributed representations of words", section 2.2."""


class NegativesConfig(Strict):
    """Negatives of each positive, with the probability by which each was sampled.

    `uniform`: every item of the train split alike. `popularity`: by the item's positives among the
    rows that train, at least one, to the power `alpha`. Both may stay within the positive's
    `within`, and leave out what the user has met. `exposure`: of the log's own rows with label 0,
    `per_positive` for each positive of the same group (`within`; None: the user) are kept.
    """

    probability: ClassVar[str] = "sampling_probability"
    strategy: Literal["uniform", "popularity", "exposure"] = Field(
        description="How they are drawn: see above."
    )
    per_positive: int = Field(ge=1, le=10_000, description="Negatives of each positive.")
    alpha: float | None = Field(None, ge=0, description="popularity: exponent; None: 0.75.")
    not_seen: Literal["train", "all"] | None = Field(
        None,
        description="Leave out the items that the user met in the train split, or in any; None: "
        "a negative may be an item that the user has met.",
    )
    within: str | None = Field(
        None,
        description="Scalar column of an item dictionary: negatives share its value. exposure: "
        "column that groups rows.",
    )
    splits: tuple[EventSplit, ...] = Field(
        ("train",), min_length=1, description="Splits that get negatives."
    )

    @model_validator(mode="after")
    def _consistent(self) -> NegativesConfig:
        if self.alpha is not None and self.strategy != "popularity":
            raise ValueError("`alpha` goes with `strategy: popularity`")
        if self.strategy == "exposure" and self.not_seen:
            raise ValueError("`not_seen` does not go with `strategy: exposure`")
        return self

    @property
    def draws(self) -> bool:
        """Whether negatives are drawn items: rows that the log does not have."""
        return self.strategy != "exposure"

    @property
    def exponent(self) -> float:
        """Power of the item's count that its weight is: 0 makes all alike."""
        if self.strategy == "uniform":
            return 0.0
        return DEFAULT_ALPHA if self.alpha is None else self.alpha


KEEP_RATE = "keep_rate"
"""Column with the rate at which a row was kept by down-sampling."""


class WeightsConfig(Strict):
    """The weight of a sample: the product of the declared parts and of down-sampling's 1/rate."""

    column: str | None = Field(None, description="Numeric column of the log; null counts as 1.")
    by_class: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] | None = Field(
        None, description="[negative, positive]: factors of samples with label 0, and above."
    )
    half_life_days: float | None = Field(
        None, gt=0, description="Halves with each such span before the latest event."
    )

    @model_validator(mode="after")
    def _has_a_part(self) -> WeightsConfig:
        parts = (self.column, self.by_class, self.half_life_days)
        if all(part is None for part in parts):
            raise ValueError("weights need a column, by_class or half_life_days")
        return self
