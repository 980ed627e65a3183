"""Inputs by calendar day: which days of a source a run reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from conf.etl.base import Name, Strict


class DaysConfig(Strict):
    """Which days of a source belong to a run, and what is wrong with a day."""

    lookback_days: int = Field(
        0, ge=0, le=3660, description="Days read before the run's first: for histories."
    )
    format: str = Field("%Y-%m-%d", description="How a day is written, in strftime's terms.")
    column: Name | None = Field(
        None,
        description="A declared column: only rows of the run's days are read. Another name, "
        "where the path has {date}: a column that is made of it.",
    )
    allow_empty_days: bool = Field(False, description="Whether a day may have no row.")
    repeated_days: Literal["fail", "warn", "ignore"] = Field(
        "fail", description="Two days whose files are the same, byte for byte."
    )
