"""What a release is checked by: answers about vulnerabilities, lock files, the container file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.release import audit, install_check

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)(?:\[[^\]]*\])?==([^ ;\\]+)", re.MULTILINE)
SOUND = {"name": "numpy", "version": "2.3.0", "vulns": []}
SKIPPED = {"name": "keras", "skip_reason": "not found"}
FAULTY = {
    "name": "tqdm",
    "version": "4.0",
    "vulns": [{"id": "CVE-1", "fix_versions": ["4.1"], "aliases": [], "description": ""}],
}


@pytest.mark.parametrize(
    ("packages", "code", "words"),
    [
        ([SOUND], 0, "none found in the 1 packages"),
        ([SOUND, FAULTY], 1, "tqdm 4.0: CVE-1, fixed in 4.1"),
        ([FAULTY, SKIPPED], 1, "nothing is known of them"),
        ([SOUND, SKIPPED], 4, "keras: not found"),
        ([], 4, ""),
    ],
)
def test_none_found_is_told_from_not_asked(packages, code, words):
    answer = audit.read_answer(json.dumps({"dependencies": packages, "fixes": []}), "")
    assert answer.exit_code == code
    assert words in audit.describe(answer)
    assert ("none found" in audit.describe(answer)) == (SOUND in packages and code != 1)


@pytest.mark.parametrize("output", ["", "no network", "[]"])
def test_no_answer_is_no_clean_bill(output):
    answer = audit.read_answer(output, "ConnectionError: no route\n")
    assert answer.exit_code == 4
    assert "ConnectionError" in audit.describe(answer)


def read_pins(path: Path) -> dict[str, str]:
    return dict(PIN.findall(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.lock")), ids=str)
def test_lock_files_agree(path):
    pins = read_pins(ROOT / "requirements.lock")
    shared = {name: version for name, version in read_pins(path).items() if name in pins}
    assert len(shared) > 3
    assert shared == {name: pins[name] for name in shared}, "run `make lock`"


@pytest.mark.parametrize(("lock", "extra"), [("train", "training"), ("serve", "serve")])
def test_the_containers_lock_files_hold_what_their_extra_asks_for(lock, extra):
    pins = read_pins(ROOT / "requirements" / f"{lock}.lock")
    asked = install_check.PROJECT["dependencies"]
    asked += install_check.PROJECT["optional-dependencies"][extra]
    names = {re.match(r"[\w-]+", line)[0].lower() for line in asked}
    assert names - set(pins) <= {"sluice-recsys"}, "run `make lock`"
    assert "pyspark" not in pins


def test_every_extra_is_installed_alone():
    extras = set(install_check.PROJECT["optional-dependencies"]) - set(install_check.LEFT_OUT)
    declared = [install_check.BASE, *sorted(extras)]
    cases = list(install_check.list_cases(declared, list(install_check.PYTHONS)))
    assert {extra for _, extra, _ in cases} == extras | {"base"}
    assert {kind for _, _, kind in cases} == {"wheel", "sdist"}
    assert {f"Programming Language :: Python :: {p}" for p in install_check.PYTHONS} <= set(
        install_check.PROJECT["classifiers"]
    )


def test_the_container_file_copies_what_is_there_and_runs_without_rights():
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists(), source
    for stage in text.split("\nFROM ")[3:]:
        assert "USER 10001" in stage
        assert "--require-hashes" in stage


def test_licences_are_read_as_spdx_writes_them():
    pytest.importorskip("license_expression", reason="the group `release` is not installed")
    pytest.importorskip("cyclonedx_py", reason="the group `release` is not installed")
    from tests.release import inventory

    allowed = (
        "MIT",
        "Apache-2.0 OR GPL-3.0-only",
        "BSD-2-Clause AND Apache-2.0 WITH LLVM-exception",
    )
    refused = ("GPL-3.0-only", "MIT AND AGPL-3.0-only", "my own licence", "")
    assert all(map(inventory.is_allowed, allowed))
    assert not any(map(inventory.is_allowed, refused))
    part = {"name": "x", "licenses": [{"license": {"id": "GPL-3.0-only"}}]}
    assert inventory.find_faults([part, {"name": "y"}]) == [
        "x: GPL-3.0-only",
        "y: no licence in its metadata",
    ]
