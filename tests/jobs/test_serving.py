"""A server's processes: all ready or none, started anew, ended with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from jobs.support.serving import Supervisor, hold_folder

WAIT_SECONDS = 300


def work(folder: Path, tell: Callable[[str], None]) -> int:
    """Leaves its id in a folder; ends with code 3 where that says so."""
    if (folder / "fail").exists():
        return 3
    (folder / f"process-{os.getpid()}").touch()
    tell(f"ready {len(list(folder.iterdir()))}")
    while True:
        time.sleep(0.05)


def supervise(folder: Path) -> int:
    """What runs in a process of its own."""

    def forget(process: int) -> None:
        (folder / f"process-{process}").unlink(missing_ok=True)

    with Supervisor(partial(work, folder), forget, lambda: None) as supervisor:
        return supervisor.run(3, partial(print, flush=True))


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.jobs.test_serving import supervise\n"
        "if __name__ == '__main__': sys.exit(supervise(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def list_ids(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in folder.glob("process-*")}


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_what_ends_is_started_anew_and_a_signal_ends_all(tmp_path) -> None:
    with running(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready 1\n"  # The first one was alone.
        before = list_ids(tmp_path)
        assert len(before) == 3
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(list_ids(tmp_path) - {killed}) == 3)
        assert list_ids(tmp_path) > before - {killed}
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        assert not any(map(is_alive, list_ids(tmp_path)))


@pytest.mark.slow
def test_processes_end_with_a_parent_that_is_killed(tmp_path) -> None:
    with running(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        wait_for(lambda: not any(map(is_alive, list_ids(tmp_path))))


@pytest.mark.slow
def test_what_cannot_start_ends_all_with_its_code(tmp_path) -> None:
    (tmp_path / "fail").touch()
    with running(tmp_path) as process:
        assert process.wait(WAIT_SECONDS) == 3
    assert not list_ids(tmp_path)


HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom jobs.support.serving import hold_folder\n"
    "with hold_folder('kept-', Path(sys.argv[1])) as folder:\n"
    "    (folder / 'file').touch()\n    print(folder, flush=True)\n    time.sleep(600)"
)


def test_what_a_killed_process_left_goes_and_what_a_live_one_holds_stays(tmp_path: Path) -> None:
    (tmp_path / "kept-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        try:
            with hold_folder("kept-", tmp_path) as folder:
                assert folder.name.startswith("kept-")
                assert (held / "file").exists()
            assert not folder.exists()
        finally:
            process.kill()
    assert held.exists()
    with hold_folder("kept-", tmp_path) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, "kept-link", "other"}
    assert tmp_path.exists()
