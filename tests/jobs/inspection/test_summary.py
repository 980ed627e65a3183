from __future__ import annotations

import io
import json
import shutil
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.local_paths import list_visible_files
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import write_table
from jobs.inspection.records import Content, describe_lengths, read_first
from jobs.inspection.summary import (
    Target,
    find_target,
    summarize_dataset,
    summarize_files,
    summarize_run,
    summarize_shard,
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
