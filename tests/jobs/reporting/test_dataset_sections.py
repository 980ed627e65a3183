from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import RowCounts, ShardInfo, SplitInfo
from jobs.reporting.blocks import Details, Note
from jobs.reporting.dataset_sections import (
    build_features,
    build_flow,
    build_popularity,
    event_steps,
    fill_length_bins,
    unexplained_rows,
)
from jobs.reporting.provenance import build_provenance, build_shards, build_timings


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


def _cells(finished, split, feature):
    section = build_features(finished)
    block = next(b for b in section.blocks if b.summary.startswith(f"{split}:"))
    table = block.blocks[0]
    row = next(row for row in table.rows if row[0].text == feature)
    return {column.title: cell for column, cell in zip(table.columns, row, strict=True)}


def test_one_table_per_split_the_first_open(finished):
    blocks = build_features(finished).blocks
    assert all(isinstance(block, Details) for block in blocks)
    assert [block.is_open for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert len(blocks) == len(finished.manifest.splits)


def test_a_plain_value_has_a_range_and_an_id_has_an_oov_share(finished):
    rating = _cells(finished, "train", "rating")
    assert (rating["Min"].text, rating["Max"].text) == ("1", "5")
    assert rating["OOV"].text == "\u2013"
    user = _cells(finished, "train", "user_id")
    assert user["Min"].text == "\u2013"
    assert user["OOV"].text.endswith("%")


def test_lists_have_lengths_and_a_histogram_of_them(finished):
    history = _cells(finished, "train", "history")
    assert history["Length"].text.endswith(", up to 50")
    assert "Lengths of history" in history["Histogram"].svg
    assert "Values of rating" in _cells(finished, "train", "rating")["Histogram"].svg


def test_features_without_values_in_a_split_are_left_out(finished):
    table = build_features(finished).blocks[0].blocks[0]
    names = {row[0].text for row in table.rows}
    assert "seen" not in names
    assert "rating" in names


def test_no_statistics_no_dataset(finished):
    bare = replace(finished, manifest=replace(finished.manifest, statistics={}))
    assert build_features(bare).blocks[0].missing
    gone = replace(finished, manifest=None, gaps={"dataset": "gone"})
    assert build_features(gone).blocks == (Note("gone", missing=True),)


@given(st.lists(st.integers(0, 500), min_size=1))
def test_length_bins_have_no_gaps_and_keep_every_count(lengths):
    def low_of(length: int) -> int:
        return 0 if length == 0 else 1 << (length.bit_length() - 1)

    found = {low_of(length) for length in lengths}
    bins = [
        {"low": low, "high": max(2 * low - 1, low),
         "count": sum(low_of(length) == low for length in lengths)}
        for low in sorted(found)
    ]  # fmt: skip
    filled = fill_length_bins(bins)
    assert sum(item["count"] for item in filled) == len(lengths)
    assert filled[0]["low"] == 0
    for before, after in pairwise(filled):
        assert after["low"] == before["high"] + 1
    assert fill_length_bins([]) == []


def test_the_most_frequent_items_by_their_titles(finished):
    section = build_popularity(finished)
    table = section.blocks[1].blocks[1]
    assert [row[0].text for row in table.rows[:2]] == ["Film 1", "Film 2"]
    assert dict(section.blocks[0].items)["Items"] == "60"


def test_no_vocabulary(finished):
    section = build_popularity(replace(finished, catalogue=None, gaps={"catalogue": "why"}))
    assert section.blocks == (Note("why", missing=True),)


def test_timings_of_build_and_run_longest_first(finished):
    tables = build_timings(finished).blocks[0].blocks
    assert tables[0].rows[0][0].text == "Write records"
    assert [row[0].text for row in tables[1].rows] == ["Train", "Evaluate", "Validation"]


def test_peak_memory_of_both(finished):
    facts = dict(build_timings(finished).blocks[1].items)
    assert facts["Peak memory, training"] == "1.9 GB"
    assert facts["Peak memory, build: driver jvm"] == "1.3 GB"
    assert not any("gpu" in name for name in facts)


def test_peak_memory_of_gpus(finished):
    training = {**finished.card["training"], "peak_device_memory_bytes": {"gpu 0": 21_500_000_000}}
    data = replace(finished, card={**finished.card, "training": training})
    facts = dict(build_timings(data).blocks[1].items)
    assert facts["Peak memory, training: gpu 0"] == "21.5 GB"


def test_rates_and_times_of_day_are_no_durations(finished):
    timing = {"train_seconds": 3.0, "examples_per_s": 900, "started_at": "2026-11-01T10:00:00Z"}
    section = build_timings(replace(finished, manifest=None, card={"timing": timing}))
    assert [row[0].text for row in section.blocks[0].blocks[0].rows] == ["Train"]
    facts = dict(section.blocks[1].items)
    assert facts == {"Examples per s": "900", "Started at": "2026-11-01T10:00:00Z"}


def test_nothing_recorded(finished):
    assert build_timings(replace(finished, manifest=None, card={})).blocks[0].missing


def test_configs_stand_behind_summaries(finished):
    blocks = build_provenance(finished).blocks
    summaries = [block.summary for block in blocks if isinstance(block, Details)]
    assert summaries == [
        "Versions", "Training config, resolved", "Dataset config, resolved", "Run card",
    ]  # fmt: skip
    assert not any(block.is_open for block in blocks if isinstance(block, Details))


def test_paths_inputs_and_time_span(finished):
    blocks = build_provenance(finished).blocks
    facts = dict(blocks[0].items)
    assert facts["Run"] == str(finished.run)
    assert facts["Events"] == "2000-04-25 to 2003-02-28"
    assert "/data/logs/ratings.dat" in str(blocks[1])
    assert "delta:7:1790000000.0" in str(blocks[1])


def test_provenance_no_dataset(finished):
    bare = replace(finished, manifest=None, version=None, gaps={"dataset": "gone"})
    assert build_provenance(bare).blocks[1].missing


def test_every_shard_with_its_checksum(finished):
    details = build_shards(finished).blocks[1]
    listed = {(row[0].text, row[4].text) for row in details.blocks[0].rows}
    wanted = {(s.path, s.crc32c) for split in finished.manifest.splits for s in split.shards}
    assert listed == wanted
    assert details.is_open


def test_very_many_shards_are_cut_and_say_so(finished):
    shards = tuple(ShardInfo(f"train/{n}", n, 10, "00000000") for n in range(1000))
    manifest = replace(finished.manifest, splits=(SplitInfo("train", shards),))
    section = build_shards(replace(finished, manifest=manifest))
    details = section.blocks[1]
    assert not details.is_open
    assert len(details.blocks[0].rows) == 200
    assert "1,000" in details.blocks[1].text
    assert "0 to 999" in [cell.text for cell in section.blocks[0].rows[0]]


def test_an_empty_split_has_a_row(finished):
    manifest = replace(finished.manifest, splits=(SplitInfo("validation", ()),))
    row = build_shards(replace(finished, manifest=manifest)).blocks[0].rows[0]
    assert [cell.text for cell in row] == ["validation", "0", "0", "0 B", "\u2013", "\u2013"]
