from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.step_log import StepLog, StepRecord, read_steps


def record(step: int) -> StepRecord:
    return StepRecord(step, 1 + step // 10, 1 / (step + 3), 100.0, 0.25)


def write(run: Path, steps: range, finished: int = 0) -> None:
    log = StepLog(run, finished)
    for step in steps:
        log.write(record(step))
    log.sync()
    log.close()


def test_a_line_per_record_that_brings_every_bit_back(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    write(tmp_path, range(1, 6))
    assert read_steps(tmp_path) == [record(step) for step in range(1, 6)]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(lines[0])) == {
        "step",
        "epoch",
        "loss",
        "examples_per_s",
        "input_wait_share",
    }


@pytest.mark.parametrize("finished", [0, 3, 5, 9])
def test_what_is_done_again_is_cut_off(tmp_path: Path, finished: int) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(finished + 1, 8), finished)
    expected = [*range(1, min(finished, 5) + 1), *range(finished + 1, 8)]
    assert [line.step for line in read_steps(tmp_path)] == expected


@pytest.mark.parametrize("torn", [b'{"step": 6, "epo', b"\xff\xfe", b"[]\n", b'{"step": 6}\n'])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    write(tmp_path, range(6, 8), 5)
    assert [line.step for line in read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
