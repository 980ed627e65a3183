from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from conf.provenance import RowCounts
from jobs.reporting.blocks import Note
from jobs.reporting.sections.flow import build_flow, event_steps, unexplained_rows


def _with_counts(manifest, **changes):
    fields = {name: getattr(manifest.counts, name) for name in RowCounts.__dataclass_fields__}
    return replace(manifest, counts=RowCounts(**{**fields, **changes}))


def test_each_stage_starts_where_the_last_ended(finished):
    steps = event_steps(finished.manifest)
    for before, after in pairwise(steps):
        assert sum(after.kept.values()) + after.lost == sum(before.kept.values())
    assert sum(steps[0].kept.values()) == finished.manifest.counts.read["ratings"]
    assert steps[-1].kept == {"train": 2400, "validation": 50, "test": 200}


def test_rows_that_have_no_reason_are_told(finished):
    assert unexplained_rows(finished.manifest) == 0
    read = {**finished.manifest.counts.read}
    read["ratings"] += 7
    manifest = _with_counts(finished.manifest, read=read)
    assert unexplained_rows(manifest) == 7
    last = build_flow(replace(finished, manifest=manifest)).blocks[-1]
    assert isinstance(last, Note)
    assert last.missing
    assert last.text.startswith("7 event rows")


def test_a_given_test_set_counts_as_events(finished):
    counts = finished.manifest.counts
    manifest = _with_counts(finished.manifest, read={**counts.read, "held_out": 5})
    config = {**manifest.source.config, "split": {"test_source": "held_out"}}
    manifest = replace(manifest, source=replace(manifest.source, config=config))
    assert sum(event_steps(manifest)[0].kept.values()) == counts.read["ratings"] + 5


def test_losses_are_listed_by_size(finished):
    table = build_flow(finished).blocks[0].blocks[1]
    sizes = [int(row[2].text.replace(",", "")) for row in table.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert {"duplicate", "no users entry"} <= {row[0].text for row in table.rows}


def test_a_clean_log_has_no_losses(finished):
    counts = finished.manifest.counts
    manifest = _with_counts(
        finished.manifest, read={"ratings": counts.joined}, quarantined={"ratings": {}}, dropped={}
    )
    section = build_flow(replace(finished, manifest=manifest))
    assert section.blocks[0].blocks[1] == Note("No row was left out.")


def test_counts_that_say_nothing_are_drawn(finished):
    manifest = _with_counts(finished.manifest, read={}, quarantined={}, kept={}, dropped={})
    assert build_flow(replace(finished, manifest=manifest)).blocks


def test_no_dataset(finished):
    section = build_flow(replace(finished, manifest=None, gaps={"dataset": "gone"}))
    assert section.blocks == (Note("gone", missing=True),)


def test_drawn_negatives_are_no_events(finished):
    counts = finished.manifest.counts
    kept = {**counts.kept, "train": counts.kept["train"] + 900}
    manifest = _with_counts(finished.manifest, kept=kept, drawn={"train": 900})
    assert unexplained_rows(manifest) == 0
    assert event_steps(manifest) == event_steps(finished.manifest)
    splits = build_flow(replace(finished, manifest=manifest)).blocks[1].blocks[1]
    assert [(row[0].text, row[2].text) for row in splits.rows[:2]] == [
        ("train", "900"),
        ("validation", "0"),
    ]


def test_events_without_an_entry_are_told_with_what_became_of_them(finished):
    config = {**finished.manifest.source.config}
    config["joins"] = [
        {"source": "users", "unmatched": "drop"},
        {"source": "movies", "unmatched": "keep"},
    ]
    source = replace(finished.manifest.source, config=config)
    unmatched = {"users": {"unknown_key": 30}, "movies": {"null_key": 5, "expired": 10}}
    manifest = replace(_with_counts(finished.manifest, unmatched=unmatched), source=source)
    table = build_flow(replace(finished, manifest=manifest)).blocks[-1]
    assert [[cell.text for cell in row[:4]] for row in table.rows] == [
        ["users", "unknown key", "left out", "30"],
        ["movies", "expired", "kept", "10"],
        ["movies", "null key", "kept", "5"],
    ]
