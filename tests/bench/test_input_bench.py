from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.bench.input.__main__ import MEMORY, build_parser, check_arguments, main
from tests.bench.input.pipelines import (
    ARRAYS,
    BATCHED,
    BLOCK,
    PER_RECORD,
    RAW,
    InputFiles,
    build_pipelines,
    drain,
    write_shards,
)
from tests.bench.shapes import SHAPES


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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_prints_all_figures_goals_and_limits(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    options = (
        "--shapes ctr history2 --rows 256 --slow-rows 64 --batch-size 32 --repeats 1 --threads 2"
    )
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    main()
    figures, printed = json.loads(file.read_text()), capsys.readouterr().out
    own, arrays = BLOCK.format(2), ARRAYS.format(2)
    for shape in ("ctr", "history2"):
        found = [m for m in figures["measurements"] if m["shape"] == shape]
        rows = {m["name"]: m["rows"] for m in found}
        assert {MEMORY, RAW, PER_RECORD, BATCHED, own, arrays} <= set(rows)
        assert (rows[own], rows[arrays], rows[PER_RECORD]) == (256, 256, 64)
        verdicts = [v for v in figures["verdicts"] if v["shape"] == shape]
        goals = {v["bar"]["reference"]: v for v in verdicts}
        assert (goals[BATCHED]["bar"]["goal"], goals[PER_RECORD]["bar"]["goal"]) == (5, 40)
        speed = {m["name"]: m["rows_per_cpu_s"] for m in found}
        assert goals[BATCHED]["ratio"] == pytest.approx(speed[own] / speed[BATCHED], rel=1e-6)
        assert {RAW, MEMORY} <= set(goals)  # the limits
    assert "parse_single_example" in printed
    assert "memory: copy" in printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ctr", "history2"])
def test_all_pipelines_deliver_the_same_rows(name: str, tmp_path: Path) -> None:
    found = write_shards(name, 96, 2, tmp_path)
    assert found == write_shards(name, 96, 2, tmp_path)  # they are there
    files = InputFiles(SHAPES[name], tmp_path, found)
    assert files.rows == 96
    column = SHAPES[name].columns[-1].name
    seen = {}
    for key, build in build_pipelines(files, 32, 64, (1, 2)).items():
        assert drain(build(), 3) == 96
        if key != RAW:
            rows = np.concatenate([np.asarray(batch[column]) for batch in build()])
            seen[key] = sorted(map(repr, rows.tolist()))
    first, *others = seen.values()
    assert len(others) >= 6
    assert all(rows == first for rows in others)
