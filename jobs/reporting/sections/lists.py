"""A sample of what users would see."""

from __future__ import annotations

from conf.run import RECOMMENDATIONS_FILE
from jobs.reporting.blocks import Cell, Column, Section, build_table, missing
from jobs.reporting.run_data import RankedList, RunData

_SHOWN = 5


def build_lists(data: RunData) -> Section:
    """The first users' first items."""
    lead = f"The first users of {RECOMMENDATIONS_FILE}, their best {_SHOWN} items."
    if not data.lists:
        text = data.gaps.get("lists", "The file of ranked lists is empty.")
        return Section("lists", "Ranked lists", "What users would see.", (missing(text),))
    columns = [Column("User", numeric=False)]
    columns += [Column(str(rank + 1), numeric=False) for rank in range(_SHOWN)]
    rows = [[Cell(ranked.user), *_cells(ranked, data)] for ranked in data.lists]
    table = build_table("Items from best to fifth, with their scores.", columns, rows)
    return Section("lists", "Ranked lists", lead, (table,))


def _cells(ranked: RankedList, data: RunData) -> list[Cell]:
    names = data.catalogue.name if data.catalogue else str
    cells = []
    for rank in range(_SHOWN):
        if rank >= len(ranked.items):
            cells.append(Cell(""))
            continue
        score = f" ({ranked.scores[rank]:.3g})" if rank < len(ranked.scores) else ""
        cells.append(Cell(f"{names(ranked.items[rank])}{score}"))
    return cells
