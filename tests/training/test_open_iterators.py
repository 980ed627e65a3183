from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from training.open_iterators import close_iterators

ENDS_WITHIN_S = 120


@pytest.mark.parametrize("kind", ["shards", "keys"])
def test_a_script_may_end_with_a_half_read_iterator(kind: str, tiny_version: Path) -> None:
    script = [sys.executable, "-m", "tests.training.open_iterator", kind, str(tiny_version)]
    ended = subprocess.run(
        script, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr[-2000:]


def test_iterators_let_go_of_what_they_read() -> None:
    iterator = iter(tf.data.Dataset.range(3))
    assert int(next(iterator)) == 0
    close_iterators()
    assert not vars(iterator)
