"""The Spark figures: each in a driver of its own, and left out where its peer is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.bench.clock import REPOSITORY
from tests.bench.measurements import Measurement, judge
from tests.bench.shapes import SHAPES
from tests.bench.tfrecord import __main__ as bench
from tests.bench.tfrecord.peers import TFX_PYTHON_VARIABLE, PeerMissingError
from tests.bench.tfrecord.spark_driver import TASKS as DRIVER_TASKS
from tests.bench.tfrecord.spark_driver import SparkJob, count_bytes, open_source
from tests.bench.tfrecord.spark_io import (
    TITLES,
    SparkSettings,
    measure_spark,
    run_driver,
    spark_bars,
    title,
)


def test_every_task_has_a_title():
    assert DRIVER_TASKS.keys() == TITLES.keys()


@pytest.mark.parametrize("name", ["ctr", "history"])
def test_the_bars_name_measurements(name):
    shape = SHAPES[name]
    found = [
        Measurement("spark", name, title(task, "cached"), 1.0, 1.0, 10) for task in DRIVER_TASKS
    ]
    verdicts = judge(name, found, spark_bars(shape, "cached"))
    assert len(verdicts) == 3
    goals = {v.bar.reference: v.bar.goal for v in verdicts if v.bar.name == title(
        "write_native", "cached")}  # fmt: skip
    assert goals[title("write_connector", "cached")] == (1.4 if shape.has_lists else 2.0)


@pytest.mark.exhaustive
def test_tasks_do_what_they_are_called(spark, tmp_path):
    job = SparkJob("write_native", "narrow", 50, "range", "", str(tmp_path / "out"))
    frame = open_source(spark, job, job.rows)
    for task in ("scan", "hand_over", "write_native"):
        DRIVER_TASKS[task](frame, job)
    assert spark.read.format("sluice").load(job.output).count() == 50
    assert count_bytes(tmp_path / "out") > 50 * 16
    DRIVER_TASKS["write_parquet"](frame, SparkJob("", "narrow", 50, "range", "", str(tmp_path)))
    assert spark.read.parquet(str(tmp_path)).count() == 50


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_driver_reports_its_runs_and_a_missing_peer_is_skipped(tmp_path):
    skipped: list[str] = []
    settings = SparkSettings(tmp_path, rows=100, repeats=1)
    found = list(measure_spark(SHAPES["narrow"], settings, skipped.append, ()))
    assert [m.name for m in found] == [TITLES["read_feed"], TITLES["read_native"]]
    assert all(m.cpu_s > 0 for m in found)
    assert found[0].details["peak_rss_bytes"].keys() >= {"jvm", "python_worker"}
    assert skipped == ["JVM connector: left out"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_connector_that_maven_does_not_have_is_a_missing_peer(tmp_path):
    job = SparkJob("scan", "narrow", 1, "range", "", str(tmp_path),
                   conf={"spark.jars.packages": "com.example.none:none:0",
                         "spark.jars.repositories": tmp_path.as_uri(),
                         "spark.jars.ivy": str(tmp_path)})  # fmt: skip
    with pytest.raises(PeerMissingError, match="Maven"):
        run_driver(job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows must be 1 or more"),
        (["--scale", "0"], "--scale"),
        (["--only-scale"], "--only-scale needs --scale"),
        (["--conf", "a"], "KEY=VALUE"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_a_message(
    monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_whole_run_prints_figures_bars_and_what_is_missing(tmp_path):
    # In a process of its own: TensorFlow's threads can be limited only before its first use.
    options = ["--sections", "codec", "--shapes", "narrow", "--rows", "20", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.tfrecord", *options, "--json", tmp_path / "out.json"],
        capture_output=True, text=True, check=True, cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if k != TFX_PYTHON_VARIABLE},
    )  # fmt: skip
    assert "batched tf.io.parse_example" in done.stdout
    assert "memcpy and CRC-32C alone" in done.stdout
    assert "skipped: tfx_bsl" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["measurements"]
