"""Download of public data sets: checked against the published checksum, unpacked safely.

A directory appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import ipaddress
import json
import lzma
import os
import shutil
import stat
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError

PARTIAL, REPLACED = "partial", "replaced"


@contextmanager
def stage_directory(out_dir: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory beside `out_dir` that takes its place when the block succeeds.

    On any error, the block's own included, `out_dir` is left as it was. What a killed process left
    is settled first: an earlier `out_dir` that it had set aside comes back, the rest is removed.

    Args:
        out_dir: The directory to publish; may exist when empty, or with `overwrite`.
        marker: Name of a file that every directory of this kind holds; only a directory that
            holds it is ever replaced.
        overwrite: Whether an earlier directory of this kind may be replaced.

    Raises:
        ConfigError: `out_dir` exists and may not be replaced.
        InternalError: The file system refused (no space, no permission).
    """
    out_dir = Path(os.path.abspath(out_dir))  # noqa: PTH100 (resolve() would follow a symlink)
    try:
        _settle_killed(out_dir, marker)
    except OSError as error:
        raise _refused(out_dir, error) from error
    _require_replaceable(out_dir, marker, overwrite)
    with contextlib.ExitStack() as locks:
        try:
            out_dir.parent.mkdir(parents=True, exist_ok=True)
            staging = _make_beside(out_dir, PARTIAL, locks)
        except OSError as error:
            raise _refused(out_dir, error) from error
        try:
            staging.chmod(0o755)
            yield staging
            _publish(staging, out_dir, locks)
        except OSError as error:
            raise _refused(out_dir, error) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _beside(out_dir: Path, kind: str) -> str:
    return f".{out_dir.name}.{kind}-"


def _lock(directory: Path, locks: contextlib.ExitStack, flags: int = 0) -> bool:
    """Locks a directory for as long as this process lives; says whether it did, and it is there."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return False
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:  # in use, or a file system without locks
        return False
    return directory.exists()


def _make_beside(out_dir: Path, kind: str, locks: contextlib.ExitStack) -> Path:
    """Makes a directory that other processes can tell from a dead one's."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=_beside(out_dir, kind), dir=out_dir.parent))
        _lock(made, locks)
        if made.exists():  # else taken for dead in the moment before it was locked
            return made


def _settle_killed(out_dir: Path, marker: str) -> None:
    """Restores or removes what dead processes left beside `out_dir`."""
    if not out_dir.parent.is_dir():
        return
    siblings = [path for path in out_dir.parent.iterdir() if path.is_dir()]
    for path in siblings:
        restorable = path.name.startswith(_beside(out_dir, REPLACED))
        if not (restorable or path.name.startswith(_beside(out_dir, PARTIAL))):
            continue
        with contextlib.ExitStack() as locks:
            if not _lock(path, locks, fcntl.LOCK_NB):
                continue
            missing = not out_dir.is_symlink() and not out_dir.exists()
            if restorable and missing and (path / marker).is_file():
                path.replace(out_dir)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _require_replaceable(out_dir: Path, marker: str, overwrite: bool) -> None:
    if out_dir.is_symlink() or (out_dir.exists() and not out_dir.is_dir()):
        raise ConfigError(
            "the output path is not a directory",
            received=out_dir,
            allowed="a path that does not exist yet",
            fix="pass another --out",
        )
    if not out_dir.exists() or not any(out_dir.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            "the output directory is not empty",
            received=out_dir,
            allowed="a new or empty directory",
            fix="pass another --out, or --overwrite to replace it",
        )
    if not (out_dir / marker).is_file():
        raise ConfigError(
            "refusing to overwrite a directory that was not written by this command",
            received=out_dir,
            allowed=f"a directory that holds {marker}",
            fix="pass another --out, or remove the directory yourself",
        )


def _publish(staging: Path, out_dir: Path, locks: contextlib.ExitStack) -> None:
    if not out_dir.exists() or not any(out_dir.iterdir()):
        staging.replace(out_dir)  # rename(2) also replaces an empty directory
        return
    retired = _make_beside(out_dir, REPLACED, locks)
    _lock(out_dir, locks)  # the lock goes with the directory, whatever its name
    out_dir.replace(retired)
    try:
        staging.replace(out_dir)
    except OSError:
        retired.replace(out_dir)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _refused(out_dir: Path, error: OSError) -> InternalError:
    return InternalError(
        f"cannot write {out_dir}",
        received=error,
        fix="check free space and permissions; nothing was changed",
    )


BASE_URL = "https://files.grouplens.org/datasets/movielens"
ARCHIVE_CARD_NAME = "DOWNLOAD.json"
_BLOCK_BYTES = 1 << 18
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Archive:
    """A zip archive that is known by its checksums.

    Args:
        name: Name of the data set; the file is `<name>.zip`.
        md5: Checksum that the publisher gives beside the file.
        sha256: SHA-256 of the same bytes; None where only the MD5 is known.
        required: Files that the archive must hold, below its one top folder.
        max_bytes: Refuse a download larger than this.
        max_unpacked_bytes: Refuse content larger than this.
    """

    name: str
    md5: str
    sha256: str | None
    required: tuple[str, ...]
    max_bytes: int = 64 << 20
    max_unpacked_bytes: int = 512 << 20


ARCHIVES = {
    archive.name: archive
    for archive in (
        Archive(
            "ml-1m",
            "c4d9eecfca2ab87c1945afe126590906",
            "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
            ("users.dat", "movies.dat", "ratings.dat"),
        ),
        Archive(
            "ml-100k",
            "0e33842e24a9c977be4e0107933c0723",
            "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
            ("u.user", "u.item", "u.data"),
        ),
    )
}


@dataclass(frozen=True)
class DownloadOptions:
    """How to reach the publisher.

    Args:
        base_url: Folder of the archive, https (plain http for this machine only).
        retries: Further attempts after a failure that may pass.
        timeout_s: Longest wait for the next bytes.
        deadline_s: Longest time for one attempt.
        on_progress: Called with (bytes received, total bytes or None).
    """

    base_url: str = BASE_URL
    retries: int = 2
    timeout_s: float = 30.0
    deadline_s: float = 900.0
    on_progress: Callable[[int, int | None], None] = field(default=lambda done, total: None)


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
    with stage_directory(out_dir, ARCHIVE_CARD_NAME, overwrite=overwrite) as staging:
        zip_path = staging / ".archive.zip"
        _download_with_retries(url, zip_path, archive, options)
        digests = _verify(zip_path, archive)
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
        card: dict[str, object] = {"name": archive.name, "url": url, **digests, "files": files}
        (staging / ARCHIVE_CARD_NAME).write_text(
            json.dumps(card, indent=2) + "\n", encoding="utf-8"
        )
    return card


def unpack_zip(zip_path: Path, target: Path, max_bytes: int) -> None:
    """Unpacks a zip archive, its one top folder stripped, without leaving `target`.

    Raises:
        InputDataError: The archive is damaged, unpacks to more than `max_bytes`, or has an entry
            that is a link, is encrypted, or would land outside `target`.
    """
    damaged = (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error, lzma.LZMAError)
    try:
        with zipfile.ZipFile(zip_path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            paths = _strip_top_folder([_safe_path(entry) for entry in entries])
            budget = max_bytes
            for entry, path in zip(entries, paths, strict=True):
                destination = target / path
                destination.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, destination.open("xb") as sink:
                    budget = _copy_within(source, sink, budget)
    except (*damaged, FileExistsError) as error:
        raise InputDataError(
            "the archive cannot be unpacked", received=error, fix="download it again"
        ) from error


def _safe_path(entry: zipfile.ZipInfo) -> PurePosixPath:
    path = PurePosixPath(entry.filename)
    inside = not path.is_absolute() and ".." not in path.parts and not set("\\:") & set(str(path))
    plain = not stat.S_ISLNK(entry.external_attr >> 16) and not entry.flag_bits & 0x1
    if not inside or not plain or not path.parts:
        raise InputDataError(
            "the archive has an unsafe entry",
            received=repr(entry.filename),
            allowed="plain, unencrypted files below the target directory",
            fix="do not use this archive; nothing was unpacked",
        )
    return path


def _strip_top_folder(paths: list[PurePosixPath]) -> list[PurePosixPath]:
    tops = {path.parts[0] for path in paths}
    if len(tops) == 1 and all(len(path.parts) > 1 for path in paths):
        return [PurePosixPath(*path.parts[1:]) for path in paths]
    return paths


def _copy_within(source: IO[bytes], sink: IO[bytes], budget: int) -> int:
    """Copies and returns what is left of the budget; trusts no size stated in the archive."""
    while block := source.read(_BLOCK_BYTES):
        budget -= len(block)
        if budget < 0:
            raise InputDataError(
                "the archive unpacks to too many bytes",
                fix="do not use this archive; nothing was unpacked",
            )
        sink.write(block)
    return budget


def _verify(path: Path, archive: Archive) -> dict[str, str]:
    data = path.read_bytes()  # at most max_bytes, 64 MiB
    digests = {
        "md5": hashlib.md5(data, usedforsecurity=False).hexdigest(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    for kind, expected in (("md5", archive.md5), ("sha256", archive.sha256)):
        if expected is not None and digests[kind] != expected:
            raise InputDataError(
                f"{archive.name}.zip is not the published file",
                received=f"{kind} {digests[kind]}",
                allowed=f"{kind} {expected}",
                fix="try again; if it stays so, the source was changed: do not use it",
            )
    return digests


def _download_with_retries(
    url: str, target: Path, archive: Archive, options: DownloadOptions
) -> None:
    for attempt in range(options.retries + 1):
        try:
            _download(url, target, archive.max_bytes, options)
            return
        except urllib.error.HTTPError as error:
            reason: Exception = error
            if error.code not in _RETRIED_STATUS:
                break
        except (
            urllib.error.URLError,
            TimeoutError,
            ConnectionError,
            http.client.HTTPException,
        ) as error:
            reason = error
        if attempt < options.retries:
            time.sleep(2.0**attempt)
    raise UpstreamNotReadyError(
        f"cannot download {url}",
        received=reason,
        fix="check the network and --base-url, or run `generate` for a sample without network",
    ) from reason


def _download(url: str, target: Path, max_bytes: int, options: DownloadOptions) -> None:
    opener = urllib.request.build_opener(_SecureRedirects)
    request = urllib.request.Request(url, headers={"User-Agent": "sluice"})  # noqa: S310 (checked)
    ends = time.monotonic() + options.deadline_s
    with opener.open(request, timeout=options.timeout_s) as response, target.open("wb") as sink:
        stated = response.headers.get("Content-Length", "")
        total = int(stated) if stated.isdecimal() else None
        received = 0
        while block := response.read1(_BLOCK_BYTES):
            received += len(block)
            if max(received, total or 0) > max_bytes:
                raise InputDataError(
                    "the download is too large",
                    received=f"{max(received, total or 0)} bytes",
                    allowed=f"at most {max_bytes} bytes",
                )
            if time.monotonic() > ends:
                raise TimeoutError(f"not done after {options.deadline_s:g} s")
            sink.write(block)
            options.on_progress(received, total)
    if total is not None and received != total:
        raise ConnectionError(f"connection closed after {received} of {total} bytes")


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _require_secure(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_secure(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and _is_loopback(parts.hostname or ""):
        return
    raise ConfigError(
        "the download address is not secure",
        received=url,
        allowed="https://… (http:// for this machine only)",
        fix="pass --base-url",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
