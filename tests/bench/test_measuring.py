"""Clock, report, options and row shapes of the benches."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import encode
from etl.tfrecord.codec.framing import index_records
from tests.bench.clock import (
    PeakMemory,
    pin_to_one_core,
    read_own_memory,
    release_free_memory,
    time_best,
)
from tests.bench.etl.__main__ import build_parser, check_arguments
from tests.bench.measurements import (
    Bar,
    BenchReport,
    Measurement,
    build_table,
    build_verdict_table,
    describe_arguments,
    judge,
    print_report,
    run_bench,
)
from tests.bench.shapes import SHAPES, build_batch
from tests.bench.tfrecord.spark_driver import generate

CLOCK_MARK = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

BUSY = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass"


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


# In a process of its own: threads that other tests have left behind may work meanwhile.
SLEEP = """
import json, time
from tests.bench.clock import time_best

times = time_best(lambda: time.sleep(0.05), 2)
print(json.dumps([times.wall_s, times.cpu_s]))
"""


@CLOCK_MARK
def test_sleep_costs_wall_time_only_and_work_both():
    done = subprocess.run([sys.executable, "-c", SLEEP], capture_output=True, text=True, check=True)
    asleep_wall_s, asleep_cpu_s = json.loads(done.stdout)
    assert asleep_wall_s >= 0.05
    assert asleep_cpu_s < 0.02
    assert time_best(lambda: busy(0.05), 2).cpu_s >= 0.05


@CLOCK_MARK
def test_short_work_is_timed_per_call():
    assert 0 < time_best(lambda: None, 2).wall_s < 1e-3


# In a process of its own: whatever else the one of the tests has started may end meanwhile.
TREE = f"""
import json, os, subprocess, sys
from tests.bench.clock import process_tree, time_tree

busy = {BUSY.format(s=0.3)!r}
code = "input()\\n" + busy + "\\nprint(flush=True); input()"
child = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)

def work():
    child.stdin.write("\\n")
    child.stdin.flush()
    subprocess.run([sys.executable, "-c", busy], check=True)
    child.stdout.readline()

times = time_tree(work)
lives = child.pid in process_tree(os.getpid())
child.communicate("\\n", timeout=30)
print(json.dumps([times.cpu_s, lives, child.pid in process_tree(os.getpid())]))
"""


@CLOCK_MARK
def test_the_tree_counts_children_that_live_and_children_that_have_ended():
    done = subprocess.run([sys.executable, "-c", TREE], capture_output=True, text=True, check=True)
    cpu_s, lives_at_first, lives_at_last = json.loads(done.stdout)
    assert 0.55 <= cpu_s < 10
    assert (lives_at_first, lives_at_last) == (True, False)


@CLOCK_MARK
def test_own_memory_grows_by_what_is_taken_and_falls_by_what_is_given_back():
    before = read_own_memory()
    held = np.ones(50_000_000, np.uint8)
    assert 50e6 <= read_own_memory() - before < 60e6
    del held
    release_free_memory()
    assert read_own_memory() - before < 10e6


@CLOCK_MARK
def test_peak_memory_is_that_of_the_largest_child():
    with PeakMemory() as peak:
        child = subprocess.Popen(
            [sys.executable, "-c", "x = bytearray(200 << 20); print(len(x), flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
    child.communicate(b"\n", timeout=30)
    assert peak.bytes["other"] >= 200 << 20


@CLOCK_MARK
def test_one_core_is_given_back():
    before = os.sched_getaffinity(0)
    with pin_to_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def figure(name: str, wall_s: float, cpu_s: float, rows: int = 100) -> Measurement:
    return Measurement("codec", "ctr", name, wall_s, cpu_s, rows, 1_000_000)


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_speed_up_compares_rows_per_cpu_second_whatever_the_rows():
    found = [figure("ours", 1.0, 2.0, rows=400), figure("theirs", 1.0, 1.0, rows=100)]
    [verdict] = judge("ctr", found, [Bar("ours", "theirs", 2.0)])
    assert (verdict.ratio, verdict.wall_ratio, verdict.is_met) == (2.0, 4.0, True)


@pytest.mark.parametrize(("cpu_s", "met"), [(1.2, True), (1.4, False)])
def test_a_cost_is_met_from_below(cpu_s, met):
    found = [figure("ours", 1.0, cpu_s), figure("floor", 1.0, 1.0)]
    [verdict] = judge("ctr", found, [Bar("ours", "floor", 1.3, at_least=False)])
    assert verdict.ratio == pytest.approx(cpu_s)
    assert verdict.is_met is met


def test_a_bar_without_its_figures_or_of_another_shape_gives_no_verdict():
    bars = [Bar("ours", "theirs", 2.0)]
    assert judge("ctr", [figure("ours", 1, 1)], bars) == []
    assert judge("history", [figure("ours", 1, 1), figure("theirs", 1, 1)], bars) == []


def test_a_bar_without_goal_is_neither_met_nor_missed():
    found = [figure("ours", 1.0, 1.0), figure("theirs", 1.0, 3.0)]
    [verdict] = judge("ctr", found, [Bar("ours", "theirs", None)])
    assert verdict.is_met is None
    text = printed(build_verdict_table([verdict], "bars"))
    assert "3.00x" in text
    assert "yes" not in text


def test_the_table_has_megabytes_and_the_ratio_to_the_first_line():
    text = printed(build_table("t", [figure("base", 2.0, 2.0), figure("fast", 0.5, 0.5)]))
    line = next(line for line in text.splitlines() if "fast" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["fast", "0.5", "0.5", "200", "200", "2", "4.00"]


def test_the_json_holds_figures_verdicts_and_what_was_skipped(tmp_path):
    report = BenchReport({"rows": 100}, [figure("ours", 1.0, 2.0), figure("theirs", 1.0, 8.0)])
    report.verdicts = judge("ctr", report.measurements, [Bar("ours", "theirs", 6.0)])
    report.skip("no connector")
    report.skip("no connector")
    report.write(tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [m["rows_per_cpu_s"] for m in found["measurements"]] == [50.0, 12.5]
    assert found["verdicts"][0]["ratio"] == 4.0
    assert found["verdicts"][0]["is_met"] is False
    assert found["skipped"] == ["no connector"]
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert "skipped: no connector" in console.file.getvalue()  # type: ignore[attr-defined]


def value_type(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if pa.types.is_list(data_type) else data_type


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batches_have_the_declared_columns_and_survive_the_wire(shape):
    batch = build_batch(shape, 7)
    assert batch.num_rows == 7
    assert batch.schema.names == [column.name for column in shape.columns]
    for column, array in zip(shape.columns, batch.columns, strict=True):
        if column.length is not None:
            assert {len(values) for values in array.to_pylist()} == {column.length}
    data = encode(batch)
    decoded = build_decoder(shape.features).decode(data, index_records(data))
    assert decoded.cast(batch.schema).equals(batch)


def test_an_empty_batch_has_the_same_schema():
    for shape in SHAPES.values():
        assert build_batch(shape, 0).schema == build_batch(shape, 3).schema


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_spark_generates_the_same_types_and_the_same_rows_however_split(spark, shape):
    table = generate(spark, shape.name, 5, 2).toArrow()
    batch = build_batch(shape, 5)
    assert table.schema.names == batch.schema.names
    for ours, theirs in zip(batch.schema.types, table.schema.types, strict=True):
        assert value_type(ours) == value_type(theirs)
        assert pa.types.is_list(ours) == pa.types.is_list(theirs)
    for column in shape.columns:
        values = table[column.name].combine_chunks()
        if column.length is not None:
            assert {len(row) for row in values.to_pylist()} == {column.length}
            values = values.flatten()
        if column.kind == "int64":
            assert 0 <= min(values.to_pylist()) <= max(values.to_pylist()) < column.cardinality
        if column.kind == "string":
            assert {len(text) for text in values.to_pylist()} == {16 * column.words}
    again = generate(spark, shape.name, 5, 3).toArrow()
    assert sorted(again.to_pylist(), key=str) == sorted(table.to_pylist(), key=str)


class FakeReport:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(describe_arguments(self.arguments)))


def test_figures_go_to_the_file(tmp_path, monkeypatch):
    target = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--rows", "2000", "--json", str(target)])
    run_bench(build_parser(), check_arguments, lambda given, _: FakeReport(given))
    assert json.loads(target.read_text())["rows"] == [2000]


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "5"], ["--conf", "x"], ["--repeats", "0"], ["--json", "/no/such/x"]],
)
def test_values_that_make_no_sense_are_refused(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        run_bench(build_parser(), check_arguments, lambda given, _: FakeReport(given))
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.exhaustive
def test_evaluation_finds_the_lists_of_an_exact_search(tmp_path, monkeypatch, capsys) -> None:
    from tests.bench.evaluate.__main__ import main

    file = tmp_path / "figures.json"
    options = f"--users 1500 --items 30000 --dim 8 --k 20 --seen 5 --json {file}"
    monkeypatch.setattr(sys, "argv", ["bench", *options.split()])
    main()
    found = {m["name"]: m["details"] for m in json.loads(file.read_text())["measurements"]}
    assert found["lists alone"]["first_lists"] == found["faiss IndexFlatIP"]["first_lists"]
    assert all(figures["peak_bytes"] > 0 for figures in found.values())
    assert "evaluate per user" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_batch_scoring_is_measured_beside_calls_of_a_row(tmp_path, monkeypatch, capsys) -> None:
    from tests.bench.scoring import main

    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--rows", "5000", "--json", str(file)])
    main()
    found = {m["name"]: m["rows"] for m in json.loads(file.read_text())["measurements"]}
    assert found == {"row by row": 2000, "partition": 5000}
    assert "partition: " in capsys.readouterr().out
