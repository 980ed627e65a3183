from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.paths import list_visible_files, read_manifest
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import write_table
from jobs.inspection.event_log import summarize_event_log
from jobs.inspection.records import Content, describe_lengths, read_first
from jobs.inspection.summary import (
    Target,
    find_target,
    summarize_dataset,
    summarize_files,
    summarize_run,
    summarize_shard,
    summarize_stages,
)
from jobs.inspection.summary_tables import (
    TextTable,
    list_summary,
    print_tables,
    printable,
    render_plain,
)


def test_a_dataset_stands_for_its_current_version(dataset, version):
    target = find_target(str(dataset))
    assert (target.kind, target.path) == ("dataset", version)


@pytest.mark.parametrize("suffix", ["", "/manifest.json"])
def test_a_version_or_its_manifest(version, suffix):
    target = find_target(f"{version}{suffix}")
    assert (target.kind, target.path) == ("dataset", version)


def test_a_file_uri(version):
    assert find_target(version.as_uri()).path == version


def test_a_series_of_runs_stands_for_the_last_one(inspected):
    target = find_target(str(inspected / "runs" / "demo"))
    assert target.kind == "run"
    assert find_target(str(target.path / "run_card.json")) == target


def test_a_shard_knows_its_version(version):
    shard = next((version / "test").iterdir())
    assert find_target(str(shard)).version == version.resolve()


def test_a_bare_shard_has_no_version(version, tmp_path):
    bare = shutil.copy(next((version / "test").iterdir()), tmp_path / "bare.tfrecord")
    target = find_target(str(bare))
    assert (target.kind, target.version) == ("shard", None)


@pytest.mark.parametrize("name", ["missing", "."])
def test_nothing_there(tmp_path, name):
    with pytest.raises(UpstreamNotReadyError, match="nothing here to inspect"):
        find_target(str(tmp_path / name))


def test_a_dataset_that_was_never_published(tmp_path):
    (tmp_path / "versions").mkdir()
    with pytest.raises(UpstreamNotReadyError):
        find_target(str(tmp_path))


def test_a_dataset(version):
    manifest = read_manifest(version)
    summary = json.loads(json.dumps(summarize_dataset(version, manifest)))
    assert summary["published_versions"] == [version.name]
    assert [split["name"] for split in summary["splits"]] == [s.name for s in manifest.splits]
    assert summary["keys"]["item"] == "movie_id"
    assert summary["counts"]["read"] == dict(manifest.counts.read)


def test_a_shard_of_a_version_is_described_by_its_manifest(version):
    manifest = read_manifest(version)
    shard = manifest.split("test").shards[0]
    summary = summarize_shard(Target("shard", version / shard.path, version), manifest)
    assert (summary["split"], summary["rows"], summary["crc32c"]) == (
        "test", shard.rows, shard.crc32c,
    )  # fmt: skip


def test_a_bare_shard_is_described_by_its_content(version, tmp_path):
    shard = read_manifest(version).split("train").shards[0]
    bare = shutil.copy(version / shard.path, tmp_path / "bare")
    summary = summarize_shard(Target("shard", bare), None)
    assert (summary["rows"], summary["crc32c"]) == (shard.rows, shard.crc32c)
    kinds = {f["name"]: (f["dtype"], f["shape"]) for f in summary["features"]}
    assert kinds["history"] == ("int64", [None])
    assert kinds["rating"] == ("float32", [])


def test_a_file_inside_a_version_that_it_does_not_list(version):
    manifest = read_manifest(version)
    stray = version / "test" / "stray.tfrecord"
    shutil.copy(version / manifest.split("test").shards[0].path, stray)
    assert summarize_shard(Target("shard", stray, version), manifest)["listed"] is False


def test_a_file_that_is_no_tfrecord_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("these are notes, not records")
    with pytest.raises(InputDataError):
        summarize_shard(Target("shard", file), None)


def test_a_run(inspected):
    run = find_target(str(inspected / "runs" / "demo")).path
    summary = summarize_run(run)
    assert summary["card"]["training"]["best_epoch"] == 6
    assert summary["metrics"]["headline"] == "full_unseen"


def test_a_run_whose_evaluation_is_missing_or_damaged(inspected, tmp_path):
    run = find_target(str(inspected / "runs" / "demo")).path
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "metrics.json").write_text("{")
    assert "not valid JSON" in summarize_run(copy)["metrics_problem"]
    (copy / "metrics.json").unlink()
    assert summarize_run(copy)["metrics"] is None


TABLE = pa.table({"user": [1, 2, 3], "tags": [["a"], ["b", "c"], []]})


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "date=1").mkdir()
    write_table(TABLE, tmp_path / "part-0.tfrecord")
    gzip = ShardOptions(compression="GZIP")
    write_table(TABLE, tmp_path / "date=1" / "part-1.tfrecord.gz", options=gzip)
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def test_counts_schema_and_sizes(directory):
    read = []
    summary = summarize_files(directory, progress=read.append)
    assert summary["verification"]["ok"]
    assert (summary["files"], summary["rows"]) == (2, 6)
    size = sum(path.stat().st_size for path in list_visible_files(directory))
    assert summary["bytes"] == sum(read) == size
    assert summary["record_type"] == "Example"
    assert summary["compressions"] == ["GZIP", "none"]
    assert [(f["name"], f["dtype"], f["shape"]) for f in summary["features"]] == [
        ("user", "int64", []),
        ("tags", "bytes", [None]),
    ]
    assert sum(bin_["records"] for bin_ in summary["record_sizes"]["bins"]) == 6


def test_damage_names_file_and_offset_and_the_rest_is_read(directory):
    path = directory / "part-0.tfrecord"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    summary = summarize_files(directory, head=1)
    problems = summary["verification"]["problems"]
    assert [problem["file"] for problem in problems] == ["part-0.tfrecord"]
    assert "byte offset" in problems[0]["what"]
    assert summary["files"] == 2
    assert summary["verification"]["rows"] >= 3
    assert "head" not in summary


def test_sequence_examples_and_raw_payloads_are_told_apart(tmp_path):
    sequence, raw = tmp_path / "sequence", tmp_path / "raw"
    sequence.mkdir()
    raw.mkdir()
    write_table(
        pa.table({"user": [1], "steps": [[[1], [2, 3]]]}),
        sequence / "a.tfrecord",
        options=ShardOptions(record_type="SequenceExample"),
    )
    write_table(
        pa.table({"byteArray": [b"\xff\xff", b""]}),
        raw / "a.tfrecord",
        options=ShardOptions(record_type="ByteArray"),
    )
    found = summarize_files(sequence)
    assert found["record_type"] == "SequenceExample"
    assert [f["shape"] for f in found["features"]] == [[], [None, None]]
    found = summarize_files(raw)
    assert (found["record_type"], found["features"]) == ("ByteArray", [])
    assert found["verification"]["ok"]


def test_a_single_file_of_any_record_type(tmp_path):
    tables = {
        "SequenceExample": pa.table({"steps": [[[1], [2, 3]]]}),
        "ByteArray": pa.table({"byteArray": [b"\xff\xff"]}),
    }
    heads = {}
    for record_type, table in tables.items():
        path = tmp_path / record_type
        write_table(table, path, options=ShardOptions(record_type=record_type))
        summary = summarize_shard(Target("shard", path), None, verify=True, head=1)
        assert summary["verification"]["ok"]
        heads[record_type] = summary["head"]
    assert heads == {
        "SequenceExample": [{"steps": [[1], [2, 3]]}],
        "ByteArray": [{"byteArray": "\\xff\\xff"}],
    }


def test_the_head_of_raw_payloads(tmp_path):
    path = tmp_path / "a.tfrecord"
    table = pa.table({"byteArray": [b"one", b"\xfftwo"]})
    write_table(table, path, options=ShardOptions(record_type="ByteArray"))
    assert read_first([path], 1, record_type="ByteArray") == [{"byteArray": "one"}]


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_every_record_is_in_the_bin_that_holds_its_length(lengths):
    found = describe_lengths(Counter(lengths))
    assert found["shortest"] == min(lengths, default=None)
    assert found["longest"] == max(lengths, default=None)
    assert found["mean"] == (pytest.approx(sum(lengths) / len(lengths)) if lengths else None)
    for bin_ in found["bins"]:
        assert bin_["records"] == sum(bin_["from"] <= n <= bin_["to"] for n in lengths)
    assert sum(bin_["records"] for bin_ in found["bins"]) == len(lengths)


def test_the_lengths_of_all_files_are_counted(tmp_path):
    content = Content()
    for name, payloads in {"a": [b"", b"one", b"two"], "b": [b"four"]}.items():
        table = pa.table({"byteArray": payloads})
        write_table(table, tmp_path / name, options=ShardOptions(record_type="ByteArray"))
        assert content.read(tmp_path / name) is None
    assert content.lengths == {0: 1, 3: 2, 4: 1}
    assert content.rows == 4


LISTING_TABLE = TextTable("title", ("name", "rows"), (("a", "1,000"), ("long name", "7")),
                frozenset({"rows"}))  # fmt: skip


def _print(listing: TextTable, terminal: bool) -> str:
    out = io.StringIO()
    print_tables([listing], Console(file=out, force_terminal=terminal, width=100))
    return out.getvalue()


def test_plain_text_is_aligned():
    assert render_plain(LISTING_TABLE).splitlines() == [
        "title",
        "  name        rows",
        "  a          1,000",
        "  long name      7",
        "",
    ]


def test_colours_only_on_a_terminal():
    assert "\x1b[" in _print(LISTING_TABLE, terminal=True)
    assert "\x1b[" not in _print(LISTING_TABLE, terminal=False)


def test_long_values_are_not_cut_in_plain_text():
    path = "/a/very/long/path/" + "x" * 300
    assert path in _print(TextTable("t", ("", ""), (("path", path),)), terminal=False)


def test_data_can_neither_steer_the_terminal_nor_use_rich_markup():
    evil = TextTable("t", ("a",), (("\x1b[31mred\x07", ), ("[bold]x[/bold]",)))  # fmt: skip
    for terminal in (True, False):
        text = _print(evil, terminal)
        assert "\x1b[31m" not in text
        assert "\\x1b[31mred" in text
        assert "[bold]x[/bold]" in text
    assert printable("Amélie ★") == "Amélie ★"


def test_metrics_are_listed_in_the_order_of_their_cut_offs():
    metrics = {f"hit_rate@{k}": 0.1 for k in (1, 10, 5)}
    protocols = [{"name": "full_all", "systems": {"model": metrics, "random": {}}}]
    summary = {"kind": "run", "path": "p", "card": {},
               "metrics": {"headline": "full_all", "protocols": protocols}}  # fmt: skip
    listing = list_summary(summary)[-1]
    assert listing.title == "full_all (headline)"
    assert [row[0] for row in listing.rows] == ["HR@1", "HR@5", "HR@10"]
    assert listing.rows[0][2] == "\u2013"


def test_problems_are_listed():
    problem = {"file": "train/x", "what": "is missing"}
    verification = {"ok": False, "files": 1, "rows": 0, "bytes": 0, "problems": [problem]}
    summary = {"kind": "run", "path": "p", "card": {}, "metrics": None,
               "verification": verification}  # fmt: skip
    assert list_summary(summary)[-1].rows == (("train/x", "is missing"),)


# Of a build of 5,000 ratings by Spark 4.3: three of its stages, some fields left out.
RECORDED = Path(__file__).with_name("event_log.jsonl").read_text()


def by_stage(summary: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    return {entry["stage"]: entry for entry in summary["stages"]}


def write_log(folder: Path, text: str, codec: str | None = None) -> Path:
    """Writes an event log as Spark does by default: several files in a folder of its own."""
    log = folder / "eventlog_v2_app-1"
    log.mkdir(parents=True)
    (log / "appstatus_app-1").touch()
    lines = text.splitlines(keepends=True)
    parts = {10: lines[20:], 9: lines[:20]}  # numbers, not names, say which comes first
    for number, part in parts.items():
        name = f"events_{number}_app-1{f'.{codec}' if codec else ''}"
        with pa.output_stream(log / name, compression=codec) as file:
            file.write("".join(part).encode())
    return log


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_stages_are_those_of_the_event_log(tmp_path, codec):
    target = find_target(str(write_log(tmp_path / "events", RECORDED, codec).parent))
    assert target.kind == "event_log"
    summary = summarize_event_log(target.path)
    assert summary["problem"] is None
    found = by_stage(summary)
    assert found.keys() == {20, 22, 56}
    assert [found[n]["of"] for n in found] == [
        "join and split events", "join and split events", "write records",
    ]  # fmt: skip
    read = found[20]
    assert (read["tasks"], read["rows_read"], read["bytes_read"]) == (1, 5025, 110811)
    assert (read["rows_written"], read["bytes_written"]) == (5020, 124903)
    assert read["skew"] is None  # of one task
    tasks = [json.loads(line) for line in RECORDED.splitlines() if '"SparkListenerTaskEnd"' in line]
    infos = [task["Task Info"] for task in tasks if task["Stage ID"] == 56]
    times = np.array([info["Finish Time"] - info["Launch Time"] for info in infos])
    assert found[56]["tasks"] == len(infos) == 12
    assert found[56]["task_seconds"] == pytest.approx(times.sum() / 1000)
    assert found[56]["skew"] == pytest.approx(times.max() / np.median(times), abs=0.005)
    assert found[56]["spilled_disk"] is None


def test_spill_and_failed_tasks_are_counted_and_shown(tmp_path):
    lines = RECORDED.splitlines(keepends=True)
    ends = [n for n, line in enumerate(lines) if '"TaskEnd"' in line.replace("SparkListener", "")]
    of_56 = [n for n in ends if '"Stage ID":56,' in lines[n]]
    for n, size in zip(of_56, (7_000_000, 5_000_000), strict=False):
        lines[n] = lines[n].replace('"Disk Bytes Spilled":0', f'"Disk Bytes Spilled":{size}')
    lines[of_56[2]] = lines[of_56[2]].replace('"Failed":false', '"Failed":true')
    log = tmp_path / "app-1"
    log.write_text("".join(lines))
    assert find_target(str(log)).kind == "event_log"
    summary = summarize_event_log(log)
    stage = by_stage(summary)[56]
    assert (stage["spilled_disk"], stage["failed_tasks"], stage["tasks"]) == (12_000_000, 1, 11)
    table = list_summary(summary)[-1]
    assert "12.0 MB" in render_plain(table)


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_log_that_breaks_off_is_read_to_there_and_said(tmp_path, codec):
    log = write_log(tmp_path, RECORDED, codec)
    last = max(log.glob("events_10*"))
    last.write_bytes(last.read_bytes()[:-200])
    summary = summarize_event_log(log)
    assert by_stage(summary)[20]["rows_read"] == 5025
    assert "breaks off" in summary["problem"]
    facts = render_plain(list_summary(summary)[0])
    assert "breaks off" in facts
    # Of an application that was killed nothing may be cut but the end.
    whole = RECORDED.splitlines(keepends=True)
    assert "SparkListenerApplicationEnd" in whole[-1]
    killed = write_log(tmp_path / "killed", "".join(whole[:-1]), codec)
    assert "has not ended, or was killed" in summarize_event_log(killed)["problem"]


def test_event_logs_that_tell_nothing_are_refused(tmp_path, version):
    empty = tmp_path / "app-2"
    empty.write_text(RECORDED.splitlines(keepends=True)[0])
    with pytest.raises(InputDataError, match="no stage"):
        summarize_event_log(empty)
    strange = tmp_path / "app-3"
    strange.write_text('{"Event":"SparkListenerTaskEnd"}\n')
    with pytest.raises(InputDataError, match="not as Spark writes it"):
        summarize_event_log(strange)
    with pytest.raises(ConfigError, match="lz4"):
        summarize_event_log(write_log(tmp_path / "compressed", RECORDED, "lz4"))
    manifest = read_manifest(version)
    with pytest.raises(ConfigError, match="wrote no event log"):
        summarize_stages(manifest)
    told = {"application": "app-9", "event_log": (tmp_path / "gone").as_uri()}
    with pytest.raises(UpstreamNotReadyError, match="no event log of this application"):
        summarize_stages(replace(manifest, spark=told))
    told = {"application": "app-1", "event_log": write_log(tmp_path, RECORDED).parent.as_uri()}
    assert by_stage(summarize_stages(replace(manifest, spark=told)))[20]["rows_read"] == 5025
