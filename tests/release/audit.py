"""Known vulnerabilities of the locked packages, by pip-audit.

    python -m tests.release.audit [LOCK …]

It ends with 0 where the database was asked about every package and knows of nothing, with 1 where
it knows of something, and with 4 where it was not asked about all of them: no network, a mirror
that does not answer such questions. "None found" is only said of packages that were asked about.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NONE_FOUND, FOUND, NOT_ASKED = 0, 1, 4
SERVICES = ("pypi", "osv")


@dataclass(frozen=True)
class Answer:
    """What a database says of a lock file.

    Attributes:
        asked: Packages that it was asked about.
        not_asked: Packages that it could not be asked about, each with the reason.
        found: A line per vulnerability: package, version, identifier, versions without it.
    """

    asked: tuple[str, ...]
    not_asked: tuple[str, ...]
    found: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """What the command ends with; a vulnerability outweighs what was not asked."""
        if self.found:
            return FOUND
        return NOT_ASKED if self.not_asked or not self.asked else NONE_FOUND


def ask(lock: Path, service: str) -> Answer:
    """Asks a database about every package of a lock file; nothing is installed."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes",
            "--disable-pip", "--format", "json", "--progress-spinner", "off",
            "--vulnerability-service", service,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return read_answer(done.stdout, done.stderr)


def read_answer(output: str, errors: str) -> Answer:
    """Reads what pip-audit printed.

    Args:
        output: Its standard output: JSON, where a database was asked at all.
        errors: Its standard error, which names the reason where none was.
    """
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = [line for line in errors.splitlines() if line.strip()]
        return Answer(
            (), (f"all packages: {lines[-1] if lines else 'pip-audit said nothing'}",), ()
        )
    skipped = [f"{p['name']}: {p['skip_reason']}" for p in packages if "skip_reason" in p]
    asked = [p for p in packages if "skip_reason" not in p]
    found = [_describe_fault(p, fault) for p in asked for fault in p["vulns"]]
    return Answer(tuple(p["name"] for p in asked), tuple(skipped), tuple(found))


def _describe_fault(package: dict[str, Any], fault: dict[str, Any]) -> str:
    fixed = ", ".join(fault["fix_versions"]) or "no version"
    return f"{package['name']} {package['version']}: {fault['id']}, fixed in {fixed}"


def describe(answer: Answer) -> str:
    """Returns in words what is known and what is not."""
    lines = [*answer.found]
    if answer.asked and not answer.found:
        lines.append(f"none found in the {len(answer.asked)} packages that were asked about")
    if answer.not_asked:
        lines.append(f"not asked about {len(answer.not_asked)}, so nothing is known of them:")
        lines += [f"  {line}" for line in answer.not_asked[:5]]
        lines += ["  …"] * (len(answer.not_asked) > 5)
    return "\n".join(lines)


def main() -> int:
    """Asks each database in turn until one was asked about every package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", nargs="*", type=Path, default=[ROOT / "requirements.lock"])
    codes = []
    for lock in parser.parse_args().lock:
        for service in SERVICES:
            answer = ask(lock, service)
            print(f"{lock.name}, {service}:\n{describe(answer)}", flush=True)
            if answer.exit_code != NOT_ASKED:
                break
        codes.append(answer.exit_code)
    return FOUND if FOUND in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
