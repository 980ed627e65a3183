"""Public data sets, and the folders of sample data: written whole or not at all."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.local_paths import absolute_path
from conf.storage.atomic_output import staged_directory

BASE_URL = "https://files.grouplens.org/datasets/movielens"
ARCHIVES = {
    "ml-1m": "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
    "ml-100k": "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
}
"""SHA-256 of each zip archive that can be fetched."""
ARCHIVE_CARD_NAME = "DOWNLOAD.json"
_MOST_BYTES = 1 << 26
"""A download stops above this size; the largest of `ARCHIVES` has 6 MB."""
_RETRIES, _TIMEOUT_S = 2, 30.0


@contextmanager
def replace_directory(out_dir: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory that takes the place of `out_dir` when the block ends well.

    With `overwrite` a directory that holds the file `marker` is replaced, and no other.
    """
    out_dir = absolute_path(out_dir)
    with staged_directory(out_dir) as staging:
        if os.path.lexists(out_dir):
            is_directory = out_dir.is_dir() and not out_dir.is_symlink()
            names = [path.name for path in out_dir.iterdir()] if is_directory else ["."]
            if names and not (overwrite and marker in names):
                raise ConfigError(
                    "the output exists and is not replaced",
                    received=out_dir,
                    fix=f"pass another --out, or --overwrite to replace a folder with {marker}",
                )
        yield staging


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


def fetch_archive(name: str, out_dir: Path, base_url: str, *, overwrite: bool) -> None:
    """Downloads one of `ARCHIVES` and unpacks it, without its top folder, beside a card.

    Raises:
        ConfigError: `out_dir` may not be replaced.
        UpstreamNotReadyError: The server cannot be reached or does not hold the file.
        InputDataError: The file is not the published one.
    """
    address = f"{base_url.rstrip('/')}/"
    with replace_directory(out_dir, ARCHIVE_CARD_NAME, overwrite=overwrite) as staging:
        download = staging / ".download"
        shutil.unpack_archive(_download(name, address, download), download / "unpacked")
        (top,) = (download / "unpacked").iterdir()
        for path in top.iterdir():
            path.rename(staging / path.name)
        shutil.rmtree(download)
        source = {"name": name, "url": f"{address}{name}.zip", "sha256": ARCHIVES[name]}
        write_card(staging / ARCHIVE_CARD_NAME, {**source, "files": file_sizes(staging)})


class _BoundedFile(io.FileIO):
    """A file that refuses to grow above `_MOST_BYTES`, whatever a server sends."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_BYTES:
            raise InputDataError(
                f"the server sends more than the {_MOST_BYTES:,} bytes that a data set may have",
                fix="check --base-url: this is not the published file",
            )
        return super().write(data)


def _download(name: str, address: str, folder: Path) -> Path:
    # Imported late: together they take longer than most commands.
    import pooch
    import requests

    def fetch_bounded(url: str, target: str, source: pooch.Pooch) -> None:
        with _BoundedFile(target, "wb") as file:
            pooch.HTTPDownloader(timeout=_TIMEOUT_S)(url, file, source)

    pooch.get_logger().setLevel("WARNING")
    file, sha256 = f"{name}.zip", ARCHIVES[name]
    known = {file: f"sha256:{sha256}"}
    source = pooch.create(folder, address, registry=known, retry_if_failed=_RETRIES)
    try:
        return Path(source.fetch(file, downloader=fetch_bounded))
    except requests.RequestException as error:
        raise UpstreamNotReadyError(
            f"cannot download {file}",
            received=error,
            fix="check the network and --base-url, or `sluice data generate` a sample",
        ) from error
    except ValueError as error:
        raise InputDataError(
            f"{file} is not the published file",
            received=error,
            allowed=f"SHA-256 {sha256}",
            fix="try again; if it stays so, the source was changed: do not use it",
        ) from error
