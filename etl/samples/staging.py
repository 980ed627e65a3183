"""A directory that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import ConfigError, InternalError


@contextmanager
def stage_directory(out_dir: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory beside `out_dir` that takes its place when the block succeeds.

    On any error, the block's own included, `out_dir` is left as it was.

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
    _require_replaceable(out_dir, marker, overwrite)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent))
    except OSError as error:
        raise _refused(out_dir, error) from error
    try:
        staging.chmod(0o755)
        yield staging
        _publish(staging, out_dir)
    except OSError as error:
        raise _refused(out_dir, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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


def _publish(staging: Path, out_dir: Path) -> None:
    if not out_dir.exists() or not any(out_dir.iterdir()):
        staging.replace(out_dir)  # rename(2) also replaces an empty directory
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.replaced-", dir=out_dir.parent))
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
