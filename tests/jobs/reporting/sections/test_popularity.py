from __future__ import annotations

from dataclasses import replace

from jobs.reporting.blocks import Note
from jobs.reporting.sections.popularity import build_popularity


def test_the_most_frequent_items_by_their_titles(finished):
    section = build_popularity(finished)
    table = section.blocks[1].blocks[1]
    assert [row[0].text for row in table.rows[:2]] == ["Film 1", "Film 2"]
    assert dict(section.blocks[0].items)["Items"] == "60"


def test_no_vocabulary(finished):
    section = build_popularity(replace(finished, catalogue=None, gaps={"catalogue": "why"}))
    assert section.blocks == (Note("why", missing=True),)
