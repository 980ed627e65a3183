"""The code blocks of the written pages, and what a comment above a block says about its test.

A block of `sh`, `python`, `yaml` or `json` is checked as it stands. Those of `sh` and `python` are
also run by `make test-all`: all blocks of a page in their order, in a folder of their own that
holds `work/` as `sluice demo` leaves it. A comment on the line above a block says otherwise:

    <!-- not run: REASON -->            nothing runs it; it is still checked
    <!-- tested by: tests/FILE.py -->   that test takes the block from the page
    <!-- config: model.embeddings -->   a yaml block is this part of a config
    <!-- file: NAME -->                 the block is written to a file that later blocks read

and a comment `<!-- setup sh`, or `python`, with lines up to `-->`, runs before the page's blocks.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from jobs.cli import SUBCOMMANDS
from tests.docs_site.command_pages import load_command
from tests.docs_site.config_reference import find_roots
from tests.docs_site.hooks import KEPT_FOLDERS

ROOT = Path(__file__).parents[2]
CHECKED = ("sh", "python", "yaml", "json")
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+?): (?P<note>[^\n]*?) -->\n)?```(?P<language>\w+)[^\n]*\n"
    r"(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SETUP = re.compile(r"^<!-- setup (sh|python)\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
MARKS = ("not run", "tested by", "config", "file")
OURS = ("conf", "etl", "training", "jobs")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: File that it is in, from the checkout's root.
        line: Line of its fence, from 1.
        language: As the fence names it.
        code: Its text.
        mark: What the comment above it is about; empty where there is none.
        note: What that comment says.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str
    note: str

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"


TRANSLATED = ".zh.md"


def list_pages() -> list[Path]:
    """Returns the pages that people write; translated ones have the blocks of the English ones."""
    docs = ROOT / "docs"
    made = [docs / folder for folder in KEPT_FOLDERS]
    pages = [page for page in docs.rglob("*.md") if not set(made) & set(page.parents)]
    pages = [page for page in pages if not page.name.endswith(TRANSLATED)]
    return [ROOT / "README.md", *sorted(pages)]


def read_blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page that are code."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.relative_to(ROOT).as_posix(),
            text[: found.start("language")].count("\n") + 1,
            found["language"],
            found["code"],
            found["mark"] or "",
            found["note"] or "",
        )
        for found in BLOCK.finditer(text)
        if found["language"] in CHECKED
    ]


def read_setup(page: Path) -> list[tuple[str, str]]:
    """Returns language and code of what runs before the blocks of a page."""
    return SETUP.findall(page.read_text(encoding="utf-8"))


def find_fault(block: Block) -> str | None:
    """Returns what is wrong with a block as it stands, or None."""
    if block.mark and block.mark not in MARKS:
        return f"unknown comment {block.mark!r}; use one of {', '.join(MARKS)}"
    if block.mark == "tested by":
        return _find_fault_of_test(block)
    check = {
        "sh": _check_commands,
        "python": _check_python,
        "yaml": _check_yaml,
        "json": _check_json,
    }
    try:
        check[block.language](block)
    except (ValueError, SyntaxError, ImportError, yaml.YAMLError) as error:
        return str(error)
    return None


def _find_fault_of_test(block: Block) -> str | None:
    test = ROOT / block.note
    if not test.is_file():
        return f"there is no {block.note}"
    name = Path(block.page).name
    return (
        None if name in test.read_text(encoding="utf-8") else f"{block.note} does not read {name}"
    )


def _check_python(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            # Not imported: that would start TensorFlow.
            spec = importlib.util.find_spec(str(node.module))
            source = Path(str(spec and spec.origin)).read_text(encoding="utf-8") if spec else ""
            for alias in node.names:
                if not re.search(rf"\b{alias.name}\b", source):
                    raise ImportError(f"{node.module} has no {alias.name}")


def _check_json(block: Block) -> None:
    for line in block.code.splitlines():
        json.loads(line)


def list_command_lines(code: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell block."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for part in _split_at(words, ("&&", "|", "||", ";")):
            # NAME=value before a command sets its environment.
            while part and re.match(r"^[A-Z_][A-Z0-9_]*=", part[0]):
                part = part[1:]
            if part:
                yield part


def _split_at(words: list[str], marks: tuple[str, ...]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in marks:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _check_commands(block: Block) -> None:
    for words in list_command_lines(block.code):
        if words[0] == "sluice":
            check_sluice(words[1:])


def check_sluice(arguments: list[str]) -> None:
    """Checks that the command line parses.

    Raises:
        ValueError: There is no such subcommand, or it does not take these options.
    """
    if not arguments or arguments[0].startswith("-"):
        return
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        raise ValueError(f"no subcommand {name!r}: {', '.join(SUBCOMMANDS)}")
    command: Any = load_command(name)
    commands = getattr(command, "commands", None)
    if commands is not None:
        if not rest or rest[0] not in commands:
            raise ValueError(f"sluice {name} is followed by one of {', '.join(commands)}")
        command, rest = commands[rest[0]], rest[1:]
    try:
        command.make_context(name, rest, resilient_parsing=False)
    except Exception as error:
        raise ValueError(f"sluice {' '.join(arguments)}: {error}") from error


def _check_yaml(block: Block) -> None:
    for part in yaml.safe_load_all(block.code):
        if not isinstance(part, dict):
            raise ValueError("a yaml block is a config, or a part of one")
        nested: Any = part
        for key in reversed(block.note.split(".") if block.mark == "config" else ()):
            nested = {key: nested}
        _check_config(nested)


def _check_config(data: dict[str, Any]) -> None:
    """Checks a config, or some of its keys, by the class that has such keys."""
    roots = [cls for cls in find_roots().values() if set(data) <= set(cls.model_fields)]
    if not roots:
        raise ValueError(
            f"no config has the keys {', '.join(data)}; where they are part of a group, name it "
            "in a comment above the block: <!-- config: model.embeddings -->"
        )
    faults = [fault for cls in roots if (fault := _find_misfit(cls, data)) is not None]
    if len(faults) == len(roots):
        raise ValueError("\n".join(faults))


def _find_misfit(cls: type[BaseModel], data: dict[str, Any]) -> str | None:
    """What is wrong with the keys that are given; others may be missing."""
    try:
        cls.model_validate(data)
    except ValidationError as error:
        wrong = [e for e in error.errors() if e["type"] != "missing" or len(e["loc"]) > 1]
        return "\n".join(f"{cls.__name__}: {e['loc']}: {e['msg']}" for e in wrong) or None
    return None
