from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from jobs.quiet import quiet_tensorflow
try:
    with quiet_tensorflow():
        os.write(2, b"noise\\n")
        if len(sys.argv) > 1:
            raise RuntimeError
except RuntimeError:
    pass
os.write(2, b"after\\n")
"""


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, "after\n"),
        (["fail"], {}, "noise\nafter\n"),
        ([], {"TF_CPP_MIN_LOG_LEVEL": "0"}, "noise\nafter\n"),
    ],
)
def test_notes_are_hidden_unless_they_are_needed(
    arguments: list[str], environment: dict[str, str], expected: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **environment},
    )
    assert done.stderr == expected
