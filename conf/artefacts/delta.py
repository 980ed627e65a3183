"""Paths of deltas of exported models, and what a delta says of itself.

DIR/<model>/<n>/      a delta, from 1 on; whole as soon as it has its name
    delta.json        what it leads from and to, checksums
    tables/           see `training.embedding.table_files`
    weights.index, weights.data-…, version/   see `training.export.delta`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf.artefacts.export import find_damaged, find_unfinished
from conf.artefacts.run import read_json
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.paths import ReadablePathT, require_bucket
from conf.publication.entries import list_complete
from conf.schema import fingerprint

DELTA_FILE = "delta.json"
DELTA_FORMAT_VERSION = 1
_AGAIN = "write the delta again, or take a full export"


def find_delta(path: ReadablePathT) -> ReadablePathT:
    """Returns a delta's directory, wherever it lies.

    Args:
        path: One, or that of the deltas of a model (its newest one).

    Raises:
        UpstreamNotReadyError: There is none.
    """
    numbers = list_complete(path, DELTA_FILE)
    folder = path / str(numbers[-1]) if numbers else path
    if (folder / DELTA_FILE).is_file():
        return folder
    require_bucket(path)
    raise UpstreamNotReadyError(
        "there is no delta",
        received=str(path),
        allowed=f"a directory with {DELTA_FILE}, which is written last",
        fix="write one by `sluice export --delta-since`",
    )


def read_delta(path: Path) -> tuple[Path, dict[str, Any]]:
    """Reads what a delta says of itself, and checks every byte of its files.

    Args:
        path: Its directory, or that of a model's deltas (the newest one).

    Returns:
        Its directory, and `delta.json`.

    Raises:
        UpstreamNotReadyError: There is none.
        InputDataError: A file is missing, cut short or changed.
    """
    delta = find_delta(path)
    about = read_json(delta / DELTA_FILE)
    expected = about.pop("fingerprint", None)
    if about.get("format_version") != DELTA_FORMAT_VERSION or fingerprint(about) != expected:
        raise InputDataError(
            f"{delta / DELTA_FILE} is not what was written",
            received=f"format version {about.get('format_version')}",
            fix=_AGAIN,
        )
    require_files(delta, about["files"], _AGAIN)
    return delta, about


def require_files(root: Path, files: dict[str, dict[str, Any]], fix: str) -> None:
    """Refuses files that are not those of a list.

    Args:
        root: Their directory.
        files: Bytes and SHA-256 of each, by relative path.
        fix: What to do about it.

    Raises:
        InputDataError: One is missing, cut short or changed.
    """
    damage = find_unfinished(root, files) or find_damaged(root, files)
    if damage is not None:
        raise InputDataError(
            f"files of {root} are not those that were written", received=damage, fix=fix
        )
