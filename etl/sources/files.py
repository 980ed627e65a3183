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
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.etl.sources import DATE_FIELD, ColumnConfig, DaysConfig, SourceConfig
from conf.local_paths import is_hidden, list_visible_files, local_path, match_visible
from conf.manifest import InputFile
from etl.sources.source import COLUMN_FORMATS, REASON_COLUMN
from etl.tfrecord.files.data_files import parse_partition_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.sources")

Found = Mapping[Path, Path]
"""Files, links resolved, and where each stands below the source's path."""


@dataclass(frozen=True)
class Listing:
    """The files of a source; of a dated path by day, also of days without one."""

    name: str
    config: SourceConfig
    root: Path
    found: Found
    by_day: Mapping[datetime.date, Found]

    def folder_texts(self) -> dict[str, dict[str, str | None]]:
        """By field what the folders of each file say, such as `country=DE`, and the path's day."""
        fields = {c.field_name.lower(): c.field_name for c in self.config.columns}
        texts: dict[str, dict[str, str | None]] = {}
        if (made := self.config.made_day_column) is not None:
            texts[made] = {str(f): str(day) for day, files in self.by_day.items() for f in files}
        for file, given in self.found.items():
            place = given.relative_to(self.root) if given.is_relative_to(self.root) else given
            parts = [p for p in place.parent.parts if p.partition("=")[0].lower() in fields]
            for key, text in parse_partition_path("/".join(parts)).items():
                texts.setdefault(fields[key.lower()], {})[str(file)] = text
        return texts


def list_files(
    name: str, config: SourceConfig, data_dir: str, dates: DateRange | None = None
) -> Listing:
    """Lists the files of a source: a file, the visible ones of a folder, or a glob, by day."""
    root, days = local_path(data_dir), config.days
    path = local_path(config.path or "")
    if days is None or not config.day_in_path:
        found = {} if config.path is None else _find(path, root)
        return Listing(name, config, root, found, {})
    if dates is not None:
        wanted = dates.shift(days.lookback_days).days()
    else:
        wanted = _find_days(name, str(path), days.format, root)
    by_day = {}
    for day in wanted:
        written = glob.escape(day.strftime(days.format))
        by_day[day] = _find(Path(str(path).replace(DATE_FIELD, written)), root)
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
    found: dict[Path, Path] = {}  # A file that is reached twice, by a link, counts once.
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
    day = f"({'.+?'.join(map(re.escape, literals))})"
    place = re.compile(fnmatch.translate(f"{before}\0{level}").replace("\0", day))
    days = set()
    for match in match_visible(root, Path(before + "*".join(literals) + level)):
        text, found = place.fullmatch(str(match)), None
        with contextlib.suppress(ValueError):
            found = datetime.datetime.strptime(text[1] if text else "", written).date()
        if text is None or found is None or found.strftime(written) != text[1]:
            raise InputDataError(
                f"source {name!r}: {match} has no day, written as {written}, in the place of it",
                fix=f"set sources.{name}.days.format, or make the path more precise",
            )
        days.add(found)
    return DateRange(min(days), max(days)).days() if days else ()


def check_files(
    listing: Listing, dates: DateRange | None, *, is_log: bool = False
) -> tuple[InputFile, ...]:
    """Describes the files of a listing, and refuses what is missing or empty; a table has none."""
    name, config, by_day = listing.name, listing.config, listing.by_day
    if config.path is None:
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
            received=listing.root / local_path(config.path),
            fix=f"correct sources.{name}.path, or give the folder by --data",
        )
    empty = [day for day, found in by_day.items() if not any(f.stat().st_size for f in found)]
    if len(empty) < len(by_day):
        check_empty_days(name, config, empty)
        _check_repeated_days(name, by_day)
    _check_bytes(name, config, files)
    return files


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


_NEVER_EMPTY = (".parquet", ".orc", ".avro", ".gz", ".zst", ".bz2", ".snappy", ".lz4")


def _check_bytes(name: str, config: SourceConfig, files: Sequence[InputFile]) -> None:
    """Refuses files that end before their first byte: Spark would pass them over without a word."""
    empty = [file.path for file in files if not file.bytes]
    of_columns = config.format in COLUMN_FORMATS
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


def _require_days(listing: Listing, dates: DateRange, *, is_log: bool) -> None:
    """Refuses to run while days of the run have no file: they may be late."""
    name, days = listing.name, listing.config.days or DaysConfig()
    missing = [day for day in dates.days() if not listing.by_day.get(day, True)]
    # Where days may be empty, one must have a file: of a log a day of the run, not of the lookback.
    is_all = is_log and len(missing) == len(dates.days())
    if missing and (is_all or not (days.allow_empty_days and listing.found)):
        raise UpstreamNotReadyError(
            f"source {name!r} has no file yet for {len(missing)} of the run's days",
            received=f"{_show_days(missing)}; looked for {listing.config.path}",
            fix=f"try again later, or correct --data, sources.{name}.path or .days",
        )


def check_empty_days(name: str, config: SourceConfig, empty: Sequence[datetime.date]) -> None:
    """Refuses days without an input, unless they are allowed."""
    if empty and config.days is not None and not config.days.allow_empty_days:
        raise InputDataError(
            f"source {name!r} has nothing for {len(empty)} of its days: {_show_days(empty)}",
            fix=f"bring the day, shorten sources.{name}.days.lookback_days, or set "
            f"sources.{name}.days.allow_empty_days: true",
        )


def _show_days(days: Sequence[datetime.date]) -> str:
    return ", ".join(map(str, days[:5])) + (", …" if len(days) > 5 else "")


def _check_repeated_days(name: str, by_day: Mapping[datetime.date, Found]) -> None:
    """Refuses two days with the same files, byte for byte; only those of one size are read."""
    sizes = {day: sorted(f.stat().st_size for f in found) for day, found in by_day.items()}
    known: dict[tuple[bytes, ...], datetime.date] = {}
    for day, own in sorted(sizes.items()):
        if not any(own) or list(sizes.values()).count(own) == 1:
            continue
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


@dataclass(frozen=True)
class RowDays:
    """The days that a run reads, where a column of the input tells the day of a row."""

    column: ColumnConfig
    days: DateRange
    keys: Mapping[datetime.date, Any]
    """What the column says of each day; of a timestamp it is the day."""
    allow_empty: bool

    def prune(self, frame: DataFrame, raw: Column, found: T.DataType) -> DataFrame:
        """Keeps rows of the days, and bad ones without a day, in terms that prune partitions."""
        first, end = self.days.first, self.days.last + _DAY
        if isinstance(found, T.DateType):
            inside = raw.between(F.lit(first), F.lit(self.days.last))
        elif isinstance(found, T.TimestampType | T.TimestampNTZType):
            low, high = (F.lit(str(day)).cast(found) for day in (first, end))
            inside = (raw >= low) & (raw < high)
        elif self.column.type != "timestamp" and isinstance(found, T.StringType | T.LongType):
            inside = raw.isin(*self.keys.values())
        else:
            return frame
        return frame.where(raw.isNull() | inside)

    def is_inside(self, value: Column) -> Column:
        """Whether a value as read is of one of the days; null where there is no value."""
        if self.column.type != "timestamp":
            return value.isin(*self.keys.values())
        first, end = self.days.span_ms
        return (value >= F.lit(first)) & (value < F.lit(end))

    def find_empty(self, rows: DataFrame) -> list[datetime.date]:
        """The days without a good row; scans the column once."""
        value = F.col(self.column.name)
        if self.column.type == "timestamp":
            value = F.timestamp_millis(value).cast("date")
        # No more rows than days come back.
        good = rows.where(F.col(REASON_COLUMN).isNull())
        present = {row[0] for row in good.select(value).distinct().collect()}
        return [day for day, key in self.keys.items() if key not in present]


def find_row_days(config: SourceConfig, dates: DateRange | None) -> RowDays | None:
    """The days of a run that a declared column tells; None: no column does, or all are read."""
    column = config.day_column
    if dates is None or config.days is None or column is None:
        return None
    days, written = dates.shift(config.days.lookback_days), config.days.format
    keys: dict[datetime.date, Any] = {day: day for day in days.days()}
    if column.type != "timestamp":
        kind = int if column.type == "int64" else str
        keys = {day: kind(day.strftime(written)) for day in keys}
    return RowDays(column, days, keys, config.days.allow_empty_days)
