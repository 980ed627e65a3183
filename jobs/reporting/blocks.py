"""What a section of the report is made of; the template knows how each block looks.

Blocks carry plain strings. The template escapes them, so a section never builds HTML; only
`figure.py` makes markup, from numbers and from text that it has escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup


@dataclass(frozen=True)
class TableCell:
    """One cell of a table.

    Attributes:
        text: What is shown.
        best: Whether it is the best of its row, shown in bold.
        bar: Length of a bar behind the text, in [0, 1]; None for no bar.
        svg: A small drawing instead of the text; its label tells screen readers the same.
        tone: Colour of the bar: a key of `figure.COLOURS`.
        href: Page beside this one that the text leads to, as a relative URL; None for no link.
    """

    text: str
    best: bool = False
    bar: float | None = None
    svg: Markup | None = None
    tone: str = "model"
    href: str | None = None


@dataclass(frozen=True)
class TableColumn:
    """A table's column; `numeric` ones are set flush right."""

    title: str
    numeric: bool = True
    hint: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row names the row."""

    caption: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption."""

    svg: Markup
    caption: str
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Note:
    """A sentence; `missing` marks a part of the run that is not there."""

    text: str
    missing: bool = False
    kind: ClassVar[str] = "note"


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    items: tuple[tuple[str, str], ...]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Details:
    """Blocks behind a summary that opens on demand."""

    summary: str
    blocks: tuple[Block, ...]
    is_open: bool = False
    kind: ClassVar[str] = "details"


@dataclass(frozen=True)
class Beside:
    """Blocks next to each other where there is room, else below each other."""

    blocks: tuple[Block, ...]
    kind: ClassVar[str] = "beside"


Block = Table | Figure | Note | Facts | Code | Details | Beside


@dataclass(frozen=True)
class Section:
    """A titled part of the report."""

    anchor: str
    title: str
    lead: str
    blocks: tuple[Block, ...]


def build_table(
    caption: str, columns: Iterable[TableColumn], rows: Iterable[Sequence[TableCell | str]]
) -> Table:
    """Returns a table; plain strings stand for plain cells."""
    return Table(
        caption,
        tuple(columns),
        tuple(
            tuple(cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row)
            for row in rows
        ),
    )


def missing(text: str) -> Note:
    """Returns the note that stands where a part of the run is not there."""
    return Note(text, missing=True)
