"""The benchmarks' command line: checked arguments, and figures in a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from jobs.bench.command import describe_arguments, run_command
from jobs.bench.etl.__main__ import build_parser, check_arguments


class FakeReport:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(describe_arguments(self.arguments)))


def test_figures_go_to_the_file(tmp_path, monkeypatch):
    target = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--rows", "2000", "--json", str(target)])
    run_command(build_parser(), check_arguments, lambda given, _: FakeReport(given))
    assert json.loads(target.read_text())["rows"] == [2000]


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "5"], ["--conf", "x"], ["--repeats", "0"], ["--json", "/no/such/x"]],
)
def test_values_that_make_no_sense_are_refused(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        run_command(build_parser(), check_arguments, lambda given, _: FakeReport(given))
    assert arguments[0] in capsys.readouterr().err
