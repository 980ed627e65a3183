"""The documentation names what exists, and says all that its generated pages need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs import config_reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCE = re.compile(r"`((?:etl|training|jobs|conf|tests|docs)/[\w/.-]*[\w/])`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"python -m ((?:etl|training|jobs|tests)(?:\.[a-z_]+)+)(?![.\w])")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    missing = [path for path in SOURCE.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    for module in MODULE.findall(text):
        path = ROOT.joinpath(*module.split("."))
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            missing.append(module)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_holds_two_versions_of_a_passage(page):
    marks = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
    assert not marks.search(page.read_text(encoding="utf-8"))


def test_every_key_of_a_config_has_words():
    missing = config_reference.find_undescribed()
    assert not missing, (
        "the config reference has no words for these keys; give each a "
        f'`Field(…, description="…")`, or name it under `Attributes:` of its class: {missing}'
    )
