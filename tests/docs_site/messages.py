"""The messages of the code, found in its source: what was wrong, what is allowed, how to fix it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import conf.errors
from conf.errors import SluiceError
from tests.docs_site.markdown import join_blocks, render_table

ROOT = Path(__file__).parents[2]
PACKAGES = ("conf", "etl", "training", "jobs")
ANY = "…"
# Checks of configs raise ValueError: pydantic gathers them, and `conf.load` makes one error of all.
CHECK = "ValueError"


@dataclass(frozen=True)
class Message:
    """One place in the code that raises an error.

    Attributes:
        what: The message; `…` stands for what is filled in when it is raised.
        allowed: What would have been accepted; empty where the code does not say.
        fix: What to do about it; empty where the code does not say.
        exit_code: Exit code of a command that it ends.
        folder: Folder of its file, such as `etl/sources`.
    """

    what: str
    allowed: str
    fix: str
    exit_code: int
    folder: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the message as it is printed."""
        return re.compile(re.escape(self.what).replace(re.escape(ANY), ".+"), re.DOTALL)


@cache
def find_messages() -> tuple[Message, ...]:
    """Returns every message whose text stands where it is raised, in the order of its text."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    codes = _find_exit_codes(list(trees.values()))
    found = {m for path, tree in trees.items() for m in _read_file(path, tree, codes)}
    return tuple(sorted(found, key=lambda m: (m.what.lower(), m.folder)))


def _find_exit_codes(trees: Iterable[ast.Module]) -> dict[str, int]:
    """Exit code by name of an error class, of those that other files derive too."""
    codes = {
        name: int(value.exit_code)
        for name, value in vars(conf.errors).items()
        if isinstance(value, type) and issubclass(value, SluiceError)
    }
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # classes derived from derived ones
        for node in classes:
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in codes:
                    codes.setdefault(node.name, codes[base.id])
    return codes


def _read_file(path: Path, tree: ast.Module, codes: dict[str, int]) -> Iterator[Message]:
    inside = path.relative_to(ROOT)
    is_config = inside.parts[0] == "conf" and inside.parts[1] in ("etl", "training")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name = node.func.id
        code = codes.get(name, 2 if name == CHECK and is_config else None)
        what = _read_text(node.args[0]) if node.args else ""
        if code is None or len(what.replace(ANY, "").strip()) < 4:
            continue
        parts = {k.arg: _read_text(k.value) for k in node.keywords}
        folder = inside.parent.as_posix()
        yield Message(what, parts.get("allowed", ""), parts.get("fix", ""), code, folder)


def _read_text(node: ast.expr) -> str:
    """Text of an expression; what is only known when it runs becomes `…`."""
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value is not None else ""
    if isinstance(node, ast.JoinedStr):
        text = "".join(_read_text(v) if isinstance(v, ast.Constant) else ANY for v in node.values)
        return re.sub(rf"['\"]?{ANY}['\"]?", ANY, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _read_text(node.left) + _read_text(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_read_text(node.body), _read_text(node.orelse))))
    return ANY


EXIT_CODES = {
    2: ("config", "Wrong usage or config", "Nothing was touched."),
    3: ("data", "Input data refused", "The last good version is still the current one."),
    4: (
        "not-ready",
        "Something upstream is not ready",
        "Try again later, or make what is missing.",
    ),
    5: ("diverged", "Training diverged", "The last good checkpoint is still there."),
    1: ("failed", "The environment failed", "A full disk, no permission, a store that is away."),
}


def render_pages() -> dict[str, str]:
    """Returns a page per exit code by file name, in Markdown."""
    pages = {}
    for code, (name, title, note) in EXIT_CODES.items():
        messages = [m for m in find_messages() if m.exit_code == code]
        if messages:
            pages[f"{name}.md"] = _render_page(f"{title} (exit code {code})", note, messages)
    return pages


def _render_page(title: str, note: str, messages: list[Message]) -> str:
    by_folder: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        by_folder[message.folder].append(message)
    hint = f"`{ANY}` stands for what is filled in. The search finds any words of a message."
    blocks = [f"# {title}", note, hint]
    for folder, found in sorted(by_folder.items()):
        rows = [(_cell(m.what), _cell(m.allowed), _cell(m.fix)) for m in found]
        blocks += [f"## {folder}", render_table(("message", "allowed", "fix"), rows)]
    return join_blocks(blocks)


def _cell(text: str) -> str:
    plain = " ".join(text.split()) if text != ANY else "named in the message"
    return re.sub(r"([<>*_\[\]{}\\`~])", r"\\\1", plain)
