"""Public data sets: downloaded, checked against the published checksums and unpacked safely."""

from __future__ import annotations

import ipaddress
import json
import os
import stat
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from conf.atomic_output import staged_directory
from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError

if TYPE_CHECKING:
    import requests

BASE_URL = "https://files.grouplens.org/datasets/movielens"
ARCHIVE_CARD_NAME = "DOWNLOAD.json"
_BLOCK_BYTES = 1 << 18
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


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
    if out_dir.is_symlink() or (out_dir.exists() and not out_dir.is_dir()):
        what, allowed = "the output path is not a directory", "a path that does not exist yet"
        fix = "pass another --out"
    elif not out_dir.exists() or not any(out_dir.iterdir()):
        return
    elif not overwrite:
        what, allowed = "the output directory is not empty", "a new or empty directory"
        fix = "pass another --out, or --overwrite to replace it"
    elif not (out_dir / marker).is_file():
        what = "refusing to overwrite a directory that was not written by this command"
        allowed = f"a directory that holds {marker}"
        fix = "pass another --out, or remove the directory yourself"
    else:
        return
    raise ConfigError(what, received=out_dir, allowed=allowed, fix=fix)


def write_card(path: Path, card: dict[str, object]) -> None:
    """Writes the JSON file that explains a directory."""
    path.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Archive:
    """A zip archive that is known by its checksums.

    Args:
        checksums: By algorithm: the `md5` that the publisher gives beside the file, and `sha256`.
        required: Files that the archive must hold, below its one top folder.
        max_bytes: Refuse a download larger than this.
        max_unpacked_bytes: Refuse content larger than this.
    """

    name: str
    checksums: dict[str, str]
    required: tuple[str, ...]
    max_bytes: int = 64 << 20
    max_unpacked_bytes: int = 512 << 20


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


@dataclass(frozen=True)
class DownloadOptions:
    """How to reach the publisher.

    Args:
        base_url: Folder of the archive, https (plain http for this machine only).
        retries: Further attempts after a failure that may pass.
        timeout_s: Longest wait for the next bytes.
        on_progress: Called with (bytes received, total bytes or None).
    """

    base_url: str = BASE_URL
    retries: int = 2
    timeout_s: float = 30.0
    on_progress: Callable[[int, int | None], None] = lambda done, total: None


def fetch_archive(
    archive: Archive,
    out_dir: Path,
    options: DownloadOptions | None = None,
    *,
    overwrite: bool = False,
) -> dict[str, object]:
    """Downloads and unpacks an archive into a directory that appears complete or not at all.

    Args:
        archive: What to download and what it must be.
        out_dir: Directory to create; the archive's top folder is stripped.
        options: Address, retries and time limits.
        overwrite: Whether an earlier download in `out_dir` may be replaced.

    Returns:
        The content of `DOWNLOAD.json`: address, checksums and files.

    Raises:
        ConfigError: The address is not https, or `out_dir` may not be replaced.
        UpstreamNotReadyError: The server cannot be reached or does not hold the file.
        InputDataError: Wrong checksum, too large, or an archive with unsafe content.
    """
    options = options or DownloadOptions()
    url = f"{options.base_url.rstrip('/')}/{archive.name}.zip"
    _require_secure(url)
    with replace_directory(out_dir, ARCHIVE_CARD_NAME, overwrite=overwrite) as staging:
        zip_path = _download(url, staging, archive.max_bytes, options)
        _verify(zip_path, archive)
        unpack_zip(zip_path, staging, archive.max_unpacked_bytes)
        zip_path.unlink()
        missing = [name for name in archive.required if not (staging / name).is_file()]
        if missing:
            raise InputDataError(
                f"{archive.name}.zip lacks files",
                received=f"no {missing}",
                allowed=f"all of {list(archive.required)}",
            )
        files = {
            path.relative_to(staging).as_posix(): {"bytes": path.stat().st_size}
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        }
        card: dict[str, object] = {"name": archive.name, "url": url, **archive.checksums}
        card["files"] = files
        write_card(staging / ARCHIVE_CARD_NAME, card)
    return card


def unpack_zip(zip_path: Path, target: Path, max_bytes: int) -> None:
    """Unpacks a zip archive, its one top folder stripped, without leaving `target`.

    Raises:
        InputDataError: The archive is damaged, unpacks to more than `max_bytes`, or has an entry
            that is a link, is encrypted, or would land outside `target`.
    """
    try:
        with zipfile.ZipFile(zip_path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _require_safe(entries, max_bytes)
            tops = {entry.filename.partition("/")[::2] for entry in entries}
            strip = len({top for top, _ in tops}) == 1 and all(rest for _, rest in tops)
            for entry in entries:
                entry.filename = entry.filename.partition("/")[2] if strip else entry.filename
                archive.extract(entry, target)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
        raise InputDataError(
            "the archive cannot be unpacked", received=error, fix="download it again"
        ) from error


def _require_safe(entries: list[zipfile.ZipInfo], max_bytes: int) -> None:
    for entry in entries:
        path = PurePosixPath(entry.filename)
        outside = path.is_absolute() or ".." in path.parts or set("\\:") & set(str(path))
        if outside or stat.S_ISLNK(entry.external_attr >> 16) or entry.flag_bits & 0x1:
            raise InputDataError(
                "the archive has an unsafe entry",
                received=repr(entry.filename),
                allowed="plain, unencrypted files below the target directory",
                fix="do not use this archive; nothing was unpacked",
            )
    # No entry gives more bytes than it states: zipfile stops there.
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise InputDataError(
            "the archive unpacks to too many bytes",
            allowed=f"at most {max_bytes} bytes",
            fix="do not use this archive; nothing was unpacked",
        )


def _verify(path: Path, archive: Archive) -> None:
    import pooch

    found = {kind: pooch.file_hash(str(path), alg=kind) for kind in archive.checksums}
    if found != archive.checksums:
        raise InputDataError(
            f"{archive.name}.zip is not the published file",
            received=found,
            allowed=archive.checksums,
            fix="try again; if it stays so, the source was changed: do not use it",
        )


class _Meter:
    """Stands where pooch has a progress bar: counts bytes, and refuses too many."""

    def __init__(self, max_bytes: int, on_progress: Callable[[int, int | None], None]) -> None:
        self.total = 0  # set by pooch; 0 where the server does not say
        self._received, self._max_bytes, self._on_progress = 0, max_bytes, on_progress

    def update(self, count: int) -> None:
        self._received += count  # a whole block, although the last one is shorter
        received = min(self._received, self.total or self._received)
        if max(received, self.total) > self._max_bytes:
            raise InputDataError(
                "the download is too large",
                received=f"{max(received, self.total)} bytes",
                allowed=f"at most {self._max_bytes} bytes",
            )
        self._on_progress(received, self.total or None)

    def reset(self) -> None:
        self._received = 0

    def close(self) -> None:
        pass


def _download(url: str, folder: Path, max_bytes: int, options: DownloadOptions) -> Path:
    # Imported late: together they take longer than most commands.
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    for attempt in range(options.retries + 1):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        downloader = pooch.HTTPDownloader(
            progressbar=_Meter(max_bytes, options.on_progress),
            chunk_size=_BLOCK_BYTES,
            timeout=options.timeout_s,
            hooks={"response": _check_redirect},
        )
        try:
            # The checksums are compared afterwards, both of them.
            found = pooch.retrieve(url, None, ".archive.zip", folder, downloader=downloader)
            return Path(found)
        except requests.RequestException as error:
            reason = error
            if error.response is not None and error.response.status_code not in _RETRIED_STATUS:
                break
    raise UpstreamNotReadyError(
        f"cannot download {url}",
        received=reason,
        fix="check the network and --base-url, or run `generate` for a sample without network",
    ) from reason


def _check_redirect(response: requests.Response, **_: object) -> None:
    if response.is_redirect:
        _require_secure(urllib.parse.urljoin(response.url, response.headers["location"]))


def _require_secure(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if host and (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))):
        return
    raise ConfigError(
        "the download address is not secure",
        received=url,
        allowed="https://… (http:// for this machine only)",
        fix="pass --base-url",
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
