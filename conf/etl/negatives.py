"""Negatives: sampled items, or a sample of what was shown and not taken."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict

EventSplit = Literal["train", "validation", "test"]
DEFAULT_ALPHA = 0.75
"""Exponent of Mikolov et al. 2013, "Distributed representations of words", section 2.2."""


class NegativesConfig(Strict):
    """Negatives of each positive, with the probability by which each was sampled.

    `uniform`: every item of the train split alike. `popularity`: by the item's train count to the
    power `alpha`. Both may stay within the positive's `category`, and leave out what the user has
    met. `exposure`: of the log's own rows with label 0, `per_positive` for each positive of the
    same group (`within`; None: the user) are kept.
    """

    strategy: Literal["uniform", "popularity", "exposure"]
    per_positive: int = Field(ge=1, le=10_000)
    alpha: float | None = Field(None, ge=0, description="popularity: exponent; None: 0.75.")
    category: str | None = Field(
        None, description="Scalar column of an item dictionary: negatives share its value."
    )
    not_seen: Literal["train", "all"] | None = Field(
        None,
        description="Leave out the items that the user met in the train split, or in any; None: "
        "a negative may be an item that the user has met.",
    )
    within: str | None = Field(None, description="exposure: column that groups rows.")
    splits: tuple[EventSplit, ...] = Field(("train",), min_length=1)
    probability: Name = Field("sampling_probability", description="Name of its column.")
    seed: int | None = Field(None, description="Salt of the draws; None: output.seed.")

    @model_validator(mode="after")
    def _consistent(self) -> NegativesConfig:
        if self.alpha is not None and self.strategy != "popularity":
            raise ValueError("`alpha` goes with `strategy: popularity`")
        if self.within is not None and self.strategy != "exposure":
            raise ValueError("`within` goes with `strategy: exposure`")
        if self.strategy == "exposure" and (self.category or self.not_seen):
            raise ValueError("`category` and `not_seen` do not go with `strategy: exposure`")
        return self

    @property
    def draws(self) -> bool:
        """Whether negatives are drawn items: rows that the log does not have."""
        return self.strategy != "exposure"

    @property
    def exponent(self) -> float:
        """Power of the train count that an item's weight is: 0 makes all alike."""
        if self.strategy == "uniform":
            return 0.0
        return DEFAULT_ALPHA if self.alpha is None else self.alpha
