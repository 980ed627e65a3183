"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; a bar inside a cell is escaped.

    Args:
        header: Titles of the columns.
        rows: Markdown of the cells of each row, without line ends.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def join_blocks(blocks: Iterable[str]) -> str:
    """Returns a page of blocks, an empty line between them."""
    return "\n\n".join(filter(None, blocks)) + "\n"
