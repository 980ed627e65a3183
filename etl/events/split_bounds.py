"""When the splits of a build begin, as far as its config and its days tell before data is read."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from conf.dates import DateRange, read_duration
from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.etl.output import DATE_PARTITION
from conf.etl.split import SplitConfig
from conf.etl.time_columns import ms_per_unit

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000


@dataclass(frozen=True)
class SplitBounds:
    """First times of a temporal split, in the unit of the log; None: there is none, or not yet.

    Attributes:
        validation: Of the validation split.
        test: Of the test split.
    """

    validation: int | None
    test: int | None


def find_bounds(
    config: BuildConfig,
    end_ms: int | None = None,
    by_fractions: SplitBounds = SplitBounds(None, None),
) -> SplitBounds:
    """Finds the bounds of a temporal split.

    Args:
        config: The build's config.
        end_ms: The time that durations are counted back from, see `end_of_days` and `end_of_log`.
        by_fractions: Bounds where the config states neither a time nor a duration.
    """
    split, ms = config.split, ms_per_unit(config.events.time_unit)
    test = cast(int | None, split.test_from_ts)
    if test is None:
        test = by_fractions.test
        if split.test is not None and end_ms is not None:
            test = (end_ms - _read_ms(split.test)) // ms
    validation = cast(int | None, split.validation_from_ts)
    if isinstance(split.validation, str):
        validation = None if test is None else test - _read_ms(split.validation) // ms
    elif validation is None and by_fractions.validation is not None and test is not None:
        validation = min(by_fractions.validation, test)
    return SplitBounds(validation if split.validation else None, test)


def _read_ms(duration: str) -> int:
    return read_duration(duration) // datetime.timedelta(milliseconds=1)


def end_of_days(dates: DateRange | None) -> int | None:
    """Returns the end of a run's days, milliseconds since 1970; None for a run without days."""
    return None if dates is None else dates.span_ms[1]


def end_of_log(split: SplitConfig, newest_ms: int) -> int:
    """Returns the end of the day, or of the hour where test is in hours, of the newest sample."""
    step = _HOUR_MS if split.test is not None and "hour" in split.test else _DAY_MS
    return (newest_ms // step + 1) * step


@dataclass(frozen=True)
class SplitSpan:
    """The times of a split, milliseconds since 1970: from `first` on and before `end`.

    Attributes:
        first: None: from the start of the log.
        end: None: to its end.
    """

    first: int | None
    end: int | None

    def within(self, first: int, end: int) -> bool:
        """Whether it shares a moment with the times from `first` on and before `end`."""
        starts = first if self.first is None else max(first, self.first)
        ends = end if self.end is None else min(end, self.end)
        return starts < ends

    def to_json(self) -> list[str | None]:
        """Returns both bounds as ISO timestamps."""
        return [None if bound is None else _show(bound) for bound in (self.first, self.end)]

    def show(self) -> str:
        """Returns both bounds in words."""
        first, end = self.to_json()
        return " ".join(filter(None, (first and f"from {first}", end and f"until {end}")))


def _show(time_ms: int) -> str:
    try:
        time = _EPOCH + datetime.timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return time.strftime("%Y-%m-%dT%H:%M" if time_ms % 60_000 == 0 else "%Y-%m-%dT%H:%M:%S")


def plan_spans(config: BuildConfig, dates: DateRange | None) -> dict[str, SplitSpan]:
    """Returns the times of each split that the config and the run's days fix, by split.

    Splits that go by users, hashes or fractions have none, nor has a window that starts with the
    log.
    """
    if config.split.strategy == "sliding":
        return _plan_window(config.split)
    if config.split.strategy != "temporal" or config.events.time is None:
        return {}
    bounds = find_bounds(config, end_of_days(dates))
    ms = ms_per_unit(config.events.time_unit)
    test, validation = (None if b is None else b * ms for b in (bounds.test, bounds.validation))
    spans = {}
    if not config.split.validation and test is not None:
        spans["train"] = SplitSpan(None, test)
    if validation is not None:
        spans = {"train": SplitSpan(None, validation), "validation": SplitSpan(validation, test)}
    return spans if test is None else {**spans, "test": SplitSpan(test, None)}


def _plan_window(split: SplitConfig) -> dict[str, SplitSpan]:
    if split.start_date is None or split.train_days is None or split.test_days is None:
        return {}
    start = (split.start_date - _EPOCH.date()).days
    start += split.window * (split.step_days or split.test_days)
    parts = {"train": split.train_days, "validation": split.validation_days or 0}
    spans = {}
    for name, days in {**parts, "test": split.test_days}.items():
        if days:
            spans[name] = SplitSpan(start * _DAY_MS, (start + days) * _DAY_MS)
        start += days
    return spans


def check_spans(config: BuildConfig, dates: DateRange | None) -> None:
    """Refuses a run that would leave a split empty whatever the log holds.

    A run that replaces days of a dataset need not have each split.

    Raises:
        ConfigError: A split ends before it begins or lies outside the run's days, or a window has
            more splits than the run has days.
    """
    spans = plan_spans(config, dates)
    replaces = config.output.partition_overwrite == "dynamic"
    days = None if dates is None or replaces else dates
    if days is not None and config.split.strategy == "sliding":
        _check_days_of_window(config.split, days)
    span_ms = (-(2**63), 2**63) if days is None else days.span_ms
    empty = [name for name, span in spans.items() if not span.within(*span_ms)]
    if not empty:
        return
    received = [f"{name} {spans[name].show()}" for name in spans]
    if days is not None:
        received.append(f"the run is of {days.first} to {days.last}")
    raise ConfigError(
        f"the {' and the '.join(empty)} split would be empty",
        received="; ".join(received),
        allowed="a time for each split" + (" in the run's days" if days is not None else ""),
        fix=_advise(config.split, spans, days),
    )


def _check_days_of_window(split: SplitConfig, days: DateRange) -> None:
    """Each split of a window has whole days, none of which another has, wherever it starts."""
    names = ["train", *(["validation"] if split.validation_days else []), "test"]
    given = len(days.days())
    if given < len(names):
        raise ConfigError(
            "a split of the sliding window would be empty: the run has fewer days than the "
            "window has splits",
            received=f"{days.first} to {days.last}: {given} day{'s' * (given > 1)}",
            allowed=f"a day or more for each of {', '.join(names)}",
            fix="build more days by --date and --date-to, or split by `strategy: temporal` in "
            "hours, such as `test: 3 hours`",
        )


def _advise(split: SplitConfig, spans: Mapping[str, SplitSpan], days: DateRange | None) -> str:
    if split.test is None or days is None:
        return "move the bounds of `split`" + ("" if days is None else ", or build other days")
    held_out = spans["train"].end or 0
    first = (_EPOCH + datetime.timedelta(milliseconds=held_out - 1)).date()
    return (
        f"build more days (--date {first} --date-to {days.last}), or hold out less, such as "
        "`test: 3 hours`, or by fractions (test_fraction, validation_fraction)"
    )


def check_built_by_day(config: BuildConfig) -> None:
    """Refuses what makes other records of an event where other days are read with its own.

    Days that are built one by one would not fit each other: an event is the last one of its user,
    or the newest of the log, only until the next day is there.
    """
    for received, allowed in _list_moving(config):
        raise ConfigError(
            "output.partition_overwrite: dynamic keeps records of other days, and this makes "
            "other ones of an event with each day that follows it",
            received=received,
            allowed=allowed,
            fix="change it, or build all days in each run: --set output.partition_overwrite=static",
        )


def _list_moving(config: BuildConfig) -> Iterator[tuple[str, str]]:
    """Yields what of a config moves with the days that are read, and what would not."""
    yield from _list_moving_splits(config.split)
    for source in (config.split.test_source, config.split.validation_source):
        # Events without times come after whatever log is read.
        if source is not None and config.sources[source].column(config.events.time or "") is None:
            received = f"split.strategy: given, with events of {source!r} that have no time"
            yield received, f"given events with the log's column {config.events.time!r}"
    if config.train_samples != "all":
        received = f"train_samples: {config.train_samples}, counted from each user's last event"
        yield received, "train_samples: all"
    if config.weights is not None and config.weights.half_life_days is not None:
        received = f"weights.half_life_days: {config.weights.half_life_days:g}"
        yield received, "weights without half_life_days: it counts from the newest event"
    if DATE_PARTITION in config.output.partition_by and DATE_PARTITION in config.event_column_types:
        yield (
            f"a column {DATE_PARTITION!r} of the log, which may hold other days than a run reads",
            f"no such column: {DATE_PARTITION!r} is then the UTC day of the event's time",
        )


def _list_moving_splits(split: SplitConfig) -> Iterator[tuple[str, str]]:
    fixed = "temporal with fixed test_from_ts and validation_from_ts"
    others = f"{fixed}, hash, sliding with start_date, given with validation_source"
    keeps_validation = split.validation is not True or split.validation_from_ts is not None
    if split.strategy == "temporal" and not (split.test_from_ts is not None and keeps_validation):
        how = "by fractions" if split.test is None else f"test: {split.test}"
        yield f"split.strategy: temporal, {how}", f"{fixed}, or another strategy"
    if split.strategy == "leave_one_out":
        yield "split.strategy: leave_one_out, the last events of each user", others
    if split.strategy == "sliding" and split.start_date is None:
        yield "split.strategy: sliding without start_date, from the log's first day", others
    if split.strategy == "given" and split.validation is True and split.validation_source is None:
        yield "split.strategy: given, with validation from the end of the log", others
