"""Labels: a rule over one column of the event, or a conversion that followed it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict

LabelValue = int | float | str


class ConversionConfig(Strict):
    """Positive if a conversion of the same keys follows within the attribution window."""

    source: str = Field(description="Source of the conversions: one row each.")
    keys: dict[str, str] = Field(
        min_length=1, description="Column of the event to the conversion's column of equal type."
    )
    time: str = Field(description="Time column of the conversions.")
    time_unit: Literal["s", "ms"] = "s"
    within_hours: float = Field(gt=0, description="Attribution window, from the event on.")
    immature: Literal["drop", "keep"] = Field(
        "drop",
        description="Events whose window ends after `until_ts`: dropped, or kept as they stand.",
    )
    until_ts: int | None = Field(
        None,
        description="What the conversions are complete up to (their unit); None: the latest time "
        "of an event or conversion.",
    )


class LabelConfig(Strict):
    """The label of an event: exactly one rule.

    `at_least`: 1 from that value of a numeric column on (a rating, a dwell time), else 0.
    `equals`, `one_of`: 1 for that value or those (an action), else 0. `graded`: the numeric column
    as it is. `conversion`: 1 if a conversion followed in time.
    """

    column: str | None = None
    at_least: float | None = None
    equals: LabelValue | None = None
    one_of: tuple[LabelValue, ...] | None = Field(None, min_length=1)
    graded: bool = False
    conversion: ConversionConfig | None = None
    name: Name = "label"

    @model_validator(mode="after")
    def _one_rule(self) -> LabelConfig:
        rules = [
            name
            for name in ("at_least", "equals", "one_of", "conversion")
            if getattr(self, name) is not None
        ]
        rules += ["graded"] if self.graded else []
        if len(rules) != 1:
            raise ValueError(
                "a label has exactly one rule of at_least, equals, one_of, graded, conversion; "
                f"received {', '.join(rules) or 'none'}"
            )
        if (self.column is None) != (self.conversion is not None):
            raise ValueError("`column` goes with every rule but `conversion`")
        return self

    @property
    def values(self) -> tuple[LabelValue, ...]:
        """The values that make a positive, of `equals` and `one_of`."""
        if self.equals is not None:
            return (self.equals,)
        return self.one_of or ()
