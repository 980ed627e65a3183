"""The clocks see the work that is done, in this process and below it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.bench.tfrecord.clock import (
    PeakMemory,
    pin_to_one_core,
    time_best,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

BUSY = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass"


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


# In a process of its own: threads that other tests have left behind may work meanwhile.
SLEEP = """
import json, time
from jobs.bench.tfrecord.clock import time_best

times = time_best(lambda: time.sleep(0.05), 2)
print(json.dumps([times.wall_s, times.cpu_s]))
"""


def test_sleep_costs_wall_time_only_and_work_both():
    done = subprocess.run([sys.executable, "-c", SLEEP], capture_output=True, text=True, check=True)
    asleep_wall_s, asleep_cpu_s = json.loads(done.stdout)
    assert asleep_wall_s >= 0.05
    assert asleep_cpu_s < 0.02
    assert time_best(lambda: busy(0.05), 2).cpu_s >= 0.05


def test_short_work_is_timed_per_call():
    assert 0 < time_best(lambda: None, 2).wall_s < 1e-3


# In a process of its own: whatever else the one of the tests has started may end meanwhile.
TREE = f"""
import json, os, subprocess, sys
from jobs.bench.tfrecord.clock import process_tree, time_tree

busy = {BUSY.format(s=0.3)!r}
code = "input()\\n" + busy + "\\nprint(flush=True); input()"
child = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)

def work():
    child.stdin.write("\\n")
    child.stdin.flush()
    subprocess.run([sys.executable, "-c", busy], check=True)
    child.stdout.readline()

times = time_tree(work)
lives = child.pid in process_tree(os.getpid())
child.communicate("\\n", timeout=30)
print(json.dumps([times.cpu_s, lives, child.pid in process_tree(os.getpid())]))
"""


def test_the_tree_counts_children_that_live_and_children_that_have_ended():
    done = subprocess.run([sys.executable, "-c", TREE], capture_output=True, text=True, check=True)
    cpu_s, lives_at_first, lives_at_last = json.loads(done.stdout)
    assert 0.55 <= cpu_s < 10
    assert (lives_at_first, lives_at_last) == (True, False)


def test_peak_memory_is_that_of_the_largest_child():
    with PeakMemory() as peak:
        child = subprocess.Popen(
            [sys.executable, "-c", "x = bytearray(200 << 20); print(len(x), flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
    child.communicate(b"\n", timeout=30)
    assert peak.bytes["other"] >= 200 << 20


def test_one_core_is_given_back():
    before = os.sched_getaffinity(0)
    with pin_to_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
