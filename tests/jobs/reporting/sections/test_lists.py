from __future__ import annotations

from dataclasses import replace

from jobs.reporting.run_data import RankedList
from jobs.reporting.sections.lists import build_lists


def test_items_are_shown_by_title_with_their_scores(finished):
    first = finished.lists[0]
    row = build_lists(finished).blocks[0].rows[0]
    assert row[0].text == first.user
    assert row[1].text == f"Film {first.items[0]} ({first.scores[0]:.3g})"


def test_without_titles_the_tokens(finished):
    row = build_lists(replace(finished, catalogue=None)).blocks[0].rows[0]
    assert row[1].text.startswith(f"{finished.lists[0].items[0]} (")


def test_short_lists_and_lists_without_scores(finished):
    short = replace(finished, lists=(RankedList("u", ("5",), ()),), catalogue=None)
    assert [cell.text for cell in build_lists(short).blocks[0].rows[0]] == ["u", "5", *[""] * 4]


def test_no_lists(finished):
    assert build_lists(replace(finished, lists=())).blocks[0].missing
