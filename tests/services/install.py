"""Installs what `make test-all` tests against, and writes the variables that name it.

    python -m tests.services.install [NAME …]
    . .test-services/environment

Each has a folder of its own in `.test-services/`. What is there at its pinned version stays; what a
variable of the environment names is the user's and is not installed. Nothing here is required:
what cannot be had is named with the reason, and its tests are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.services.catalogue import SERVICES, Service
from tests.services.recipes import UnavailableError

FOLDER = Path(__file__).parents[2] / ".test-services"
_MARKER = "installed.json"
# Most of the time goes by in downloads.
_AT_ONCE = 4


@dataclass(frozen=True)
class Outcome:
    """What became of one.

    Attributes:
        name: Of the service.
        state: `installed`, `kept` (it was there), `given` (by the user) or `missing`.
        reason: Why it is missing.
    """

    name: str
    state: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name:10} {self.state}" + (f": {self.reason}" if self.reason else "")


def install(service: Service, root: Path) -> Outcome:
    """Installs one, if it is not there.

    Args:
        service: Which.
        root: Folder of all.
    """
    if any(os.environ.get(name) for name in service.variables):
        return Outcome(service.name, "given")
    folder = root / service.name
    if read_installed(service, root) is not None:
        return Outcome(service.name, "kept")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        variables = service.install(folder)
    except (UnavailableError, OSError, subprocess.TimeoutExpired) as error:
        return Outcome(service.name, "missing", str(error))
    # Last: a folder without it is one of an installation that was broken off.
    made = {"fingerprint": fingerprint(service), "variables": variables}
    (folder / _MARKER).write_text(json.dumps(made))
    return Outcome(service.name, "installed")


def read_installed(service: Service, root: Path) -> dict[str, str] | None:
    """The variables of an installation that is whole and has the service's pins; or None."""
    try:
        made = json.loads((root / service.name / _MARKER).read_text())
    except (OSError, ValueError):
        return None
    variables: dict[str, str] = made["variables"]
    places = [place for value in variables.values() for place in re.split("[:,]", value)]
    is_there = all(Path(place).exists() for place in places)
    return variables if is_there and made["fingerprint"] == fingerprint(service) else None


def fingerprint(service: Service) -> str:
    """Tells installations of other versions apart."""
    return hashlib.sha256("\n".join(service.pins).encode()).hexdigest()


def write_environment(root: Path, services: Iterable[Service] = SERVICES) -> Path:
    """Writes what a shell reads to have the variables of all that is there; returns the file."""
    lines = [
        # What the user's environment names already is the user's.
        f'test -n "${{{name}:-}}" || export {name}={shlex.quote(value)}\n'
        for service in services
        for name, value in (read_installed(service, root) or {}).items()
    ]
    file = root / "environment"
    file.write_text("".join(lines))
    return file


def main(arguments: list[str]) -> None:
    """Installs those named, or all; prints what became of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [service.name for service in SERVICES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names)}")
    wanted = parser.parse_args(arguments).names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"no such service: {', '.join(unknown)}; there are {', '.join(names)}")
    FOLDER.mkdir(exist_ok=True)
    chosen = [service for service in SERVICES if not wanted or service.name in wanted]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(install, service, FOLDER) for service in chosen]
        for done in as_completed(running):
            print(done.result(), flush=True)
    print(f"variables: . {write_environment(FOLDER)}")


if __name__ == "__main__":
    main(sys.argv[1:])
