"""The input files of a source: which they are, and which Spark would silently skip."""

from __future__ import annotations

import contextlib
import datetime
import glob
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from conf.etl.sources import DaysConfig, SourceConfig
from conf.local_paths import is_data_path, is_hidden, list_visible_files, local_path
from conf.manifest import InputFile
from etl.sources.days import (
    check_empty_days,
    check_repeated_days,
    day_pattern,
    find_days,
    has_days,
    refuse_missing_days,
    run_days,
)
from etl.tfrecord.files.data_files import parse_partition_path

logger = logging.getLogger("sluice.build")


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

    Args:
        name: The source's name in the config.
        config: Its declaration; `path` may be a `file:` URI.
        data_dir: Directory that a relative path starts from, taken literally.
        dates: The run's days; None: all days from the first to the last that a dated path has.
        is_log: Whether samples are made of its rows: files of the lookback alone give none.

    Returns:
        The files by path, links resolved; none for a table or a query.

    Raises:
        ConfigError: `data_dir` is no folder.
        InputDataError: There is none, all are empty, a hidden file is asked for by name, or a day
            is empty or stands there twice.
        UpstreamNotReadyError: A day of the run has no file yet, and days may not be empty; or none
            has one.
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
    base = root / local_path(config.path)
    by_day = find_files_by_day(name, config, data_dir, dates) if config.day_in_path else {}
    missing = [] if dates is None else [d for d in dates.days() if not by_day.get(d, True)]
    if missing and config.days and not _may_lack(config.days, missing, by_day, is_log=is_log):
        has_others = has_days(str(local_path(config.path)), config.days, root)
        refuse_missing_days(name, config.days, missing, base, has_others=has_others)
    paths = _list_files(name, config, data_dir, by_day)
    if config.days is not None and by_day:
        empty = [day for day, files in by_day.items() if not any(f.stat().st_size for f in files)]
        if paths and len(empty) < len(by_day):
            check_empty_days(name, config.days, empty)
            check_repeated_days(name, config.days, by_day)
    if not paths:
        raise InputDataError(
            f"source {name!r}: no such file",
            received=base,
            allowed="a file, a directory or a glob; hidden files (. or _ in front) do not count",
            fix=f"correct sources.{name}.path, or give the folder by --data",
        )
    files = tuple(describe_input(name, entry) for entry in sorted(paths))
    _refuse_cut_files(name, config, files)
    if not any(file.bytes for file in files):
        what = f"{len(files)} file{'s' * (len(files) > 1)} without a byte, such as {files[0].path}"
        raise InputDataError(
            f"source {name!r} is empty",
            received=what,
            allowed="a row or more",
            fix="bring the rows" + (", or build other days" if dates and by_day else ""),
        )
    return files


def _may_lack(
    config: DaysConfig,
    missing: Collection[datetime.date],
    by_day: Mapping[datetime.date, Collection[Path]],
    *,
    is_log: bool,
) -> bool:
    """Whether a run may do without files of some of its days: days may be empty, not all of them.

    A log needs files of the run's own days, other sources do with those of the lookback.
    """
    is_there = [bool(files) for day, files in by_day.items() if day not in missing]
    own_days = len(by_day) - config.lookback_days
    return config.allow_empty_days and any(is_there) and not (is_log and len(missing) == own_days)


_NEVER_EMPTY = (".parquet", ".orc", ".avro", ".gz", ".zst", ".bz2", ".snappy", ".lz4")


def _refuse_cut_files(name: str, config: SourceConfig, files: Sequence[InputFile]) -> None:
    """Refuses files without a byte whose format has some even where there is no row.

    Raises:
        InputDataError: There is one: Spark would pass it over, and its rows would be missing.
    """
    if not any(file.bytes for file in files):
        return  # The source as a whole is empty, which is said of it.
    holds_some = config.format in ("parquet", "orc", "avro")
    cut = [f for f in files if not f.bytes and (holds_some or f.path.endswith(_NEVER_EMPTY))]
    if cut:
        raise InputDataError(
            f"source {name!r} has {len(cut)} file{'s' * (len(cut) > 1)} without a byte",
            received=cut[0].path,
            allowed="files of this format hold some bytes, also without a row",
            fix="write it again, or remove it",
        )
    if empty := [file.path for file in files if not file.bytes]:
        said = "source %s: %d of %d files are empty, such as %s"
        logger.warning(said, name, len(empty), len(files), empty[0])


def find_changes(
    name: str,
    config: SourceConfig,
    data_dir: str,
    before: Iterable[InputFile],
    dates: DateRange | None = None,
) -> list[str]:
    """Says what has become of a source's files since they were listed.

    Args:
        name: The source's name in the config.
        config: Its declaration.
        data_dir: Directory that a relative path starts from.
        before: The files, as `find_files` listed them.
        dates: The run's days, as then.

    Returns:
        What happened, file by file; empty where each has its size and state, and none is new or
        gone.
    """
    if config.path is None:
        return []
    by_day = find_files_by_day(name, config, data_dir, dates) if config.day_in_path else {}
    now: dict[str, InputFile] = {}
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
        By field of a column its text, or null, by folder of the files, links resolved.
    """
    by_day = find_files_by_day(name, config, data_dir, dates) if config.day_in_path else {}
    root, fields = (
        local_path(data_dir),
        {c.field_name.lower(): c.field_name for c in config.columns},
    )
    values: dict[str, dict[str, str | None]] = {}
    for file, given in _list_files(name, config, data_dir, by_day).items():
        place = given.relative_to(root) if given.is_relative_to(root) else given
        parts = [p for p in place.parent.parts if p.partition("=")[0].lower() in fields]
        for key, text in parse_partition_path("/".join(parts)).items():
            values.setdefault(fields[key.lower()], {})[str(file.parent)] = text
    return values


Found = dict[Path, Path]
"""Files, links resolved, and where each stands below the source's path."""


def _list_files(
    name: str, config: SourceConfig, data_dir: str, by_day: Mapping[datetime.date, Found]
) -> Found:
    if config.day_in_path:
        return {file: given for found in by_day.values() for file, given in found.items()}
    return _find(name, local_path(config.path or ""), local_path(data_dir))


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
    """Lists the files of each day of a dated path; a day without one has none.

    Raises:
        InputDataError: A path has something else in the place of the day.
    """
    days, root = config.days, local_path(data_dir)
    if config.path is None or days is None:
        return {}
    path = str(local_path(config.path))
    wanted = run_days(days, dates).days() if dates else find_days(name, path, days, root)
    return {day: _find(name, Path(day_pattern(path, days, day)), root) for day in wanted}


def _find(name: str, path: Path, root: Path) -> Found:
    base = root / path
    if base.is_file():
        _refuse_hidden(name, base)
        return {base.resolve(): base}
    if base.is_dir():
        return _visible((file, ()) for file in list_visible_files(base))
    return _expand(path, root)


def count_levels(files: Iterable[InputFile]) -> int:
    """Number of trailing path parts that tell files apart: 1 for files of one folder."""
    parts = [Path(file.path).parts for file in files]
    shared = 0
    for level in zip(*(part[:-1] for part in parts), strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return max(len(part) for part in parts) - shared


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
            allowed="a file name without . or _ in front",
            fix="rename the file",
        )
