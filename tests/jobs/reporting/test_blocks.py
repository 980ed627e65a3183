from __future__ import annotations

from jobs.reporting.blocks import Cell, Column, build_table, missing


def test_plain_strings_stand_for_cells():
    table = build_table("caption", [Column("a"), Column("b")], [["x", Cell("y", best=True)]])
    assert table.rows == ((Cell("x"), Cell("y", best=True)),)


def test_missing_is_marked():
    assert missing("why").missing
