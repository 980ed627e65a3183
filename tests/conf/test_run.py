"""Runs resolve through CURRENT, and the run card is merged, not overwritten."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.run import RunPaths, read_json, resolve_run, update_run_card, write_json


def test_series_and_run_resolve(tmp_path):
    paths = RunPaths(tmp_path, "s")
    run = paths.run("r1")
    run.mkdir(parents=True)
    with pytest.raises(UpstreamNotReadyError):
        resolve_run(str(paths.base))
    update_run_card(run, status="trained")
    paths.current.write_text("r1\n")
    assert resolve_run(str(paths.base)) == resolve_run(str(run)) == run


def test_current_that_names_no_run_is_refused(tmp_path):
    paths = RunPaths(tmp_path, "s")
    paths.base.mkdir()
    paths.current.write_text("../../x")
    with pytest.raises(InputDataError):
        resolve_run(str(paths.base))


def test_card_merges_one_level(tmp_path):
    update_run_card(tmp_path, timing={"train": 1}, status="training")
    update_run_card(tmp_path, timing={"evaluate": 2}, status="trained")
    assert read_json(tmp_path / "run_card.json") == {
        "status": "trained",
        "timing": {"train": 1, "evaluate": 2},
    }


def test_parts_added_at_the_same_time_all_stay(tmp_path):
    code = (
        "import sys; from pathlib import Path; from conf.run import update_run_card\n"
        "for i in range(20): update_run_card(Path(sys.argv[1]), **{f'{sys.argv[2]}{i}': i})"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len(read_json(tmp_path / "run_card.json")) == 40


@pytest.mark.parametrize(
    ("text", "error"),
    [(b"{", InputDataError), (b"[]", InputDataError), (b'{"a": "\xff"}', InputDataError)],
)
def test_damaged_json_is_refused(tmp_path, text, error):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(error):
        read_json(tmp_path / "a.json")
    with pytest.raises(UpstreamNotReadyError):
        read_json(tmp_path / "b.json")


def test_nan_never_reaches_a_file(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not (tmp_path / "a.json").exists()


def test_run_names_cannot_leave_the_root(tmp_path):
    with pytest.raises(ConfigError):
        RunPaths(tmp_path, "../x")
