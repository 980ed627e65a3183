"""The train, validation and test split of the events."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from conf.config_base import Strict
from conf.dates import read_duration

Strategy = Literal["leave_one_out", "temporal", "hash", "sliding", "given"]


def _read_moment(value: object) -> object:
    """Reads a date or timestamp; a duration and the name of a source stay text."""
    try:
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value)
    except ValueError:
        pass
    if type(value) is datetime.date:
        return datetime.datetime.combine(value, datetime.time())
    return value


Bound = int | float | str | datetime.datetime

LEAST_EVENTS = 3
"""Events that a user must have for one to be held out."""
DEFAULT_FRACTION = 0.1
_DAY = datetime.timedelta(days=1)
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a fraction",
    str: "text",
    datetime.datetime: "a date",
}
# The types that `test` and `validation` may have, and the other keys that a strategy reads.
_TEST: dict[str, tuple[type, ...]] = {
    "leave_one_out": (),
    "temporal": (int, float, str, datetime.datetime),
    "hash": (float,),
    "sliding": (str,),
    "given": (str,),
}
_VALIDATION: dict[str, tuple[type, ...]] = {
    "leave_one_out": (bool, int),
    "temporal": (bool, int, float, str, datetime.datetime),
    "hash": (bool, float),
    "sliding": (bool, str),
    "given": (bool, int, float, str),
}
_STRATEGY_OF_KEYS = {
    "key": "hash",
    "train": "sliding",
    "step_days": "sliding",
    "window": "sliding",
    "start_date": "sliding",
    "candidates": "given",
}
"""Of other strategies, a value that is not the default would be ignored."""


class SplitConfig(Strict):
    """The split of an event.

    `leave_one_out`: each user's last event is test, the one before it, of `validation` users
    (chosen by a hash of their id; true: all), is validation, the rest train; users with fewer than
    three stay in train. `temporal`: events from the time `validation` or `test` on; or the last
    `test` and the `validation` before it, such as `1 day` each, counted back from the end of the
    run's last day, without `--date` from the end of the last sample's day (hour, where `test` is in
    hours); or the last fractions in time (0.1), of the run's own days where it has some. `hash`:
    fractions (0.1) by a hash of `key`, so that all rows of a key stay together. `sliding`: window
    number `window` of a backtest, each `step_days` later than the one before: the days of `train`,
    then `validation` if given, then `test`; events outside are left out. `given`: the source `test`
    holds the test events, the source `validation` those of validation, the log the others; without
    the latter, validation is the end of the log as in leave_one_out, or, without users, a fraction
    of it by hash.
    """

    strategy: Strategy = Field("leave_one_out", description="How events are split: see above.")
    test: Annotated[Bound | None, BeforeValidator(_read_moment)] = Field(
        None,
        description="A fraction, a duration (`1 day`, `6 hours`), a first time (a date or "
        "timestamp, UTC unless it says another zone, or a number in the log's unit), or a source.",
    )
    validation: Annotated[bool | Bound, BeforeValidator(_read_moment)] = Field(
        True, description="As `test`, or a number of users; false: there is none."
    )
    key: str | None = Field(
        None, description="hash: column; None: the user, or the row's content where there is none."
    )
    train: str | None = Field(None, description="sliding: how long the train split is.")
    step_days: int | None = Field(None, ge=1, description="sliding; None: as long as `test`.")
    window: int = Field(0, ge=0, description="sliding: which window, 0 is the first.")
    start_date: datetime.date | None = Field(
        None, description="sliding: UTC day that window 0 begins on; None: the log's first."
    )
    candidates: str | None = Field(None, description="given: column of `test`: items to rank.")

    @model_validator(mode="after")
    def _consistent(self) -> SplitConfig:
        for name, strategy in _STRATEGY_OF_KEYS.items():
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if self.strategy != strategy and not is_default:
                raise ValueError(
                    f"`{name}` goes with `strategy: {strategy}`, and only with it; the strategy is "
                    f"{self.strategy}"
                )
        self._check_form("test", _TEST[self.strategy])
        self._check_form("validation", _VALIDATION[self.strategy])
        if self.strategy in ("given", "sliding") and self.test is None:
            raise ValueError(f"`strategy: {self.strategy}` needs `test`")
        if self.strategy == "sliding" and self.train is None:
            raise ValueError("`strategy: sliding` needs `train`, such as `28 days`")
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError("`test` and `validation` leave nothing to train on")
        self._check_durations()
        return self

    def _check_form(self, name: str, allowed: tuple[type, ...]) -> None:
        value = getattr(self, name)
        if value is None or type(value) in allowed:
            is_fraction = isinstance(value, float) and self.strategy != "leave_one_out"
            if is_fraction and not 0 < value < 1:
                raise ValueError(f"`{name}`: a fraction lies between 0 and 1; received {value}")
            return
        words = ", ".join(_WORDS[kind] for kind in allowed) or "left out"
        raise ValueError(
            f"`{name}` of `strategy: {self.strategy}` is {words}; received {value!r}: a split of "
            "another strategy was meant?"
        )

    def _check_durations(self) -> None:
        durations = (self.test_duration, self.validation_duration, self.train)
        for duration in filter(None, durations):
            if read_duration(duration) % _DAY and self.strategy == "sliding":
                raise ValueError(f"{duration!r}: a sliding window is of whole days")
        if self.strategy == "temporal" and self.test_duration and self.validation is True:
            raise ValueError(
                f"`test: {self.test}` leaves open how long validation is: give it a duration too, "
                "or `validation: false`"
            )

    @property
    def has_validation(self) -> bool:
        """Whether the config asks for a validation split."""
        if self.strategy == "sliding":
            return self.validation_duration is not None
        return self.validation is not False

    @property
    def test_fraction(self) -> float:
        """Share of the test split, of splits by fractions."""
        return self.test if isinstance(self.test, float) else DEFAULT_FRACTION

    @property
    def validation_fraction(self) -> float:
        """Share of the validation split, of splits by fractions."""
        return self.validation if isinstance(self.validation, float) else DEFAULT_FRACTION

    @property
    def test_duration(self) -> str | None:
        """How long the test split is."""
        return _text(self.test, self.strategy != "given")

    @property
    def validation_duration(self) -> str | None:
        """How long the validation split is."""
        return _text(self.validation, self.strategy != "given")

    @property
    def test_source(self) -> str | None:
        """Source of the test events."""
        return _text(self.test, self.strategy == "given")

    @property
    def validation_source(self) -> str | None:
        """Source of the validation events."""
        return _text(self.validation, self.strategy == "given")

    @property
    def test_from_ts(self) -> int | datetime.datetime | None:
        """First time of the test split; a number, in the log's unit, once the log is known."""
        return _moment(self.test)

    @property
    def validation_from_ts(self) -> int | datetime.datetime | None:
        """First time of the validation split, likewise."""
        return _moment(self.validation) if self.strategy == "temporal" else None

    @property
    def validation_users(self) -> int | None:
        """Users whose events are held out for validation; None: all."""
        return None if self.strategy == "temporal" else _number(self.validation)

    @property
    def window_days(self) -> tuple[int, int, int]:
        """Days of the train, validation and test split of a window; 0: it has none."""
        parts = (self.train, self.validation_duration, self.test_duration)
        train, validation, test = (read_duration(part) // _DAY if part else 0 for part in parts)
        return train, validation, test


def _text(value: object, is_asked: bool) -> str | None:
    return value if isinstance(value, str) and is_asked else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _moment(value: object) -> int | datetime.datetime | None:
    return value if isinstance(value, datetime.datetime) else _number(value)
