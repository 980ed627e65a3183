from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jobs.bench.input.__main__ import MEMORY, build_parser, check_arguments, main
from jobs.bench.input.pipelines import BATCHED, BLOCK, PER_RECORD, RAW


@pytest.mark.parametrize(
    "arguments", [["--rows", "10"], ["--threads", "0"], ["--repeats", "0"], ["--shapes", "x"]]
)
def test_values_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    parser = build_parser()
    with pytest.raises(SystemExit):
        check_arguments(parser, parser.parse_args(arguments))


def test_the_defaults_are_sound() -> None:
    parser = build_parser()
    check_arguments(parser, parser.parse_args([]))


@pytest.mark.slow
def test_prints_all_figures_goals_and_limits(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    options = (
        "--shapes ctr history2 --layouts columns --rows 256 --slow-rows 64 --batch-size 32 "
        "--repeats 1 --threads 2"
    )
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    main()
    figures, printed = json.loads(file.read_text()), capsys.readouterr().out
    own = BLOCK.format(2)
    for shape in ("ctr", "history2"):
        found = [m for m in figures["measurements"] if m["shape"] == shape]
        rows = {m["name"]: m["rows"] for m in found}
        assert {MEMORY, RAW, PER_RECORD, BATCHED, own} <= set(rows)
        assert (rows[own], rows[PER_RECORD]) == (256, 64)
        verdicts = [v for v in figures["verdicts"] if v["shape"] == shape]
        goals = {v["bar"]["reference"]: v for v in verdicts}
        assert (goals[BATCHED]["bar"]["goal"], goals[PER_RECORD]["bar"]["goal"]) == (5, 40)
        speed = {m["name"]: m["rows_per_cpu_s"] for m in found}
        assert goals[BATCHED]["ratio"] == pytest.approx(speed[own] / speed[BATCHED], rel=1e-6)
        assert {RAW, MEMORY} <= set(goals)  # the limits
    assert "parse_single_example" in printed
    assert "memory: copy" in printed
