"""Named entries beside each other, such as versions and runs, and the pointer to one of them.

An entry is complete once it holds its marker file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.paths import CURRENT_FILE, ReadablePath, ReadablePathT, list_folders

ENTRY_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class EntryKind:
    """A kind of entries: dataset versions or training runs.

    Attributes:
        noun: What an entry is called in messages.
        folder: Folder that holds the entries.
        marker: File that an entry is complete with.
        fix: How one is made.
    """

    noun: str
    folder: str
    marker: str
    fix: str


def check_entry_name(noun: str, name: str) -> None:
    """Refuses a name that could leave its root.

    Raises:
        ConfigError: The name is not a plain file name.
    """
    if not ENTRY_NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"a {noun} name must be a plain name",
            received=repr(name),
            allowed="letters, digits, '_', '-', '.'; first a letter or digit",
        )


def complete_entries(base: ReadablePath, kind: EntryKind) -> list[str]:
    """Returns the ids of the complete entries, in the order of their ids."""
    folder = base / kind.folder
    return sorted(
        name
        for name in list_folders(folder)
        if ENTRY_NAME_PATTERN.fullmatch(name) and (folder / name / kind.marker).is_file()
    )


def resolve_entry(directory: ReadablePathT, kind: EntryKind) -> ReadablePathT:
    """Returns the entry that a path names.

    Args:
        directory: A named directory (its current entry is meant), or an entry itself.
        kind: What the entries are.

    Raises:
        UpstreamNotReadyError: There is no current entry yet.
        InputDataError: `CURRENT` names an entry that is not there.
    """
    if (directory / kind.marker).is_file():
        return directory
    current = directory / CURRENT_FILE
    if not current.is_file():
        raise UpstreamNotReadyError(
            f"there is no {kind.noun} here",
            received=directory,
            allowed=f"a directory with {CURRENT_FILE} or {kind.marker}",
            fix=f"{kind.fix}, or correct the path",
        )
    entry_id = current.read_text(encoding="utf-8", errors="replace").strip()
    entry = directory / kind.folder / entry_id
    if not ENTRY_NAME_PATTERN.fullmatch(entry_id) or not (entry / kind.marker).is_file():
        entries = complete_entries(directory, kind)
        raise InputDataError(
            f"{current} names a {kind.noun} that is not there",
            received=repr(entry_id),
            allowed=", ".join(entries) or f"a folder of {directory / kind.folder}",
            fix=f"write the id of one that is there into {current}, or {kind.fix}",
        )
    return entry
