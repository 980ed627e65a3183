"""Inputs by day, where the day is a part of the path or a column: missing, empty, repeated days."""

from __future__ import annotations

import datetime
import fnmatch
import glob
import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.etl.sources import DATE_FIELD, ColumnConfig, DaysConfig
from conf.local_paths import is_data_path
from etl.sources.source import REASON_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


logger = logging.getLogger("sluice.sources")

_DIRECTIVE = re.compile(r"%[A-Za-z]")
_BLOCK_BYTES = 1 << 20
_SHOWN_DAYS = 5


def run_days(config: DaysConfig, dates: DateRange) -> DateRange:
    """The days that a source reads for a run: its own, and the lookback before them."""
    return dates.shift(config.lookback_days)


def day_pattern(path: str, config: DaysConfig, day: datetime.date) -> str:
    """The path of one day: the source's, with the day in place of `{date}`."""
    return path.replace(DATE_FIELD, glob.escape(day.strftime(config.format)))


def find_days(name: str, path: str, config: DaysConfig, root: Path) -> tuple[datetime.date, ...]:
    """Lists the days that a dated path has, from the first to the last, with those between.

    Hidden names that are no day are passed over, such as `_SUCCESS`.

    Args:
        name: The source's name.
        path: The source's path, no URI, with `{date}` in it.
        config: How days are written.
        root: Where a relative path starts from.

    Raises:
        InputDataError: A name has something else in the place of the day.
    """
    days = set()
    for match, day in _match_days(path, config, root):
        if day is not None:
            days.add(day)
        elif not _is_hidden_match(path, match):
            raise InputDataError(
                f"source {name!r}: a path has no day where {{date}} stands",
                received=match,
                allowed=f"days written as {config.format}",
                fix=f"set sources.{name}.days.format, or make the path more precise",
            )
    return DateRange(min(days), max(days)).days() if days else ()


def has_days(path: str, config: DaysConfig, root: Path) -> bool:
    """Whether a dated path has a day at all, whatever else stands beside it."""
    return any(day is not None for _, day in _match_days(path, config, root))


def _match_days(
    path: str, config: DaysConfig, root: Path
) -> Iterator[tuple[str, datetime.date | None]]:
    """What stands in the place of a day, each with its day; None where it is something else."""
    before, after = path.split(DATE_FIELD)
    level, _, _ = after.partition("/")
    literals = _DIRECTIVE.split(config.format)
    pattern = before + "*".join(literals) + level
    written = ".+?".join(re.escape(literal) for literal in literals)
    place = re.compile(f"{_translate(before)}({written}){_translate(level)}", re.DOTALL)
    for match in glob.glob(pattern, root_dir=root):  # noqa: PTH207 (may be absolute)
        text = place.fullmatch(match)
        yield match, _parse_day(text[1], config.format) if text else None


def _is_hidden_match(path: str, match: str) -> bool:
    above = path.split(DATE_FIELD)[0].rpartition("/")[0]
    parts = Path(match).parts[len(Path(above).parts) :]
    return not is_data_path("/".join(parts), is_recursive=True)


def _parse_day(text: str, written: str) -> datetime.date | None:
    try:
        day = datetime.datetime.strptime(text, written).date()
    except ValueError:
        return None
    return day if day.strftime(written) == text else None


def _translate(pattern: str) -> str:
    """A glob as a regular expression, to be followed by more."""
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def check_empty_days(name: str, config: DaysConfig, empty: Sequence[datetime.date]) -> None:
    """Refuses days without an input.

    Raises:
        InputDataError: There is one, and it is not allowed.
    """
    if not empty or config.allow_empty_days:
        return
    raise InputDataError(
        f"source {name!r} has nothing for {len(empty)} of its days",
        received=f"empty: {_show_days(empty)}",
        allowed="an input for each day of the run and of its lookback",
        fix=f"bring the day, shorten sources.{name}.days.lookback_days, or set "
        f"sources.{name}.days.allow_empty_days: true",
    )


def refuse_missing_days(
    name: str,
    config: DaysConfig,
    missing: Sequence[datetime.date],
    place: Path,
    *,
    has_others: bool,
) -> NoReturn:
    """Refuses to run while days of the run have no file.

    Args:
        name: The source's name.
        config: Its days.
        missing: The days.
        place: Where they are looked for.
        has_others: Whether there is a file of any other day.

    Raises:
        UpstreamNotReadyError: They may be late.
    """
    fix = "try again later"
    if not config.allow_empty_days:
        fix += f", or set sources.{name}.days.allow_empty_days: true"
    if not has_others:
        fix = f"correct --data or sources.{name}.path: no day has a file there; or {fix}"
    raise UpstreamNotReadyError(
        f"source {name!r} has no file yet for {len(missing)} of the run's days",
        received=f"{_show_days(missing)}; looked for {place}",
        allowed="a file for each day of the run"
        if not config.allow_empty_days
        else "a file for one of the run's days or more",
        fix=fix,
    )


def _show_days(days: Sequence[datetime.date]) -> str:
    shown = ", ".join(str(day) for day in days[:_SHOWN_DAYS])
    return shown + (f" and {len(days) - _SHOWN_DAYS} more" if len(days) > _SHOWN_DAYS else "")


def check_repeated_days(
    name: str, config: DaysConfig, files: Mapping[datetime.date, Collection[Path]]
) -> None:
    """Refuses two days with the same files, byte for byte: one of them is not that day.

    Files are read only where two days have files of the same sizes.

    Raises:
        InputDataError: Two days are the same, and the policy is `fail`.
    """
    if config.repeated_days == "ignore":
        return
    by_sizes: dict[tuple[int, ...], list[datetime.date]] = {}
    for day in sorted(files):
        sizes = tuple(sorted(path.stat().st_size for path in files[day]))
        if any(sizes):
            by_sizes.setdefault(sizes, []).append(day)
    for days in by_sizes.values():
        first: dict[tuple[str, ...], datetime.date] = {}
        for day in days if len(days) > 1 else ():
            content = tuple(sorted(_digest(path) for path in files[day]))
            if content in first:
                _report_repeated(name, config, first[content], day)
            first.setdefault(content, day)


def _report_repeated(
    name: str, config: DaysConfig, first: datetime.date, second: datetime.date
) -> None:
    what = f"source {name!r} has the same files for two days"
    if config.repeated_days == "warn":
        logger.warning("%s: %s and %s", what, first, second)
        return
    raise InputDataError(
        what,
        received=f"{first} and {second}",
        allowed="files of its own for each day",
        fix=f"take the wrong one out, or set sources.{name}.days.repeated_days to warn",
    )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


_EPOCH = datetime.date(1970, 1, 1)


def rows_of_days(
    frame: DataFrame,
    column: ColumnConfig,
    config: DaysConfig,
    dates: DateRange,
    raw: Column,
    found: T.DataType,
) -> DataFrame:
    """Keeps rows of a run's days, in terms that a table can prune its partitions by.

    A row whose day is null or cannot be told stays, to be counted as a bad row.
    """
    days = run_days(config, dates)
    after = days.last + datetime.timedelta(days=1)
    if isinstance(found, T.DateType):
        inside = raw.between(F.lit(days.first), F.lit(days.last))
    elif isinstance(found, T.TimestampType | T.TimestampNTZType):
        low, high = (F.lit(str(day)).cast(found) for day in (days.first, after))
        inside = (raw >= low) & (raw < high)
    elif column.type in ("string", "int64") and isinstance(found, T.StringType | T.LongType):
        inside = raw.isin(*_written(column, config, days.days()))
    else:
        return frame
    return frame.where(raw.isNull() | inside)


def value_in_days(
    column: ColumnConfig, config: DaysConfig, dates: DateRange, value: Column
) -> Column:
    """Whether a value as read lies in a run's days; null where there is no value."""
    days = run_days(config, dates)
    if column.type != "timestamp":
        return value.isin(*_written(column, config, days.days()))
    after = days.last + datetime.timedelta(days=1)
    return (value >= F.lit(_millis(days.first))) & (value < F.lit(_millis(after)))


def check_days_of_rows(
    name: str, config: DaysConfig, column: ColumnConfig, rows: DataFrame, dates: DateRange
) -> None:
    """Refuses a source that lacks rows of a day; scans its column of days once.

    Raises:
        InputDataError: A day has no good row, and it may not be empty.
    """
    if config.allow_empty_days:
        return
    value = F.col(column.name)
    if column.type == "timestamp":
        value = F.unix_date(F.timestamp_millis(value).cast("date"))
    good = rows.where(F.col(REASON_COLUMN).isNull())
    # No more rows than days come back.
    present = {row[0] for row in good.select(value).distinct().collect()}
    days = run_days(config, dates).days()
    keys: Iterable[object] = (
        [(day - _EPOCH).days for day in days]
        if column.type == "timestamp"
        else _written(column, config, days)
    )
    empty = [day for day, key in zip(days, keys, strict=True) if key not in present]
    check_empty_days(name, config, empty)


def _written(
    column: ColumnConfig, config: DaysConfig, days: Iterable[datetime.date]
) -> list[str] | list[int]:
    texts = [day.strftime(config.format) for day in days]
    return [int(text) for text in texts] if column.type == "int64" else texts


def _millis(day: datetime.date) -> int:
    return int(datetime.datetime.combine(day, datetime.time(), datetime.UTC).timestamp()) * 1000
