"""The input files of a source, and its days: which there are, and which are missing or empty."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import glob
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.etl.sources import DATE_FIELD, ColumnConfig, DaysConfig, SourceConfig
from conf.local_paths import is_data_path, is_hidden, list_visible_files, local_path
from conf.manifest import InputFile
from etl.sources.source import REASON_COLUMN
from etl.tfrecord.files.data_files import parse_partition_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.sources")

Found = dict[Path, Path]
"""Files, links resolved, and where each stands below the source's path."""
Days = Mapping[datetime.date, Found]
"""The files of each day."""


def find_files(
    name: str,
    config: SourceConfig,
    data_dir: str,
    dates: DateRange | None = None,
    *,
    is_log: bool = False,
) -> tuple[InputFile, ...]:
    """Lists the files of a source: a file, all of a directory, or a glob, of each day if dated.

    Hidden files and folders (a name with `.` or `_` in front, or one that Hadoop is still copying)
    are left out, as Spark leaves them out. Folders that links lead to are listed too. A file that
    is reached twice, by a link, counts once.
    """
    if config.path is None:
        return ()
    root = local_path(data_dir)
    if not root.is_dir():
        raise ConfigError(
            "there is no such folder for sources",
            received=data_dir,
            fix="correct --data, or `data_dir` of the config",
        )
    by_day = find_files_by_day(name, config, data_dir, dates)
    if config.days is not None and dates is not None:
        _require_days(name, config, root, by_day, dates, is_log=is_log)
    paths = _list_files(name, config, data_dir, by_day)
    if config.days is not None and by_day:
        empty = [day for day, files in by_day.items() if not any(f.stat().st_size for f in files)]
        if paths and len(empty) < len(by_day):
            check_empty_days(name, config.days, empty)
            _check_repeated_days(name, by_day)
    if not paths:
        raise InputDataError(
            f"source {name!r}: no such file",
            received=root / local_path(config.path),
            allowed="a file, a directory or a glob; hidden files (. or _ in front) do not count",
            fix=f"correct sources.{name}.path, or give the folder by --data",
        )
    files = tuple(describe_input(name, entry) for entry in sorted(paths))
    _check_bytes(name, config, files)
    return files


_NEVER_EMPTY = (".parquet", ".orc", ".avro", ".gz", ".zst", ".bz2", ".snappy", ".lz4")


def _check_bytes(name: str, config: SourceConfig, files: Sequence[InputFile]) -> None:
    """Refuses files without a byte, of all of a source or where a format has some in any file.

    Spark would pass the latter over, and its rows would be missing.
    """
    empty = [file.path for file in files if not file.bytes]
    of_columns = config.format in ("parquet", "orc", "avro")
    cut = [path for path in empty if of_columns or path.endswith(_NEVER_EMPTY)]
    if len(empty) == len(files):
        raise InputDataError(
            f"source {name!r} is empty",
            received=f"{len(files)} files without a byte, such as {empty[0]}",
            fix="bring the rows" + (", or build other days" if config.day_in_path else ""),
        )
    if cut:
        raise InputDataError(
            f"source {name!r} has {len(cut)} files without a byte",
            received=cut[0],
            allowed="files of this format hold some bytes, also without a row",
            fix="write it again, or remove it",
        )
    if empty:
        said = "source %s: %d of %d files are empty, such as %s"
        logger.warning(said, name, len(empty), len(files), empty[0])


def find_changes(
    name: str,
    config: SourceConfig,
    data_dir: str,
    before: Iterable[InputFile],
    dates: DateRange | None = None,
) -> list[str]:
    """Says what has become of a source's files since `find_files` listed them, file by file."""
    if config.path is None:
        return []
    now: dict[str, InputFile] = {}
    by_day = find_files_by_day(name, config, data_dir, dates)
    for entry in _list_files(name, config, data_dir, by_day):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            now[str(entry)] = describe_input(name, entry)
    known = {file.path: file for file in before}
    changes = [f"{path} is new" for path in now.keys() - known.keys()]
    changes += [f"{path} is gone" for path in known.keys() - now.keys()]
    for path in known.keys() & now.keys():
        if known[path] != now[path]:
            sizes = f"{known[path].bytes:,} bytes before, {now[path].bytes:,} now"
            changes.append(f"{path} was written ({sizes})")
    return sorted(changes)


def find_folder_values(
    name: str, config: SourceConfig, data_dir: str, dates: DateRange | None
) -> dict[str, dict[str, str | None]]:
    """Reads what the folders of a source say of its declared columns, such as `country=DE`.

    Returns:
        By field of a column its text, or null, by file, links resolved.
    """
    root = local_path(data_dir)
    fields = {c.field_name.lower(): c.field_name for c in config.columns}
    values: dict[str, dict[str, str | None]] = {}
    by_day = find_files_by_day(name, config, data_dir, dates)
    for file, given in _list_files(name, config, data_dir, by_day).items():
        place = given.relative_to(root) if given.is_relative_to(root) else given
        parts = [p for p in place.parent.parts if p.partition("=")[0].lower() in fields]
        for key, text in parse_partition_path("/".join(parts)).items():
            values.setdefault(fields[key.lower()], {})[str(file)] = text
    return values


def describe_input(name: str, file: Path) -> InputFile:
    """Describes a file as it stands: its size, and what changes with each write."""
    stat = file.stat()
    # The time of the last write can be set back, and two writes of one size may share it; what the
    # kernel keeps of the last change of any kind cannot. A file in its place is another inode.
    state = f"{stat.st_mtime_ns}.{stat.st_ctime_ns}.{stat.st_ino}"
    return InputFile(name, str(file), stat.st_size, stat.st_mtime_ns // 1_000_000, state)


def find_files_by_day(
    name: str, config: SourceConfig, data_dir: str, dates: DateRange | None
) -> dict[datetime.date, Found]:
    """Lists the files of each day of a dated path; a day without one has none."""
    if config.path is None or config.days is None or not config.day_in_path:
        return {}
    path, root, written = str(local_path(config.path)), local_path(data_dir), config.days.format
    if dates is not None:
        wanted = dates.shift(config.days.lookback_days).days()
    else:
        wanted = _find_days(name, path, written, root)
    days = {day: glob.escape(day.strftime(written)) for day in wanted}
    return {day: _find(name, Path(path.replace(DATE_FIELD, t)), root) for day, t in days.items()}


def _list_files(name: str, config: SourceConfig, data_dir: str, by_day: Days) -> Found:
    if config.day_in_path:
        return {file: given for found in by_day.values() for file, given in found.items()}
    return _find(name, local_path(config.path or ""), local_path(data_dir))


def _find(name: str, path: Path, root: Path) -> Found:
    base = root / path
    if base.is_file():
        _refuse_hidden(name, base)
        return {base.resolve(): base}
    if base.is_dir():
        return _visible((file, ()) for file in list_visible_files(base))
    return _expand(path, root)


def _expand(pattern: Path, root: Path) -> Found:
    matches = glob.glob(str(pattern), root_dir=root)  # noqa: PTH207 (absolute, or below root)

    def matched_parts(match: Path) -> list[str]:
        """The name, and folders that the pattern left open: one that it names may be hidden."""
        pairs = zip(match.parts[:-1], pattern.parts[:-1], strict=True)
        return [*(part for part, asked in pairs if glob.has_magic(asked)), match.name]

    return _visible((root / match, matched_parts(match)) for match in map(Path, matches))


def _visible(entries: Iterable[tuple[Path, Sequence[str]]]) -> Found:
    """Files, links resolved, none of whose given name parts is hidden; the first name counts."""
    found: Found = {}
    for entry, parts in sorted(entries):
        is_shown = not parts or is_data_path("/".join(parts), is_recursive=True)
        if is_shown and entry.is_file():
            resolved = entry.resolve()
            if not is_hidden(resolved.name):
                found.setdefault(resolved, entry)
    return found


def _refuse_hidden(name: str, file: Path) -> None:
    hidden = [path for path in (file, file.resolve()) if is_hidden(path.name)]
    if hidden:
        raise InputDataError(
            f"source {name!r}: Spark does not read hidden files",
            received=hidden[0],
            fix="rename the file: a name without . or _ in front",
        )


_DIRECTIVE = re.compile(r"%[A-Za-z]")


def _find_days(name: str, path: str, written: str, root: Path) -> tuple[datetime.date, ...]:
    """The days that a dated path has, from the first to the last, with those between."""
    days = set()
    for match, day in _match_days(path, written, root):
        if day is not None:
            days.add(day)
        elif not _is_hidden_match(path, match):
            raise InputDataError(
                f"source {name!r}: a path has no day where {{date}} stands",
                received=match,
                allowed=f"days written as {written}",
                fix=f"set sources.{name}.days.format, or make the path more precise",
            )
    return DateRange(min(days), max(days)).days() if days else ()


def _match_days(path: str, written: str, root: Path) -> Iterator[tuple[str, datetime.date | None]]:
    """What stands in the place of a day, each with its day; None where it is something else."""
    before, after = path.split(DATE_FIELD)
    level, _, _ = after.partition("/")
    literals = _DIRECTIVE.split(written)
    pattern = before + "*".join(literals) + level
    day = ".+?".join(re.escape(literal) for literal in literals)
    place = re.compile(f"{_translate(before)}({day}){_translate(level)}", re.DOTALL)
    for match in glob.glob(pattern, root_dir=root):  # noqa: PTH207 (may be absolute)
        text = place.fullmatch(match)
        yield match, _parse_day(text[1], written) if text else None


def _translate(pattern: str) -> str:
    """A glob as a regular expression, to be followed by more."""
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _parse_day(text: str, written: str) -> datetime.date | None:
    try:
        day = datetime.datetime.strptime(text, written).date()
    except ValueError:
        return None
    return day if day.strftime(written) == text else None


def _is_hidden_match(path: str, match: str) -> bool:
    above = path.split(DATE_FIELD)[0].rpartition("/")[0]
    parts = Path(match).parts[len(Path(above).parts) :]
    return not is_data_path("/".join(parts), is_recursive=True)


def _require_days(
    name: str, config: SourceConfig, root: Path, by_day: Days, dates: DateRange, *, is_log: bool
) -> None:
    """Refuses to run while days of the run have no file: they may be late.

    Where days may be empty, some must have one; a log needs files of the run's own days, other
    sources do with those of the lookback.
    """
    days = config.days or DaysConfig()
    missing = [day for day in dates.days() if not by_day.get(day, True)]
    others = any(files for day, files in by_day.items() if day not in missing)
    is_all = is_log and len(missing) == len(dates.days())
    if not missing or (days.allow_empty_days and others and not is_all):
        return
    path, fix = local_path(config.path or ""), "try again later"
    if not days.allow_empty_days:
        fix += f", or set sources.{name}.days.allow_empty_days: true"
    if not any(day for _, day in _match_days(str(path), days.format, root)):
        fix = f"correct --data or sources.{name}.path: no day has a file there; or {fix}"
    raise UpstreamNotReadyError(
        f"source {name!r} has no file yet for {len(missing)} of the run's days",
        received=f"{_show_days(missing)}; looked for {root / path}",
        fix=fix,
    )


def check_empty_days(name: str, config: DaysConfig, empty: Sequence[datetime.date]) -> None:
    """Refuses days without an input, unless they are allowed."""
    if not empty or config.allow_empty_days:
        return
    raise InputDataError(
        f"source {name!r} has nothing for {len(empty)} of its days",
        received=f"empty: {_show_days(empty)}",
        allowed="an input for each day of the run and of its lookback",
        fix=f"bring the day, shorten sources.{name}.days.lookback_days, or set "
        f"sources.{name}.days.allow_empty_days: true",
    )


_SHOWN_DAYS = 5


def _show_days(days: Sequence[datetime.date]) -> str:
    shown = ", ".join(str(day) for day in days[:_SHOWN_DAYS])
    return shown + (f" and {len(days) - _SHOWN_DAYS} more" if len(days) > _SHOWN_DAYS else "")


def _check_repeated_days(name: str, by_day: Days) -> None:
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
                f"source {name!r} has the same files for two days",
                received=f"{first} and {day}",
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
    raw: Column,
    found: T.DataType,
) -> DataFrame:
    """Keeps rows of a run's days, in terms that a table can prune its partitions by.

    A row whose day is null or cannot be told stays, to be counted as a bad row.
    """
    days = dates.shift(config.lookback_days)
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
