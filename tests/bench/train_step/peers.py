"""Another library that trains on the same batches, in a process and an environment of its own.

The process reads one line of JSON that says what to train, then the number of steps of each round,
and answers each line with one of its own: for a round the CPU-seconds that it took.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


class PeerTraining:
    """Trains in another process, when it is asked to.

    Args:
        process: Answers lines.
        library: Its name, for messages.
    """

    def __init__(self, process: subprocess.Popen[str], library: str) -> None:
        self._process, self._library = process, library

    def __call__(self, steps: int) -> float:
        """Runs steps; returns the CPU-seconds that they took."""
        return float(self.ask(str(steps)))

    def ask(self, line: str) -> str:
        """Sends a line; returns the answer.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline().strip()):
            raise RuntimeError(
                f"the process of {self._library} has ended; its message stands above"
            )
        return answer


@contextmanager
def open_peer(
    library: str,
    command: tuple[Path, Path],
    columns: Mapping[str, np.ndarray],
    asked: Mapping[str, Any],
) -> Iterator[PeerTraining]:
    """Starts a peer on batches.

    Args:
        library: Its name, for messages.
        command: Its Python, and the script that it runs.
        columns: Batches, by feature.
        asked: What to train; the file of the batches is added as `batches`.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        file = Path(folder) / "batches.npz"
        np.savez(file, allow_pickle=False, **columns)
        with subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            training = PeerTraining(process, library)
            training.ask(json.dumps({**asked, "batches": str(file)}))
            yield training
