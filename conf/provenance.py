"""Where a dataset version comes from: what was read, where each row went, and the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class InputFile:
    """A file of a source as it stood when it was read.

    Attributes:
        source: The source's name.
        path: Where it lies.
        bytes: Its size.
        modified_ms: When it was last written, milliseconds since 1970.
        state: What the file system changes with each change of the file, or None where it was
            not asked.
    """

    source: str
    path: str
    bytes: int
    modified_ms: int
    state: str | None = None


@dataclass(frozen=True)
class InputTable:
    """A table or a query as it stood when it was read.

    Attributes:
        source: The source's name.
        place: The table's name, or the database and what is read of it.
        state: The version in its catalogue, or a checksum of its rows; None where nothing tells
            whether it changes.
    """

    source: str
    place: str
    state: str | None


@dataclass(frozen=True)
class SourceSnapshot:
    """What the version was made from."""

    inputs: tuple[InputFile, ...]
    event_ts_ms_range: tuple[int, int] | None
    config: Mapping[str, Any]
    config_sha256: str
    tables: tuple[InputTable, ...] = ()


@dataclass(frozen=True)
class RowCounts:
    """Where the rows went: every row of the event log is either kept or dropped for a reason.

    Attributes:
        read: Rows per source, bad ones included.
        quarantined: Bad rows per source and reason.
        joined: Event rows after parsing, de-duplication and dictionary joins.
        kept: Records written per split.
        dropped: Event rows left out, by reason.
        drawn: Negatives that were drawn and written, per split.
        unmatched: Event rows without an entry in a dictionary, by dictionary and reason, kept or
            not.
    """

    read: Mapping[str, int]
    quarantined: Mapping[str, Mapping[str, int]]
    joined: int
    kept: Mapping[str, int]
    dropped: Mapping[str, int]
    drawn: Mapping[str, int] = field(default_factory=dict)
    unmatched: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInfo:
    """The run that made the version.

    Attributes:
        fingerprint: Of all that decides the content: config, inputs, days, code version.
        first_day: First day that it was asked to build (`2026-01-31`), or None for no dates.
        last_day: Last day.
        days: Fingerprint of the run that made each day's partitions, by day.
        reused_rows: Records per split that the version shares with its parent.
    """

    fingerprint: str
    first_day: str | None = None
    last_day: str | None = None
    days: Mapping[str, str] = field(default_factory=dict)
    reused_rows: Mapping[str, int] = field(default_factory=dict)
