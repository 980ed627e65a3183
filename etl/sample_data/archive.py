"""Public data sets: downloaded, checked against the published checksums and unpacked safely."""

from __future__ import annotations

import json
import os
import stat
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from conf.storage.atomic_output import staged_directory

if TYPE_CHECKING:
    import requests

BASE_URL = "https://files.grouplens.org/datasets/movielens"
ARCHIVE_CARD_NAME = "DOWNLOAD.json"
MAX_BYTES, MAX_UNPACKED_BYTES = 64 << 20, 512 << 20
_ATTEMPTS, _TIMEOUT_S = 3, 30.0
_BLOCK_BYTES = 1 << 16
_NAME_BYTES, _LEVELS = 255, 32
"""Bytes of a part of a name, as file systems take it, and parts of a path."""
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


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
    """A zip archive that is known by its checksums."""

    name: str
    checksums: dict[str, str]  # the `md5` that the publisher gives beside the file, and `sha256`
    required: tuple[str, ...]  # files that it must hold, below its one top folder


_ML_1M = {
    "md5": "c4d9eecfca2ab87c1945afe126590906",
    "sha256": "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
}
_ML_100K = {
    "md5": "0e33842e24a9c977be4e0107933c0723",
    "sha256": "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
}
ARCHIVES = {
    "ml-1m": Archive("ml-1m", _ML_1M, ("users.dat", "movies.dat", "ratings.dat")),
    "ml-100k": Archive("ml-100k", _ML_100K, ("u.user", "u.item", "u.data")),
}


def fetch_archive(
    archive: Archive,
    out_dir: Path,
    base_url: str = BASE_URL,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Downloads and unpacks an archive into a directory that appears complete or not at all.

    Args:
        archive: What to download and what it must be.
        out_dir: Directory to create; the archive's top folder is stripped.
        base_url: Folder of the archive, https (plain http for this machine only).
        overwrite: Whether an earlier download in `out_dir` may be replaced.

    Returns:
        The content of `DOWNLOAD.json`: address, checksums and files.

    Raises:
        ConfigError: The address is not https, or `out_dir` may not be replaced.
        UpstreamNotReadyError: The server cannot be reached or does not hold the file.
        InputDataError: Wrong checksum, too large, or an archive with unsafe content.
    """
    url = f"{base_url.rstrip('/')}/{archive.name}.zip"
    _require_secure(url)
    with replace_directory(out_dir, ARCHIVE_CARD_NAME, overwrite=overwrite) as staging:
        zip_path = _download(url, staging)
        _verify(zip_path, archive)
        unpack_zip(zip_path, staging, MAX_UNPACKED_BYTES)
        zip_path.unlink()
        files = file_sizes(staging)
        if missing := set(archive.required) - set(files):
            raise InputDataError(
                f"{archive.name}.zip lacks files",
                received=f"no {sorted(missing)}",
                allowed=f"all of {list(archive.required)}",
            )
        card = {"name": archive.name, "url": url, **archive.checksums, "files": files}
        write_card(staging / ARCHIVE_CARD_NAME, card)
    return card


def unpack_zip(zip_path: Path, target: Path, max_bytes: int) -> None:
    """Unpacks a zip archive, its one top folder stripped, without leaving `target`.

    Raises:
        InputDataError: The archive is damaged, unpacks to more than `max_bytes`, or has an entry
            that is in no folder, is a link, is encrypted, or would land outside `target`.
    """
    try:
        with zipfile.ZipFile(zip_path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _require_safe(entries, max_bytes)
            for entry in entries:
                entry.filename = entry.filename.partition("/")[2]
                archive.extract(entry, target)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
        raise InputDataError(
            "the archive cannot be unpacked", received=error, fix="download it again"
        ) from error


def _require_safe(entries: list[zipfile.ZipInfo], max_bytes: int) -> None:
    for entry in entries:
        path = PurePosixPath(entry.filename)
        outside = path.is_absolute() or ".." in path.parts or set("\\:") & set(str(path))
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if outside or len(path.parts) < 2 or is_link or entry.flag_bits & 0x1:
            raise InputDataError(
                "the archive has an unsafe entry",
                received=repr(entry.filename),
                allowed="plain, unencrypted files below one folder",
                fix="do not use this archive; nothing was unpacked",
            )
    _require_places(entries)
    # No entry gives more bytes than it states: zipfile stops there.
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise InputDataError(
            "the archive unpacks to too many bytes",
            allowed=f"at most {max_bytes} bytes",
            fix="do not use this archive; nothing was unpacked",
        )


def _require_places(entries: list[zipfile.ZipInfo]) -> None:
    """Refuses names that a file system does not take, or of which one hides another."""
    files, folders = set[str](), set[str]()
    for entry in entries:
        path = PurePosixPath(entry.filename)
        is_long = any(len(part.encode()) > _NAME_BYTES for part in path.parts)
        above = {str(parent) for parent in path.parents}
        folders |= above
        if is_long or str(path) in files | folders or above & files or len(path.parts) > _LEVELS:
            shown = repr(entry.filename)
            raise InputDataError(
                "the archive has an entry that cannot be unpacked beside the others",
                received=shown if len(shown) <= 200 else f"{shown[:200]}…",
                allowed=f"each name once, no file where a folder is, {_NAME_BYTES} bytes for each "
                f"part of a name, {_LEVELS} folders deep",
                fix="do not use this archive; nothing was unpacked",
            )
        files.add(str(path))


def _verify(path: Path, archive: Archive) -> None:
    import pooch

    checksums = {kind: pooch.file_hash(str(path), alg=kind) for kind in archive.checksums}
    if checksums != archive.checksums:
        raise InputDataError(
            f"{archive.name}.zip is not the published file",
            received=checksums,
            allowed=archive.checksums,
            fix="try again; if it stays so, the source was changed: do not use it",
        )


def _download(url: str, folder: Path) -> Path:
    # Imported late: together they take longer than most commands.
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(
        progressbar=_Limit(),
        chunk_size=_BLOCK_BYTES,
        timeout=_TIMEOUT_S,
        hooks={"response": _check_response},
    )
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt)
        try:
            # The checksums are compared afterwards, both of them.
            return Path(pooch.retrieve(url, None, ".archive.zip", folder, downloader=downloader))
        except requests.RequestException as error:
            reason = error
            if error.response is not None and error.response.status_code not in _RETRIED_STATUS:
                break
    raise UpstreamNotReadyError(
        f"cannot download {url}",
        received=reason,
        fix="check the network and --base-url, or run `generate` for a sample without network",
    ) from reason


class _Limit:
    """Counts the bytes of a download, where pooch may have a progress bar, and stops at too many.

    A server need not say how many come.
    """

    def __init__(self) -> None:
        self.total = self.received = 0

    def update(self, count: int) -> None:
        """Counts bytes that have come."""
        self.received += count
        if self.received > MAX_BYTES + _BLOCK_BYTES:  # pooch counts the last block as a whole one
            raise InputDataError("the download is too large", allowed=f"at most {MAX_BYTES} bytes")

    def reset(self) -> None:
        """Begins the next attempt."""
        self.received = 0

    def close(self) -> None:
        """Ends a download."""


def _check_response(response: requests.Response, **_: object) -> None:
    if response.is_redirect:
        _require_secure(urllib.parse.urljoin(response.url, response.headers["location"]))
    size = response.headers.get("content-length", "")
    if size.isdigit() and int(size) > MAX_BYTES:
        raise InputDataError(
            "the download is too large",
            received=f"{size} bytes",
            allowed=f"at most {MAX_BYTES} bytes",
        )


def _require_secure(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS
    if not is_local and not (parts.scheme == "https" and parts.hostname):
        raise ConfigError(
            "the download address is not secure",
            received=url,
            allowed="https://… (http:// for this machine only)",
            fix="pass --base-url",
        )
