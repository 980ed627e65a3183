"""A page for each preset, from the comment at its head: what it is, its commands, its figures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tests.docs_site.markdown import join_blocks, render_table

FOLDER = Path(__file__).parents[2] / "conf" / "presets"
KINDS = {"etl": ("build", "Datasets"), "training": ("train", "Models")}
COMMAND = re.compile(r"^(sluice|python|make) ")


@dataclass(frozen=True)
class Preset:
    """A preset and what its head says.

    Attributes:
        name: As commands take it.
        kind: `etl` or `training`.
        text: Paragraphs of the head: what it is, then what it reaches.
        commands: The command lines of the head.
        source: The whole file.
    """

    name: str
    kind: str
    text: tuple[str, ...]
    commands: tuple[str, ...]
    source: str

    @property
    def dataset(self) -> str | None:
        """Name of the dataset that a preset of training reads."""
        place = yaml.safe_load(self.source).get("dataset")
        return Path(place).name if isinstance(place, str) else None


@cache
def read_presets() -> tuple[Preset, ...]:
    """Returns all presets, those of builds first, each kind by name."""
    return tuple(
        _read(path, kind) for kind in KINDS for path in sorted((FOLDER / kind).glob("*.yaml"))
    )


def _read(path: Path, kind: str) -> Preset:
    source = path.read_text(encoding="utf-8")
    head = re.match(r"(?:#.*\n)*", source)
    lines = [line.removeprefix("#").strip() for line in (head[0] if head else "").splitlines()]
    commands = tuple(line for line in lines if COMMAND.match(line))
    # A command splits the text: before it stands what the preset is, behind it what it reaches.
    marked = "\n".join("" if COMMAND.match(line) else line for line in lines)
    text = tuple(" ".join(part.split()) for part in re.split(r"\n\n+", marked) if part.strip())
    return Preset(path.stem, kind, text, commands, source)


def find_faults() -> list[str]:
    """Returns what presets lack for their pages."""
    faults = []
    for preset in read_presets():
        place = f"conf/presets/{preset.kind}/{preset.name}.yaml"
        if not preset.text:
            faults.append(f"{place}: begin it with a comment that says what it is")
        verb = KINDS[preset.kind][0]
        if not any(f"sluice {verb} {preset.name}" in command for command in preset.commands):
            faults.append(
                f"{place}: give its command in the comment, `# sluice {verb} {preset.name}`"
            )
    return faults


def render_pages() -> dict[str, str]:
    """Returns a page per preset and a page that lists them, by file name, in Markdown."""
    pages = {f"{KINDS[p.kind][0]}/{p.name}.md": _render(p) for p in read_presets()}
    return {"index.md": _render_index(), **pages}


def _render_index() -> str:
    blocks = ["# Presets", "A preset is a config that comes with Sluice. Commands take its name."]
    for kind, (verb, title) in KINDS.items():
        rows = [
            (f"[`{p.name}`]({verb}/{p.name}.md)", p.text[0])
            for p in read_presets()
            if p.kind == kind
        ]
        blocks += [f"## {title}: `sluice {verb}`", render_table(("preset", "what it is"), rows)]
    return join_blocks(blocks)


def _render(preset: Preset) -> str:
    verb = KINDS[preset.kind][0]
    commands = _fence("sh", "\n".join(preset.commands))
    full = " --full" if verb == "build" else ""
    hint = f"`sluice {verb} {preset.name} --dry-run{full}` prints it with all defaults."
    config = _fence("yaml", re.sub(r"\A(?:#.*\n)*", "", preset.source).rstrip())
    blocks = [f"# `{preset.name}`", *preset.text[:1], commands, *preset.text[1:]]
    return join_blocks([*blocks, _find_related(preset), "## The config", hint, config])


def _fence(language: str, code: str) -> str:
    return f"```{language}\n{code}\n```"


def _find_related(preset: Preset) -> str:
    presets = read_presets()
    if preset.kind == "training":
        if any(p.kind == "etl" and p.name == preset.dataset for p in presets):
            return f"Its dataset: [`{preset.dataset}`](../build/{preset.dataset}.md)."
        return ""
    links = [f"[`{p.name}`](../train/{p.name}.md)" for p in presets if p.dataset == preset.name]
    return f"Models trained on it: {', '.join(links)}." if links else ""
