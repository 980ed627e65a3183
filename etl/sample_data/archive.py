"""Public data sets: downloaded, checked against their checksums and unpacked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from conf.storage.atomic_output import staged_directory

BASE_URL = "https://files.grouplens.org/datasets/movielens"
ARCHIVE_CARD_NAME = "DOWNLOAD.json"
MAX_BYTES = 64 << 20
_RETRIES, _TIMEOUT_S = 2, 30.0


@contextmanager
def replace_directory(out_dir: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory that takes the place of `out_dir` when the block ends well.

    Args:
        out_dir: The directory to publish; may exist when empty, or with `overwrite`.
        marker: Name of a file that every directory of this kind holds; only a directory that
            holds it is ever replaced.
        overwrite: Whether an earlier directory of this kind may be replaced.

    Raises:
        ConfigError: `out_dir` exists and may not be replaced.
        InternalError: The file system refused (no space, no permission).
        UpstreamNotReadyError: Another process is writing `out_dir`.
    """
    out_dir = Path(os.path.abspath(out_dir))  # noqa: PTH100 (resolve() would follow a symlink)
    try:
        with staged_directory(out_dir) as staging:
            _require_replaceable(out_dir, marker, overwrite)
            yield staging
    except OSError as error:
        raise InternalError(
            f"cannot write {out_dir}",
            received=error,
            fix="check free space and permissions; nothing was changed",
        ) from error


def _require_replaceable(out_dir: Path, marker: str, overwrite: bool) -> None:
    names = [path.name for path in out_dir.iterdir()] if out_dir.is_dir() else []
    if out_dir.is_symlink() or (out_dir.exists() and not out_dir.is_dir()):
        what = "the output path is not a directory"
    elif names and not overwrite:
        what = "the output directory is not empty"
    elif names and marker not in names:
        what = "refusing to overwrite a directory that was not written by this command"
    else:
        return
    raise ConfigError(
        what,
        received=out_dir,
        allowed=f"a new or empty directory; with --overwrite, one that holds {marker}",
        fix="pass another --out, or --overwrite to replace an earlier output",
    )


def write_card(path: Path, card: dict[str, Any]) -> None:
    """Writes the JSON file that explains a directory."""
    path.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def file_sizes(directory: Path) -> dict[str, dict[str, int]]:
    """Returns the size of every file below a directory, by its relative path."""
    return {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


class Archive(NamedTuple):
    """A zip archive of one folder, known by its checksum."""

    name: str
    sha256: str


ARCHIVES = {
    "ml-1m": Archive("ml-1m", "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"),
    "ml-100k": Archive(
        "ml-100k", "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"
    ),
}


def fetch_archive(
    archive: Archive, out_dir: Path, base_url: str = BASE_URL, *, overwrite: bool = False
) -> dict[str, Any]:
    """Downloads and unpacks an archive into a directory that appears complete or not at all.

    Args:
        archive: What to download and what it must be.
        out_dir: Directory to create; the archive's top folder is stripped.
        base_url: Folder of the archive.
        overwrite: Whether an earlier download in `out_dir` may be replaced.

    Returns:
        The content of `DOWNLOAD.json`: address, checksum and files.

    Raises:
        ConfigError: `out_dir` may not be replaced.
        UpstreamNotReadyError: The server cannot be reached or does not hold the file.
        InputDataError: Wrong checksum, or too large.
    """
    with replace_directory(out_dir, ARCHIVE_CARD_NAME, overwrite=overwrite) as staging:
        download = staging / ".download"
        zip_path = _download(archive, base_url, download)
        shutil.unpack_archive(zip_path, download / "unpacked")
        (top,) = (download / "unpacked").iterdir()
        for path in top.iterdir():
            path.rename(staging / path.name)
        shutil.rmtree(download)
        files = file_sizes(staging)
        url = f"{base_url.rstrip('/')}/{archive.name}.zip"
        card = {"name": archive.name, "url": url, "sha256": archive.sha256, "files": files}
        write_card(staging / ARCHIVE_CARD_NAME, card)
    return card


def _download(archive: Archive, base_url: str, folder: Path) -> Path:
    # Imported late: together they take longer than most commands.
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    name = f"{archive.name}.zip"
    known = {name: f"sha256:{archive.sha256}"}
    source = pooch.create(folder, f"{base_url.rstrip('/')}/", registry=known)
    source.retry_if_failed = _RETRIES
    downloader = pooch.HTTPDownloader(progressbar=_Limit(), timeout=_TIMEOUT_S)
    try:
        return Path(source.fetch(name, downloader=downloader))
    except requests.RequestException as error:
        raise UpstreamNotReadyError(
            f"cannot download {name}",
            received=error,
            fix="check the network and --base-url, or run `generate` for a sample without network",
        ) from error
    except ValueError as error:
        raise InputDataError(
            f"{name} is not the published file",
            received=error,
            allowed=f"SHA-256 {archive.sha256}",
            fix="try again; if it stays so, the source was changed: do not use it",
        ) from error


class _Limit:
    """Stands where pooch takes a progress bar, and stops a download of too many bytes."""

    total = received = 0

    def update(self, count: int) -> None:
        """Counts bytes that have come."""
        self.received += count
        if self.received > MAX_BYTES:
            raise InputDataError("the download is too large", allowed=f"at most {MAX_BYTES} bytes")

    def reset(self) -> None:
        """Begins to count anew."""
        self.received = 0

    def close(self) -> None:
        """Ends a download."""
