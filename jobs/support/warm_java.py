"""Makes the archive of Spark's classes that later Javas read (`jobs.support.java_runtime`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jobs.support.java_runtime import ensure_java, find_archive

_SUBMIT_OPTIONS = "SPARK_SUBMIT_OPTS"
_RATINGS = "3000"
"""Of the log whose build loads the classes."""


def make_archive(archive: Path) -> None:
    """Makes an archive, of the classes that the build of a small log loads.

    Args:
        archive: Where it shall be; complete from the moment when it is there.

    Raises:
        CalledProcessError: A command failed.
    """
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder, "made.jsa")
        _run(["data", "generate", "--out", f"{folder}/logs", "--ratings", _RATINGS], "")
        settings = [f"output.root={folder}/datasets", "split.validation=20"]
        given = [part for setting in settings for part in ("--set", setting)]
        # Java says at its end which classes it leaves out.
        options = f"-Xlog:disable -XX:ArchiveClassesAtExit={made}"
        _run(["build", "demo", "--data", f"{folder}/logs", *given], options)
        if made.exists():
            made.rename(archive)


def _run(command: list[str], options: str) -> None:
    """Runs a command, and waits for its Java too: that has the command's output open."""
    before = os.environ.get(_SUBMIT_OPTIONS, "")
    environment = {**os.environ, _SUBMIT_OPTIONS: f"{before} {options}".strip()}
    subprocess.run(  # noqa: S603
        [sys.executable, "-m", "jobs.cli", *command],
        env=environment, check=True, capture_output=True,
    )  # fmt: skip


def main() -> None:
    """Makes the archive of this machine's Java, unless it is there."""
    archive = find_archive(ensure_java())
    if not archive.exists():
        make_archive(archive)


if __name__ == "__main__":
    main()
