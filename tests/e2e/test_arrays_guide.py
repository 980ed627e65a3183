"""The loops of docs/guide/training-arrays.md, in environments without TensorFlow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs_site.blocks import Block, read_blocks
from tests.training.tiny_dataset import write_tiny_dataset

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "training-arrays.md"
STEPS = 3 * 12  # epochs of 780 rows, in whole batches of 64
LOSS = re.compile(r"^(\d+) (\d+) (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("dataset"))


def find_block(word: str) -> Block:
    (found,) = [block for block in read_blocks(PAGE) if f"import {word}\n" in block.code]
    return found


def write_script(block: Block, version: Path, folder: Path) -> Path:
    code = block.code.replace("/data/datasets/demo", str(version))
    script = folder / "train.py"
    script.write_text(code.replace("/data/", f"{folder}/"))
    return script


def start(python: str, script: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with script.with_suffix(".out").open("wb") as out, script.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [python, str(script)],
            cwd=script.parent, env=environment, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip


def read_losses(script: Path) -> dict[tuple[int, int], str]:
    printed = script.with_suffix(".out").read_text()
    return {(int(epoch), int(batch)): loss for epoch, batch, loss in LOSS.findall(printed)}


def run_to_end(python: str, script: Path) -> dict[tuple[int, int], str]:
    code = start(python, script).wait(timeout=600)
    assert code == 0, script.with_suffix(".err").read_text()
    return read_losses(script)


def run_until_killed(python: str, script: Path, lines: int) -> dict[tuple[int, int], str]:
    """Kills the process and its workers once it has printed so many losses."""
    process = start(python, script)
    deadline = time.monotonic() + 600
    while len(read_losses(script)) < lines and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, script.with_suffix(".err").read_text()
    return read_losses(script)


def is_falling(losses: Mapping[tuple[int, int], str]) -> bool:
    first, last = (
        sum(float(loss) for (epoch, _), loss in losses.items() if epoch == number)
        for number in (0, 2)
    )
    return last < 0.95 * first


def find_python(name: str) -> str:
    python = os.environ.get(name)
    if not python:
        pytest.skip(f"{name} names no Python")
    return python


def test_the_first_block_runs(version: Path, tmp_path: Path) -> None:
    block = read_blocks(PAGE)[0]
    script = write_script(block, version, tmp_path)
    script.write_text(script.read_text() + "print(state['epoch'], state['batch'], sizes['genres'])")
    assert list(run_to_end(sys.executable, script)) == [(1, 0)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_pytorch_loop_that_is_killed_goes_on_with_equal_losses(
    version: Path, tmp_path: Path
) -> None:
    python = find_python("SLUICE_TORCH_PYTHON")
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = run_to_end(python, write_script(find_block("torch"), version, whole))
    assert len(expected) == STEPS
    assert is_falling(expected)
    script, found = write_script(find_block("torch"), version, tmp_path), {}
    for lines in (7, 8, 11):
        killed = run_until_killed(python, script, lines)
        assert all(expected[step] == loss for step, loss in killed.items())
        found.update(killed)
    rest = run_to_end(python, script)
    assert len(rest) < STEPS - 10  # it did go on, not begin anew
    assert {**found, **rest} == expected


@pytest.mark.exhaustive
@pytest.mark.slow
def test_workers_of_a_loader_change_no_loss(version: Path, tmp_path: Path) -> None:
    python, losses = find_python("SLUICE_TORCH_PYTHON"), []
    ways = ("num_workers=0", "num_workers=3", "num_workers=2, persistent_workers=True")
    for number, workers in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = write_script(find_block("torch"), version, folder)
        script.write_text(script.read_text().replace("num_workers=2", workers))
        losses.append(run_to_end(python, script))
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_loop_of_jax_trains(version: Path, tmp_path: Path) -> None:
    python = find_python("SLUICE_JAX_PYTHON")
    losses = run_to_end(python, write_script(find_block("jax"), version, tmp_path))
    assert len(losses) == STEPS
    assert is_falling(losses)
