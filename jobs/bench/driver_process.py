"""A measurement in a fresh process, which prints its result as one line of JSON, the last."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class DriverResult:
    """How a process ended.

    Attributes:
        returncode: Its exit code.
        stdout: What it printed.
        errors: The same on standard error.
    """

    returncode: int
    stdout: str
    errors: str

    @property
    def value(self) -> dict[str, Any]:
        """The last line of what it printed."""
        return dict(json.loads(self.stdout.splitlines()[-1]))


def run_driver_process(module: str, job: dict[str, Any]) -> DriverResult:
    """Runs `python -m module JOB_JSON` and waits for it.

    Args:
        module: Module of this code.
        job: What it is to do, as JSON values.
    """
    # In a file: a job that fails may have printed more than a pipe holds.
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(  # noqa: S603 - this code's own module
            [sys.executable, "-m", module, json.dumps(job)],
            stdout=subprocess.PIPE, stderr=errors, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        errors.seek(0)
        return DriverResult(done.returncode, done.stdout, errors.read())
