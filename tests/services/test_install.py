"""Services are installed once, tell why they are missing, and are all that tests ask for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.real_data import DATA_SETS
from tests.services.catalogue import SERVICES, Service
from tests.services.install import install, read_installed, write_environment
from tests.services.recipes import UnavailableError, call, copy_jars

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
# Named by the user alone: real data, and what makes a run longer, shorter or the same again.
CHOSEN = {
    "SLUICE_DATA",
    "SLUICE_FAULT_MOMENTS",
    "SLUICE_FUZZ_RECORDS",
    "SLUICE_KILL_SEED",
    "SLUICE_TEST_ALL",
}
# A look-up in the environment, or the constant that one uses.
READ = re.compile(r"(?:environ(?:\.get\(|\[)|[A-Z_]+ = )\"(SLUICE_[A-Z_]+)\"")


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("SLUICE_"):
            monkeypatch.delenv(name)


def build_service(made: list[Path], *pins: str) -> Service:
    """A service whose installation leaves a file, and says so."""

    def fill(folder: Path) -> dict[str, str]:
        made.append(folder)
        (folder / "a program").touch()
        return {"SLUICE_TOY": str(folder / "a program")}

    return Service("toy", ("SLUICE_TOY",), pins, fill)


def test_what_is_there_at_its_version_stays(tmp_path: Path) -> None:
    made: list[Path] = []
    service = build_service(made, "1.0")
    assert install(service, tmp_path).state == "installed"
    assert install(service, tmp_path).state == "kept"
    assert len(made) == 1
    assert install(build_service(made, "1.1"), tmp_path).state == "installed"
    (made[0] / "a program").unlink()  # by hand, or by a clean-up
    assert install(build_service(made, "1.1"), tmp_path).state == "installed"
    assert len(made) == 3


def test_an_installation_that_was_broken_off_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "half").touch()
    assert install(build_service([]), tmp_path).state == "installed"
    assert not (tmp_path / "toy" / "half").exists()


def test_a_shell_reads_the_variables_and_keeps_the_users(tmp_path: Path) -> None:
    service = build_service([])
    install(service, tmp_path)
    file = write_environment(tmp_path, [service])
    script = f"set -eu; . '{file}'; echo \"$SLUICE_TOY\""
    shells = [
        subprocess.run(["sh", "-c", script], env=own, capture_output=True, text=True, check=True)
        for own in ({}, {"SLUICE_TOY": "/mine"})
    ]
    assert [done.stdout.strip() for done in shells] == [f"{tmp_path}/toy/a program", "/mine"]


def test_what_the_user_has_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_TOY", "/mine")
    made: list[Path] = []
    assert install(build_service(made), tmp_path).state == "given"
    assert made == []


def test_what_cannot_be_had_is_missing_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> dict[str, str]:
        call("sh", "-c", "echo one; echo 'error: no such version' >&2; exit 3", cwd=folder)
        return {}

    service = Service("toy", ("SLUICE_TOY",), (), fail)
    outcome = install(service, tmp_path)
    assert str(outcome) == "toy        missing: `sh` failed: error: no such version"
    assert read_installed(service, tmp_path) is None
    with pytest.raises(UnavailableError, match="no `no-such-client` on this machine"):
        call("no-such-client", cwd=tmp_path)
    said = "[ERROR] Could not find artifact g:a:jar:1 in central (https://registry) -> [Help 1]"
    (tmp_path / "mvn").write_text(f"#!/bin/sh\necho '{said}'\nexit 1\n")
    (tmp_path / "mvn").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UnavailableError, match=r"^the Maven registry has no g:a:jar:1$"):
        copy_jars(["g:a:1"], tmp_path)


def test_every_variable_that_tests_read_is_installed_or_chosen_and_documented() -> None:
    texts = [file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/*.py")]
    read = {name for text in texts for name in READ.findall(text)}
    installed = {name for service in SERVICES for name in service.variables}
    assert len(read) > 10
    assert read <= installed | CHOSEN
    assert all(f"`{name}`" in GUIDE for name in installed | CHOSEN)
    assert all(f"`{service.name}`" in GUIDE for service in SERVICES)


def test_the_data_sets_that_tests_look_for_are_documented() -> None:
    lines = [line for line in GUIDE.splitlines() if line.startswith("| `")]
    for name, files in DATA_SETS.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}/` |")]
        assert all(f"`{file}`" in row for file in files)
