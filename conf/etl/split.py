"""The train, validation and test split of the events."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from conf.config_base import Strict
from conf.dates import read_duration


def _check_duration(value: bool | str) -> bool | str:
    if isinstance(value, str):
        read_duration(value)
    return value


def _check_moment(value: object) -> object:
    try:
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value)
    except ValueError:
        pass
    if isinstance(value, str | bool | float):
        raise ValueError(
            f"{value!r} is no time: write 2026-01-31, 2026-01-31T12:00:00, or a whole number in "
            "the log's unit without quotes"
        )
    return value


_Moment = Annotated[int | datetime.datetime | None, BeforeValidator(_check_moment)]

LEAST_EVENTS = 3
"""Events that a user must have for one to be held out."""
_STRATEGIES_OF_KEYS = {
    "test": ("temporal",),
    "validation_users": ("leave_one_out", "given"),
    "test_fraction": ("temporal", "hash"),
    "validation_fraction": ("temporal", "hash", "given"),
    "test_from_ts": ("temporal",),
    "validation_from_ts": ("temporal",),
    "key": ("hash",),
    "train_days": ("sliding",),
    "validation_days": ("sliding",),
    "test_days": ("sliding",),
    "step_days": ("sliding",),
    "window": ("sliding",),
    "start_date": ("sliding",),
    "test_source": ("given",),
    "validation_source": ("given",),
    "candidates": ("given",),
}
"""The strategies that read a key; of others, a value that is not the default would be ignored."""


class SplitConfig(Strict):
    """The split of an event.

    `leave_one_out`: each user's last event is test, the one before it, of `validation_users` users
    (chosen by a hash of their id; None: all), is validation, the rest train; users with fewer than
    three stay in train. `temporal`: events from `validation_from_ts`/`test_from_ts` on; or the last
    `test` and the `validation` before it, such as `1 day` each, counted back from the end of the
    run's last day, without `--date` from the end of the last sample's day (hour, where `test` is in
    hours); or the last fractions in time, of the run's own days where it has some. `hash`: by a
    hash of `key`, so that all rows of a key stay together. `sliding`: window number `window` of a
    backtest, each `step_days` later than the one before: `train_days`, then `validation_days` if
    given, then `test_days`; events outside are left out. `given`: `test_source` holds the test
    events, `validation_source` those of validation, the log the others; without the latter,
    validation is the end of the log as in leave_one_out, or, without users, a fraction of it by
    hash.
    """

    strategy: Literal["leave_one_out", "temporal", "hash", "sliding", "given"] = Field(
        "leave_one_out", description="How events are split: see above."
    )
    validation: Annotated[bool | str, AfterValidator(_check_duration)] = Field(
        True,
        description="Whether there is a validation split. temporal: also how long it is, such as "
        "`1 day` or `6 hours`.",
    )
    test: Annotated[str, AfterValidator(_check_duration)] | None = Field(
        None, description="temporal: how long the test split is, such as `1 day` or `6 hours`."
    )
    validation_users: int | None = Field(
        None,
        ge=1,
        description="leave_one_out: users whose events before the last are validation; None: all.",
    )
    test_fraction: float = Field(
        0.1, gt=0, lt=1, description="temporal, hash: share of the test split."
    )
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="temporal, hash: share of the validation split."
    )
    test_from_ts: _Moment = Field(
        None,
        description="temporal: first time of the test split: a date or timestamp (UTC unless it "
        "says another zone), or a number in the log's unit.",
    )
    validation_from_ts: _Moment = Field(
        None, description="temporal: first time of the validation split, likewise."
    )
    key: str | None = Field(
        None, description="hash: column; None: the user, or the row's content where there is none."
    )
    train_days: int | None = Field(None, ge=1, description="sliding: days of the train split.")
    validation_days: int | None = Field(
        None, ge=1, description="sliding: days of the validation split; None: it has none."
    )
    test_days: int | None = Field(None, ge=1, description="sliding: days of the test split.")
    step_days: int | None = Field(None, ge=1, description="None: test_days.")
    window: int = Field(0, ge=0, description="sliding: which window, 0 is the first.")
    start_date: datetime.date | None = Field(
        None, description="sliding: UTC day that window 0 begins on; None: the log's first."
    )
    test_source: str | None = Field(None, description="given: source of the test events.")
    validation_source: str | None = Field(
        None, description="given: source of the validation events."
    )
    candidates: str | None = Field(None, description="Column of `test_source`: items to rank.")

    @model_validator(mode="after")
    def _consistent(self) -> SplitConfig:
        self._check_keys()
        if self.strategy == "given" and self.test_source is None:
            raise ValueError("`strategy: given` needs `test_source`")
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError("`test_fraction` and `validation_fraction` leave nothing to train on")
        if self.strategy == "sliding" and None in (self.train_days, self.test_days):
            raise ValueError("`strategy: sliding` needs `train_days` and `test_days`, both")
        self._check_durations()
        return self

    def _check_keys(self) -> None:
        """Refuses a key that the strategy does not read: a split of another kind was meant."""
        for name, strategies in _STRATEGIES_OF_KEYS.items():
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if self.strategy not in strategies and not is_default:
                raise ValueError(
                    f"`{name}` goes with `strategy: {' or '.join(strategies)}`, and only with it; "
                    f"the strategy is {self.strategy}"
                )
        if self.validation_source is not None:
            for name in ("validation_users", "validation_fraction"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"`{name}` chooses validation from the log, and `validation_source` is "
                        "given; keep one"
                    )

    def _check_durations(self) -> None:
        is_long = isinstance(self.validation, str)
        if self.strategy != "temporal" and is_long:
            raise ValueError("a duration of `validation` goes with `strategy: temporal`")
        if self.test is not None and self.test_from_ts is not None:
            raise ValueError("`test` and `test_from_ts` both say where test begins; keep one")
        if is_long and self.validation_from_ts is not None:
            raise ValueError(
                "`validation` and `validation_from_ts` both say where validation begins; keep one"
            )
        if self.test is not None and self.validation is True and self.validation_from_ts is None:
            raise ValueError(
                f"`test: {self.test}` leaves open how long validation is: give it a duration too, "
                "or `validation: false`"
            )

    @property
    def has_validation(self) -> bool:
        """Whether the config asks for a validation split."""
        if self.strategy == "sliding":
            return self.validation_days is not None
        return bool(self.validation) or self.validation_source is not None
