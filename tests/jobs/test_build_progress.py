"""The bar of a build: what is expected of each stage, and how it corrects itself."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conf.etl.build import BuildConfig
from conf.load import load_config
from jobs.support.build_progress import STAGES, BuildProgress, describe_seconds, expect_seconds

LOG = """name: shop
sources:
  log:
    path: log.tsv
    columns: [{{name: u, type: int64}}, {{name: i, type: int64}}, {{name: t, type: int64}}]
events: {{source: log, user: u, item: i, time: t}}
split: {{strategy: leave_one_out}}
features: [{{name: u, column: u, role: user}}, {{name: i, column: i, role: item}}]
output: {{root: "{root}/datasets", shards: 1}}
spark: {{master: "local[1]", driver_memory: 1g}}
"""


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_build_that_takes_as_long_as_expected_ends_where_it_said() -> None:
    clock = Clock()
    progress = BuildProgress({"start": 5.0, "read": 5.0, "write": 10.0}, clock)
    clock.seconds = 4.0
    assert progress.measure() == (pytest.approx(0.2), pytest.approx(16.0))
    clock.seconds = 5.0
    progress.begin("read")
    clock.seconds = 10.0
    progress.begin("write")
    clock.seconds = 15.0
    assert progress.measure() == (pytest.approx(0.75), pytest.approx(5.0))


def test_a_build_at_half_the_pace_is_said_to_take_twice_as_long() -> None:
    clock = Clock()
    progress = BuildProgress({"start": 5.0, "write": 10.0}, clock)
    clock.seconds = 10.0
    progress.begin("write")
    assert progress.measure() == (pytest.approx(1 / 3), pytest.approx(20.0))
    clock.seconds = 20.0
    assert progress.measure() == (pytest.approx(2 / 3), pytest.approx(10.0))


def test_the_bar_never_says_that_all_is_done_and_never_goes_back() -> None:
    clock = Clock()
    progress = BuildProgress({"start": 1.0, "read": 1.0, "write": 1.0}, clock)
    shares = []
    for second, stage in enumerate(["", "read", "", "a stage of its own", "write", "", "", ""]):
        clock.seconds = float(second)
        if stage:
            progress.begin(stage)
        shares.append(progress.measure()[0])
        assert progress.measure()[1] > 0.0
    assert shares == sorted(shares)
    assert shares[-1] < 1.0


def test_times_are_said_as_people_say_them() -> None:
    assert [describe_seconds(s) for s in (0.2, 41.7, 89.0, 200.0)] == [
        "1 s",
        "42 s",
        "89 s",
        "3 min",
    ]


def test_a_first_build_is_guessed_by_its_bytes(tmp_path: Path) -> None:
    config = load_config(BuildConfig, "etl", _write(tmp_path), [])
    small, large = (sum(expect_seconds(config, None, size).values()) for size in (0, 10**9))
    assert sum(STAGES.values()) == pytest.approx(1.0)
    assert large > 2 * small


def _write(folder: Path) -> str:
    rows = [
        f"{user}\t{(user + k) % 7}\t{1_700_000_000 + k}" for user in range(20) for k in range(6)
    ]
    (folder / "log.tsv").write_text("\n".join(rows) + "\n")
    (folder / "build.yaml").write_text(LOG.format(root=folder))
    return str(folder / "build.yaml")


@pytest.mark.slow
def test_a_terminal_shows_a_bar_beside_the_log(tmp_path: Path) -> None:
    config = _write(tmp_path)
    command = [sys.executable, "-m", "jobs.cli", "build", config, "--data", str(tmp_path)]
    ours, theirs = pty.openpty()
    running = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # The other side is closed: the build has ended.
        pass
    assert running.wait() == 0
    text = shown.decode()
    assert re.search(r"\d+%, about \d+ (s|min) left", text)
    for stage in ("read sources", "write records"):
        assert stage in text
    assert re.search(r"\d\d:\d\d:\d\d write records: \d", text)
    # The second build expects what the first one took.
    [version] = (tmp_path / "datasets/shop/versions").iterdir()
    expected = expect_seconds(load_config(BuildConfig, "etl", config, []), version.name, 0)
    assert list(expected) == list(STAGES)
