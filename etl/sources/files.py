"""The input files of a source, and its days: which there are, and which are missing or empty."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import glob
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.etl.sources import DATE_FIELD, ColumnConfig, DaysConfig, SourceConfig
from conf.local_paths import is_hidden, list_visible_files, local_path, match_visible
from conf.manifest import InputFile
from etl.sources.source import REASON_COLUMN
from etl.tfrecord.files.data_files import parse_partition_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.sources")

Found = Mapping[Path, Path]
"""Files, links resolved, and where each stands below the source's path."""


@dataclass(frozen=True)
class Listing:
    """The files of a source as they stand; of a dated path by day, also of days without one."""

    name: str
    config: SourceConfig
    root: Path
    found: Found
    by_day: Mapping[datetime.date, Found]

    def folder_texts(self) -> dict[str, dict[str, str | None]]:
        """By field of a declared column what the folders of each file say, such as `country=DE`."""
        fields = {c.field_name.lower(): c.field_name for c in self.config.columns}
        texts: dict[str, dict[str, str | None]] = {}
        for file, given in self.found.items():
            place = given.relative_to(self.root) if given.is_relative_to(self.root) else given
            parts = [p for p in place.parent.parts if p.partition("=")[0].lower() in fields]
            for key, text in parse_partition_path("/".join(parts)).items():
                texts.setdefault(fields[key.lower()], {})[str(file)] = text
        return texts

    def day_texts(self) -> dict[str, str]:
        """The day of each file of a dated path."""
        return {str(file): str(day) for day, files in self.by_day.items() for file in files}


def list_files(
    name: str, config: SourceConfig, data_dir: str, dates: DateRange | None = None
) -> Listing:
    """Lists the files of a source: a file, all of a folder, or a glob, of each day if dated.

    Hidden files and folders (a name with `.` or `_` in front, or one that Hadoop is still copying)
    are left out, as Spark leaves them out. Folders that links lead to are listed too. A file that
    is reached twice, by a link, counts once.
    """
    root, days = local_path(data_dir), config.days
    if config.path is None:
        return Listing(name, config, root, {}, {})
    path = local_path(config.path)
    if days is None or not config.day_in_path:
        return Listing(name, config, root, _find(path, root), {})
    if dates is not None:
        wanted = dates.shift(days.lookback_days).days()
    else:
        wanted = _find_days(name, str(path), days.format, root)
    texts = {day: glob.escape(day.strftime(days.format)) for day in wanted}
    by_day = {
        day: _find(Path(str(path).replace(DATE_FIELD, text)), root) for day, text in texts.items()
    }
    found = {file: given for files in by_day.values() for file, given in files.items()}
    return Listing(name, config, root, found, by_day)


def _find(path: Path, root: Path) -> Found:
    base = root / path
    if base.is_dir():
        entries = list_visible_files(base)
    elif base.is_file():
        entries = [base]
    else:
        entries = sorted(root / match for match in match_visible(root, path))
    found: dict[Path, Path] = {}
    for entry in entries:
        file = entry.resolve()
        if file.is_file() and not (is_hidden(entry.name) or is_hidden(file.name)):
            found.setdefault(file, entry)
    return found


_DIRECTIVE = re.compile(r"%[A-Za-z]")


def _find_days(name: str, path: str, written: str, root: Path) -> tuple[datetime.date, ...]:
    """The days that a dated path has, from the first to the last, with those between."""
    before, after = path.split(DATE_FIELD)
    level, _, _ = after.partition("/")
    literals = _DIRECTIVE.split(written)
    day = ".+?".join(map(re.escape, literals))
    place = re.compile(f"{_translate(before)}({day}){_translate(level)}", re.DOTALL)
    days = set()
    for match in match_visible(root, Path(before + "*".join(literals) + level)):
        text = place.fullmatch(str(match))
        found = _parse_day(text[1], written) if text else None
        if found is None:
            raise InputDataError(
                f"source {name!r}: {match} has no day, written as {written}, in the place of it",
                fix=f"set sources.{name}.days.format, or make the path more precise",
            )
        days.add(found)
    return DateRange(min(days), max(days)).days() if days else ()


def _translate(pattern: str) -> str:
    """A glob as a regular expression, to be followed by more."""
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _parse_day(text: str, written: str) -> datetime.date | None:
    try:
        day = datetime.datetime.strptime(text, written).date()
    except ValueError:
        return None
    return day if day.strftime(written) == text else None


def find_files(
    name: str,
    config: SourceConfig,
    data_dir: str,
    dates: DateRange | None = None,
    *,
    is_log: bool = False,
) -> tuple[InputFile, ...]:
    """Lists the files of a source, and refuses what is missing or empty; a table has none."""
    return check_files(list_files(name, config, data_dir, dates), dates, is_log=is_log)


def check_files(
    listing: Listing, dates: DateRange | None, *, is_log: bool = False
) -> tuple[InputFile, ...]:
    """Describes the files of a listing; refuses what is missing or empty."""
    name, by_day = listing.name, listing.by_day
    if listing.config.path is None:
        return ()
    if not listing.root.is_dir():
        raise ConfigError(
            f"there is no folder {listing.root} of sources",
            fix="correct --data, or `data_dir` of the config",
        )
    if dates is not None:
        _require_days(listing, dates, is_log=is_log)
    files = describe_files(listing)
    if not files:
        raise InputDataError(
            f"source {name!r}: no such file, and no visible one in it",
            received=listing.root / local_path(listing.config.path or ""),
            fix=f"correct sources.{name}.path, or give the folder by --data",
        )
    empty = [day for day, found in by_day.items() if not any(f.stat().st_size for f in found)]
    if listing.config.days is not None and len(empty) < len(by_day):
        check_empty_days(name, listing.config.days, empty)
        _check_repeated_days(name, by_day)
    _check_bytes(name, listing.config, files)
    return files


_NEVER_EMPTY = (".parquet", ".orc", ".avro", ".gz", ".zst", ".bz2", ".snappy", ".lz4")


def _check_bytes(name: str, config: SourceConfig, files: Sequence[InputFile]) -> None:
    """Refuses files without a byte, of all of a source or where a format has some in any file.

    Spark would pass the latter over, and its rows would be missing.
    """
    empty = [file.path for file in files if not file.bytes]
    of_columns = config.format in ("parquet", "orc", "avro")
    cut = [path for path in empty if of_columns or path.endswith(_NEVER_EMPTY)]
    if cut or len(empty) == len(files):
        raise InputDataError(
            f"source {name!r} has {len(empty)} files without a byte, of {len(files)}",
            received=(cut or empty)[0],
            fix="write them again" if cut else "bring the rows, or build other days",
        )
    if empty:
        said = "source %s: %d of %d files are empty, such as %s"
        logger.warning(said, name, len(empty), len(files), empty[0])


def describe_files(listing: Listing) -> tuple[InputFile, ...]:
    """Describes the files of a listing as they stand."""
    files = []
    for file in sorted(listing.found):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            files.append(describe_input(listing.name, file))
    return tuple(files)


def describe_input(name: str, file: Path) -> InputFile:
    """Describes a file as it stands: its size, and what changes with each write."""
    stat = file.stat()
    # The time of the last write can be set back, and two writes of one size may share it; what the
    # kernel keeps of the last change of any kind cannot. A file in its place is another inode.
    state = f"{stat.st_mtime_ns}.{stat.st_ctime_ns}.{stat.st_ino}"
    return InputFile(name, str(file), stat.st_size, stat.st_mtime_ns // 1_000_000, state)


def _require_days(listing: Listing, dates: DateRange, *, is_log: bool) -> None:
    """Refuses to run while days of the run have no file: they may be late.

    Where days may be empty, some must have one; a log needs files of the run's own days, other
    sources do with those of the lookback.
    """
    name, days = listing.name, listing.config.days or DaysConfig()
    missing = [day for day in dates.days() if not listing.by_day.get(day, True)]
    is_all = is_log and len(missing) == len(dates.days())
    if not missing or (days.allow_empty_days and listing.found and not is_all):
        return
    allow = "" if days.allow_empty_days else f", or set sources.{name}.days.allow_empty_days: true"
    raise UpstreamNotReadyError(
        f"source {name!r} has no file yet for {len(missing)} of the run's days",
        received=f"{_show_days(missing)}; looked for {listing.root / (listing.config.path or '')}",
        fix=f"try again later, or correct --data or sources.{name}.path{allow}",
    )


def check_empty_days(name: str, config: DaysConfig, empty: Sequence[datetime.date]) -> None:
    """Refuses days without an input, unless they are allowed."""
    if empty and not config.allow_empty_days:
        raise InputDataError(
            f"source {name!r} has nothing for {len(empty)} of its days: {_show_days(empty)}",
            fix=f"bring the day, shorten sources.{name}.days.lookback_days, or set "
            f"sources.{name}.days.allow_empty_days: true",
        )


_SHOWN_DAYS = 5


def _show_days(days: Sequence[datetime.date]) -> str:
    shown = ", ".join(str(day) for day in days[:_SHOWN_DAYS])
    return shown + (f" and {len(days) - _SHOWN_DAYS} more" if len(days) > _SHOWN_DAYS else "")


def _check_repeated_days(name: str, by_day: Mapping[datetime.date, Found]) -> None:
    """Refuses two days with the same files, byte for byte: one of them is not that day.

    Files are read only where two days have files of the same sizes.
    """
    by_sizes: dict[tuple[int, ...], list[datetime.date]] = {}
    for day, files in sorted(by_day.items()):
        sizes = tuple(sorted(path.stat().st_size for path in files))
        if any(sizes):
            by_sizes.setdefault(sizes, []).append(day)
    known: dict[tuple[bytes, ...], datetime.date] = {}
    for day in (day for days in by_sizes.values() if len(days) > 1 for day in days):
        first = known.setdefault(tuple(sorted(map(_digest, by_day[day]))), day)
        if first != day:
            raise InputDataError(
                f"source {name!r} has the same files for two days: {first} and {day}",
                fix="take the wrong one out",
            )


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


_DAY = datetime.timedelta(days=1)


def rows_of_days(
    frame: DataFrame,
    column: ColumnConfig,
    config: DaysConfig,
    dates: DateRange,
    field: tuple[Column, T.DataType],
) -> DataFrame:
    """Keeps rows of a run's days, in terms that a table can prune its partitions by.

    A row whose day is null or cannot be told stays, to be counted as a bad row.
    """
    days, (raw, found) = dates.shift(config.lookback_days), field
    if isinstance(found, T.DateType):
        inside = raw.between(F.lit(days.first), F.lit(days.last))
    elif isinstance(found, T.TimestampType | T.TimestampNTZType):
        low, high = (F.lit(str(day)).cast(found) for day in (days.first, days.last + _DAY))
        inside = (raw >= low) & (raw < high)
    elif column.type in ("string", "int64") and isinstance(found, T.StringType | T.LongType):
        inside = raw.isin(*_write_days(column, config, days))
    else:
        return frame
    return frame.where(raw.isNull() | inside)


def value_in_days(
    column: ColumnConfig, config: DaysConfig, dates: DateRange, value: Column
) -> Column:
    """Whether a value as read lies in a run's days; null where there is no value."""
    days = dates.shift(config.lookback_days)
    if column.type != "timestamp":
        return value.isin(*_write_days(column, config, days))
    first, end = days.span_ms
    return (value >= F.lit(first)) & (value < F.lit(end))


def check_days_of_rows(
    name: str, config: DaysConfig, column: ColumnConfig, rows: DataFrame, dates: DateRange
) -> None:
    """Refuses a source that lacks good rows of a day; scans its column of days once."""
    if config.allow_empty_days:
        return
    days, value = dates.shift(config.lookback_days), F.col(column.name)
    if column.type == "timestamp":
        value = F.timestamp_millis(value).cast("date")
    # No more rows than days come back.
    good = rows.where(F.col(REASON_COLUMN).isNull())
    present = {row[0] for row in good.select(value).distinct().collect()}
    keys = days.days() if column.type == "timestamp" else _write_days(column, config, days)
    pairs = zip(days.days(), keys, strict=True)
    check_empty_days(name, config, [day for day, key in pairs if key not in present])


def _write_days(column: ColumnConfig, config: DaysConfig, days: DateRange) -> list[str] | list[int]:
    texts = [day.strftime(config.format) for day in days.days()]
    return [int(text) for text in texts] if column.type == "int64" else texts
