"""A directory that appears complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import ConfigError, InternalError

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
