from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import UpstreamNotReadyError
from conf.run import REPORT_FILE
from jobs.cli import run_app
from jobs.report import app, write_report
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset, write_run


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    config = FakeConfig(users=30, items=12, title=None)
    return write_run(root / "runs", write_dataset(root / "datasets", config), config).parent.parent


def test_a_series_stands_for_its_last_finished_run(series, capsys):
    assert run_app(app, ["--run", str(series)]) == 0
    report = Path(capsys.readouterr().out.strip())
    assert report.name == REPORT_FILE
    assert report.parent.parent == series / "runs"
    assert report.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_writing_again_gives_the_same_bytes_and_leaves_nothing_behind(series):
    report = write_report(series)
    first = report.read_bytes()
    before = sorted(entry.name for entry in report.parent.iterdir())
    assert write_report(report.parent).read_bytes() == first
    assert sorted(entry.name for entry in report.parent.iterdir()) == before


def test_a_failure_keeps_the_earlier_report(series, tmp_path, monkeypatch):
    run = shutil.copytree(write_report(series).parent, tmp_path / "run")
    first = (run / REPORT_FILE).read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    assert (run / REPORT_FILE).read_bytes() == first
    assert [entry.name for entry in run.glob(".*")] == []


def test_no_run_is_not_ready(tmp_path, capsys):
    with pytest.raises(UpstreamNotReadyError):
        write_report(tmp_path)
    assert run_app(app, ["--run", str(tmp_path)]) == 4
    assert "sluice train" in capsys.readouterr().err


def test_needs_neither_side(series):
    code = (
        "import sys; from jobs.report import write_report; from pathlib import Path;"
        f"import jobs.inspect_dataset; write_report(Path({str(series)!r}));"
        "print([m for m in ('tensorflow', 'keras', 'pyspark') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
