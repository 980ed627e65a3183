"""Paths by day: which days there are, which are empty, and which stand there twice."""

from __future__ import annotations

import datetime
import fnmatch
import glob
import hashlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl import DaysConfig
from conf.etl.sources import DATE_FIELD

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

    Args:
        name: The source's name.
        path: The source's path, with `{date}` in it.
        config: How days are written.
        root: Where a relative path starts from.

    Raises:
        InputDataError: A name has something else in the place of the day.
    """
    before, after = path.split(DATE_FIELD)
    level, _, _ = after.partition("/")
    literals = _DIRECTIVE.split(config.format)
    pattern = before + "*".join(literals) + level
    matches = glob.glob(pattern, root_dir=root)  # noqa: PTH207 (may be absolute)
    written = ".+?".join(re.escape(literal) for literal in literals)
    place = re.compile(f"{_translate(before)}({written}){_translate(level)}", re.DOTALL)
    found = set()
    for match in matches:
        text = place.fullmatch(match)
        day = _parse_day(text[1], config.format) if text else None
        if day is None:
            raise InputDataError(
                f"source {name!r}: a path has no day where {{date}} stands",
                received=match,
                allowed=f"days written as {config.format}",
                fix=f"set sources.{name}.days.format, or make the path more precise",
            )
        found.add(day)
    return DateRange(min(found), max(found)).days() if found else ()


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
    shown = ", ".join(str(day) for day in empty[:_SHOWN_DAYS])
    more = f" and {len(empty) - _SHOWN_DAYS} more" if len(empty) > _SHOWN_DAYS else ""
    raise InputDataError(
        f"source {name!r} has nothing for {len(empty)} of its days",
        received=f"empty: {shown}{more}",
        allowed="an input for each day of the run and of its lookback",
        fix=f"bring the day, shorten sources.{name}.days.lookback_days, or set "
        f"sources.{name}.days.allow_empty_days: true",
    )


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
