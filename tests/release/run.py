"""All checks of a release, one after the other: `make release-check`.

It ends with 0 where each check is sound, with 1 where one found a fault, and with 4 where the only
thing that is missing is an answer about known vulnerabilities.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BINARIES = Path(sys.executable).parent
NOT_ASKED = 4
CHECKS = {
    "packages, licences, SBOM": [sys.executable, "-m", "tests.release.inventory"],
    "known vulnerabilities": [sys.executable, "-m", "tests.release.audit"],
    "container file": [str(BINARIES / "hadolint"), str(ROOT / "Containerfile")],
    "installations": [sys.executable, "-m", "tests.release.install_check"],
}
SAID = {0: "sound", NOT_ASKED: "not asked: nothing is known"}


def main() -> int:
    """Runs the checks, prints their ends, and returns the worst."""
    ends = {}
    for name, command in CHECKS.items():
        print(f"== {name}", flush=True)
        ends[name] = subprocess.run(command, cwd=ROOT, check=False).returncode
    print("== summary")
    for name, code in ends.items():
        print(f"{name}: {SAID.get(code, f'exit code {code}')}")
    faults = [code for code in ends.values() if code not in SAID]
    return 1 if faults else max(ends.values())


if __name__ == "__main__":
    sys.exit(main())
