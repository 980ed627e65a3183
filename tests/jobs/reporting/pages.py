"""Pages and sections of the report, read back from their HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

from jobs.reporting.page import RUN_SECTIONS, render_section

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element closed, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.tree = TreeBuilder()
        self.tree.start("root", {})
        self.feed(html)
        self.close()
        assert self.open == []
        self.tree.end("root")
        self.root: Element = self.tree.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.tree.end(tag)
        else:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.tree.end(tag)

    def handle_data(self, data):
        self.text.append(data)
        self.tree.data(data)

    def values(self, attribute: str) -> list[str]:
        return [a[attribute] or "" for _, a in self.seen if attribute in a]


@dataclass(frozen=True)
class ShownTable:
    """A table's texts, and where text is bold."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    best: list[list[bool]]

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row[0] == name)

    def best_of(self, name: str) -> list[bool]:
        return self.best[[row[0] for row in self.rows].index(name)]


class Shown:
    """What an element of a page shows."""

    def __init__(self, root: Element, lead: str = "") -> None:
        self.root, self.lead = root, lead

    @property
    def tables(self) -> list[ShownTable]:
        return [_read_table(table) for table in self.root.iter("table")]

    @property
    def notes(self) -> list[str]:
        return [_text(p) for p in self.root.iter("p") if p.get("class") == "note"]

    @property
    def missing(self) -> list[str]:
        return [_text(p) for p in self.root.iter("p") if p.get("class") == "note missing"]

    @property
    def facts(self) -> dict[str, str]:
        terms, values = self.root.iter("dt"), self.root.iter("dd")
        return {_text(t): _text(v) for t, v in zip(terms, values, strict=True)}

    @property
    def captions(self) -> list[str]:
        return [_text(caption) for caption in self.root.iter("figcaption")]

    @property
    def plots(self) -> list[Element]:
        return [svg for svg in self.root.iter("svg") if svg.get("class") == "plot"]

    @property
    def details(self) -> list[tuple[str, bool, Shown]]:
        found = self.root.iter("details")
        return [(_text(d.find("summary")), "open" in d.attrib, Shown(d)) for d in found]


def show(name, data, sections=RUN_SECTIONS) -> Shown:
    """Renders a section and reads it back."""
    section = render_section(name, sections[name], data)
    return Shown(Page(str(section.body)).root, section.lead)


def _read_table(table: Element) -> ShownTable:
    rows = list(table.find("tbody"))
    return ShownTable(
        _text(table.find("caption")),
        [_text(cell) for cell in table.find("thead").iter("th")],
        [[_text(cell) for cell in row] for row in rows],
        [[cell.find("strong") is not None for cell in row] for row in rows],
    )


def _text(element: Element) -> str:
    return "".join(element.itertext()).strip()
