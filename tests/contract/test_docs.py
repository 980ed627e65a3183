"""The documentation names what exists, and says all that its generated pages need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from conf.etl.sources import SourceFormat
from conf.metrics import list_families
from conf.training.models import RetrievalConfig
from jobs.cli import SUBCOMMANDS
from tests.docs_site import (
    blocks,
    command_pages,
    config_reference,
    hooks,
    messages,
    preset_pages,
)
from tests.docs_site.blocks import TRANSLATED

ROOT = Path(__file__).parents[2]
TRANSLATIONS = sorted([*ROOT.glob("*.zh.md"), *(ROOT / "docs").rglob("*.zh.md")])
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCE = re.compile(r"`((?:etl|training|jobs|conf|tests|docs)/[\w/.-]*[\w/])`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_is_cut_in_two(page):
    """A row behind an empty line is a header, or it is shown as text."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    cut = re.findall(r"(?<=\n)\n(\|[^\n]*)\n(?!\| ?:?-)", text)
    assert not cut


def test_generated_pages_of_the_checkout_are_those_of_the_code():
    kept = hooks.list_kept()
    folders = [ROOT / "docs" / name for name in hooks.KEPT_FOLDERS]
    there = {page for folder in folders for page in folder.rglob("*.md")}
    assert there == {ROOT / "docs" / path for path in kept}, "run `make pages`"
    stale = [path for path, text in kept.items() if (ROOT / "docs" / path).read_text() != text]
    assert not stale, "run `make pages`"


def test_links_within_the_key_reference_lead_somewhere():
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text()
        anchors = set(re.findall(r'<a id="([^"]+)">', text))
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_every_key_of_a_config_has_words():
    missing = config_reference.find_undescribed()
    assert not missing, (
        "the config reference has no words for these keys; give each a "
        f'`Field(…, description="…")`, or name it under `Attributes:` of its class: {missing}'
    )


def test_presets_begin_with_what_they_are():
    assert not preset_pages.find_faults()


RETRIEVAL_NAMES = [
    member.model_fields["name"].default for member in get_args(get_args(RetrievalConfig)[0])
]
COMMANDS = [f"sluice {name}" for name in SUBCOMMANDS if name != "demo"]


def test_commands_and_options_say_what_they_do():
    assert not command_pages.find_faults()


@pytest.mark.parametrize(
    ("pages", "names"),
    [
        (["README.md"], COMMANDS),
        (["README.zh.md"], COMMANDS),
        (["docs/guide/sources.md"], get_args(SourceFormat)),
        (["docs/guide/retrieval.md", "docs/guide/sequences.md"], RETRIEVAL_NAMES),
        (["docs/guide/evaluation.md"], list_families("ranking", "lists")),
    ],
    ids=lambda value: value[0],
)
def test_what_is_built_in_stands_on_its_page(pages, names):
    text = "".join((ROOT / page).read_text() for page in pages)
    missing = [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)]
    assert missing == []


BLOCKS = [block for page in blocks.list_pages() for block in blocks.read_blocks(page)]
NOT_RUN_AT_MOST = 0.35


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_is_sound_as_it_stands(block):
    fault = blocks.find_fault(block)
    assert fault is None, (
        f"{block.place}: {fault}\nCorrect the block, or say in a comment above it how it is "
        "tested: tests/docs_site/blocks.py has the forms."
    )


def test_few_blocks_are_not_run_and_each_says_why():
    not_run = [block for block in BLOCKS if block.mark == "not run"]
    print(*(f"{block.place}: {block.note}" for block in not_run), sep="\n")
    assert all(len(block.note) > 10 for block in not_run)
    assert len(not_run) <= NOT_RUN_AT_MOST * len(BLOCKS)


def test_what_troubleshooting_quotes_is_said_by_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(quoted) >= 15
    patterns = [message.pattern for message in messages.find_messages()]
    unknown = [text for text in quoted if not any(p.fullmatch(text) for p in patterns)]
    assert not unknown, f"no message of the code reads so; correct the heading: {unknown}"


def test_figures_of_the_readme_stand_where_they_come_from():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("## Figures\n")[1].split("\n## ")[0]
    source = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    source += (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10
    for what, figure, command in rows:
        for number in re.findall(r"[0-9][0-9.,]*[0-9]|[0-9]", figure):
            assert number in source, (
                f"{what}: {number} is neither in performance.md nor in results.md"
            )
        assert "`" in command


def _read_code(page: Path) -> tuple[list[str], list[tuple[list[str], list[str]]]]:
    """The code blocks of a page, and what stands in its tables that no translation changes."""
    text = page.read_text(encoding="utf-8")
    rows = [line for line in FENCED.sub("", text).splitlines() if line.startswith("|")]
    inline = [re.findall(r"`[^`]+`", row) for row in rows]
    numbers = [re.findall(r"[0-9][0-9.,]*[0-9]|[0-9]", re.sub(r"`[^`]+`", "", row)) for row in rows]
    return FENCED.findall(text), [
        (sorted(a), sorted(b)) for a, b in zip(inline, numbers, strict=True)
    ]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_a_translated_page_has_the_code_and_the_figures_of_the_english_one(page):
    english = page.with_name(page.name.replace(TRANSLATED, ".md"))
    blocks_there, rows_there = _read_code(english)
    blocks_here, rows_here = _read_code(page)
    assert blocks_here == blocks_there, f"copy the code blocks of {english.name}"
    assert rows_here == rows_there, f"the tables differ from those of {english.name}"


def test_translated_pages_are_found():
    names = [page.relative_to(ROOT).as_posix() for page in TRANSLATIONS]
    assert names == ["README.zh.md", "docs/quickstart.zh.md"]
    nav = (ROOT / "docs" / ".nav.yml").read_text(encoding="utf-8")
    for page in TRANSLATIONS:
        english = page.with_name(page.name.replace(TRANSLATED, ".md"))
        assert f"({page.name})" in english.read_text(encoding="utf-8")
        assert page.parent == ROOT or page.relative_to(ROOT / "docs").as_posix() in nav


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the group `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in hooks.list_generated():
        assert (tmp_path / name).with_suffix(".html").exists(), name
