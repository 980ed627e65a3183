from __future__ import annotations

from dataclasses import replace

from jobs.reporting.blocks import Details
from jobs.reporting.sections.provenance import build_provenance, build_timings


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


def test_no_dataset(finished):
    bare = replace(finished, manifest=None, version=None, gaps={"dataset": "gone"})
    assert build_provenance(bare).blocks[1].missing
