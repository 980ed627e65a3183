"""Which event goes into which split."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Strict


class SplitConfig(Strict):
    """Which event goes into which split.

    `leave_one_out`: each user's last event is test, the last but one of `validation_users`
    users (chosen by a hash of their id; None: all) is validation, the rest train.
    `temporal`: events from `validation_from_ts`/`test_from_ts` (source's unit) on, or the last
    fractions in time where those are not given.
    `given`: `test_source` holds the test events, the log holds the others; validation as in
    leave_one_out, from the end of the log.
    """

    strategy: Literal["leave_one_out", "temporal", "given"] = "leave_one_out"
    validation: bool = True
    validation_users: int | None = Field(None, ge=1)
    min_events: int = Field(3, ge=2, description="Users with fewer events stay in train.")
    test_fraction: float = Field(0.1, gt=0, lt=1)
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    test_from_ts: int | None = None
    validation_from_ts: int | None = None
    test_source: str | None = None
    candidates: str | None = Field(None, description="Column of `test_source`: items to rank.")

    @model_validator(mode="after")
    def _given_has_source(self) -> SplitConfig:
        if (self.strategy == "given") != (self.test_source is not None):
            raise ValueError("`test_source` goes with `strategy: given`, and only with it")
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError("`test_fraction` and `validation_fraction` leave nothing to train on")
        return self
