from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from conf.manifest import RowCounts, ShardInfo, SplitInfo
from jobs.reporting.dataset_sections import (
    event_steps,
    fill_length_bins,
    unexplained_rows,
    view_features,
)
from tests.jobs.reporting.pages import show


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
    shown = show("flow", replace(finished, manifest=manifest))
    assert shown.missing[-1].startswith("7 event rows")


def test_a_given_test_set_counts_as_events(finished):
    counts = finished.manifest.counts
    manifest = _with_counts(finished.manifest, read={**counts.read, "held_out": 5})
    config = {**manifest.source.config, "split": {"test": "held_out"}}
    manifest = replace(manifest, source=replace(manifest.source, config=config))
    assert sum(event_steps(manifest)[0].kept.values()) == counts.read["ratings"] + 5


def test_losses_are_listed_by_size(finished):
    table = show("flow", finished).tables[0]
    sizes = [int(row[2].replace(",", "")) for row in table.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert {"duplicate", "no users entry"} <= {row[0] for row in table.rows}


def test_a_clean_log_has_no_losses(finished):
    counts = finished.manifest.counts
    manifest = _with_counts(
        finished.manifest, read={"ratings": counts.joined}, quarantined={"ratings": {}}, dropped={}
    )
    assert show("flow", replace(finished, manifest=manifest)).notes == ["No row was left out."]


def test_counts_that_say_nothing_are_drawn(finished):
    manifest = _with_counts(finished.manifest, read={}, quarantined={}, kept={}, dropped={})
    assert show("flow", replace(finished, manifest=manifest)).plots


def test_no_dataset(finished):
    shown = show("flow", replace(finished, manifest=None, gaps={"dataset": "gone"}))
    assert (shown.missing, shown.tables) == (["gone"], [])


def test_drawn_negatives_are_no_events(finished):
    counts = finished.manifest.counts
    kept = {**counts.kept, "train": counts.kept["train"] + 900}
    manifest = _with_counts(finished.manifest, kept=kept, drawn={"train": 900})
    assert unexplained_rows(manifest) == 0
    assert event_steps(manifest) == event_steps(finished.manifest)
    splits = show("flow", replace(finished, manifest=manifest)).tables[2]
    assert [(row[0], row[2]) for row in splits.rows[:2]] == [
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
    table = show("flow", replace(finished, manifest=manifest)).tables[-1]
    assert [row[:4] for row in table.rows] == [
        ["users", "unknown key", "left out", "30"],
        ["movies", "expired", "kept", "10"],
        ["movies", "null key", "kept", "5"],
    ]


def _cells(finished, split, feature):
    shown = next(s for name, _, s in show("features", finished).details if name.startswith(split))
    table = shown.tables[0]
    return dict(zip(table.columns, table.row(feature), strict=True))


def _histograms(finished) -> list[str]:
    drawings = show("features", finished).root.iter("svg")
    return [svg.get("aria-label") for svg in drawings if svg.get("class") == "spark"]


def test_one_table_per_split_the_first_open(finished):
    details = show("features", finished).details
    assert [is_open for _, is_open, _ in details] == [True] + [False] * (len(details) - 1)
    assert len(details) == len(finished.manifest.splits)


def test_a_plain_value_has_a_range_and_an_id_has_an_oov_share(finished):
    rating = _cells(finished, "train", "rating")
    assert (rating["Min"], rating["Max"]) == ("1", "5")
    assert rating["OOV"] == "\u2013"
    user = _cells(finished, "train", "user_id")
    assert user["Min"] == "\u2013"
    assert user["OOV"].endswith("%")


def test_buckets_of_unknown_tokens_are_outside_of_the_vocabulary(finished):
    found = {**finished.manifest.statistics["train"]["user_id"], "oov": 1, "raw": {"bucketed": 2}}
    manifest = replace(finished.manifest, statistics={"train": {"user_id": found}})
    view = view_features(SimpleNamespace(require_manifest=lambda: manifest))
    [(_, _, [row])] = view["splits"]
    assert row[6]["value"] == 3 / found["values"]


def test_lists_have_lengths_and_a_histogram_of_them(finished):
    history = _cells(finished, "train", "history")
    assert history["Length"].endswith(", up to 50")
    labels = _histograms(finished)
    assert any(label.startswith("Lengths of history: 0: ") for label in labels)


def test_features_without_values_in_a_split_are_left_out(finished):
    names = {row[0] for row in show("features", finished).tables[0].rows}
    assert "seen" not in names
    assert "rating" in names


def test_no_statistics_no_dataset(finished):
    bare = replace(finished, manifest=replace(finished.manifest, statistics={}))
    assert show("features", bare).missing
    gone = replace(finished, manifest=None, gaps={"dataset": "gone"})
    assert show("features", gone).missing == ["gone"]


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
    shown = show("popularity", finished)
    assert [row[0] for row in shown.tables[0].rows[:2]] == ["Film 1", "Film 2"]
    assert shown.facts["Items"] == "60"


def test_no_vocabulary(finished):
    shown = show("popularity", replace(finished, catalogue=None, gaps={"catalogue": "why"}))
    assert (shown.missing, shown.plots) == (["why"], [])


def test_timings_of_build_and_run_longest_first(finished):
    tables = show("timings", finished).tables
    assert tables[0].rows[0][0] == "Write records"
    assert [row[0] for row in tables[1].rows] == ["Train", "Evaluate", "Validation"]


def test_peak_memory_of_both(finished):
    facts = show("timings", finished).facts
    assert facts["Peak memory, training"] == "1.9 GB"
    assert facts["Peak memory, build: driver jvm"] == "1.3 GB"
    assert not any("gpu" in name for name in facts)


def test_peak_memory_of_gpus(finished):
    training = {**finished.card["training"], "peak_device_memory_bytes": {"gpu 0": 21_500_000_000}}
    data = replace(finished, card={**finished.card, "training": training})
    facts = show("timings", data).facts
    assert facts["Peak memory, training: gpu 0"] == "21.5 GB"


def test_rates_and_times_of_day_are_no_durations(finished):
    timing = {"train_seconds": 3.0, "examples_per_s": 900, "started_at": "2026-11-01T10:00:00Z"}
    shown = show("timings", replace(finished, manifest=None, card={"timing": timing}))
    assert [row[0] for row in shown.tables[0].rows] == ["Train"]
    assert shown.facts == {"Examples per s": "900", "Started at": "2026-11-01T10:00:00Z"}


def test_nothing_recorded(finished):
    assert show("timings", replace(finished, manifest=None, card={})).missing


def test_configs_stand_behind_summaries(finished):
    details = show("provenance", finished).details
    assert [summary for summary, _, _ in details] == [
        "Versions", "Training config, resolved", "Dataset config, resolved", "Run card",
    ]  # fmt: skip
    assert not any(is_open for _, is_open, _ in details)


def test_paths_inputs_and_time_span(finished):
    shown = show("provenance", finished)
    assert shown.facts["Run"] == str(finished.run)
    assert shown.facts["Events"] == "2000-04-25 to 2003-02-28"
    cells = [cell for row in shown.tables[0].rows for cell in row]
    assert "/data/logs/ratings.dat" in cells
    assert "delta:7:1790000000.0" in cells


def test_provenance_no_dataset(finished):
    bare = replace(finished, manifest=None, version=None, gaps={"dataset": "gone"})
    assert show("provenance", bare).missing == ["gone"]


def test_every_shard_with_its_checksum(finished):
    _, is_open, details = show("shards", finished).details[0]
    listed = {(row[0], row[4]) for row in details.tables[0].rows}
    wanted = {(s.path, s.crc32c) for split in finished.manifest.splits for s in split.shards}
    assert listed == wanted
    assert is_open


def test_very_many_shards_are_cut_and_say_so(finished):
    shards = tuple(ShardInfo(f"train/{n}", n, 10, "00000000") for n in range(1000))
    manifest = replace(finished.manifest, splits=(SplitInfo("train", shards),))
    shown = show("shards", replace(finished, manifest=manifest))
    _, is_open, details = shown.details[0]
    assert not is_open
    assert len(details.tables[0].rows) == 200
    assert "1,000" in details.notes[0]
    assert "0 to 999" in shown.tables[0].rows[0]


def test_an_empty_split_has_a_row(finished):
    manifest = replace(finished.manifest, splits=(SplitInfo("validation", ()),))
    assert show("shards", replace(finished, manifest=manifest)).tables[0].rows[0] == [
        "validation",
        "0",
        "0",
        "0 B",
        "\u2013",
        "\u2013",
    ]
