"""The commands and the Python code of the pages run, page by page; see tests/docs_site/blocks.py.

The blocks of a page run in their order, in a folder of their own that holds `work/` as `sluice
demo` leaves it (on few ratings). `/data` in them is a folder below it. Python blocks find `spark`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from tests.docs_site.blocks import ROOT, Block, list_pages, read_blocks, read_setup

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

RUN = ("sh", "python")
# What a shell does beyond words and quotes.
SHELL = re.compile(r"[$|&;<>(){}*]|^\w+=|^export ", re.MULTILINE)
# Commands that start Spark do so in a process of their own: the suite's session is another.
OWN_PROCESS = ("build", "skew", "demo")


def list_runnable(page: Path) -> list[Block]:
    kept = [b for b in read_blocks(page) if b.mark not in ("not run", "tested by")]
    return [b for b in kept if b.language in RUN or b.mark == "file"]


PAGES = [p for p in list_pages() if any(b.language in RUN for b in list_runnable(p))]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    code = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "demo", "--ratings", "5000"],
        cwd=folder, env=_environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    assert code.returncode == 0, code.stderr[-3000:]
    return folder


@pytest.fixture
def folder(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(demo / "work", tmp_path / "work", symlinks=True)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _environment(folder: Path) -> dict[str, str]:
    """`sluice` and `python` are those of this environment, and the checkout can be imported."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PATH": path, "PYTHONPATH": modules}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page: Path, folder: Path, spark: Any) -> None:
    names: dict[str, Any] = {"spark": spark, "__name__": "__page__"}
    parts = [("its setup", language, code) for language, code in read_setup(page)]
    for where, language, code in parts:
        _run(where, language, code, folder, names)
    for block in list_runnable(page):
        if block.mark == "file":
            (folder / block.note).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.note).write_text(_localise(block.code, folder), encoding="utf-8")
        elif block.language in RUN:
            _run(block.place, block.language, block.code, folder, names)


def _localise(code: str, folder: Path) -> str:
    return code.replace("/data/", f"{folder}/data/")


def _run(place: str, language: str, code: str, folder: Path, names: dict[str, Any]) -> None:
    code = _localise(code, folder)
    if language == "python":
        exec(compile(code, place, "exec"), names)
    elif SHELL.search(re.sub(r"'[^'\n]*'|#.*", "", code)):
        _run_shell(place, code, folder)
    else:
        for line in code.replace("\\\n", " ").splitlines():
            _run_line(place, line, folder)


def _run_line(place: str, line: str, folder: Path) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == ["sluice"] and words[1] not in OWN_PROCESS and "--launcher" not in words:
        assert main(words[1:]) == 0, f"{place}: {line}"
    elif words:
        _run_shell(place, line, folder)


def _run_shell(place: str, code: str, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder, env=_environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{place}:\n{code}\n{done.stdout}\n{done.stderr}"
