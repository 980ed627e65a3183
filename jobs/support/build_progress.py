"""The bar of a build on a terminal: the stage that runs, and an estimate of the time left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from conf.artefacts.dataset import DatasetPaths, read_manifest
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.local_paths import local_path
from conf.storage.locations import is_remote

STAGES: Mapping[str, float] = {
    "start": 0.12,
    "read sources": 0.12,
    "check sources": 0.02,
    "join and split events": 0.2,
    "fit encoders": 0.16,
    "write records": 0.36,
    "check features": 0.02,
}
"""Stages of a build, and the share of its time that each takes where nothing is known of it."""
_FIRST_S = 20.0
_CPU_S_PER_MB = 0.6
_NEARLY = 0.99


def expect_seconds(config: BuildConfig, before: str | None, input_bytes: int) -> dict[str, float]:
    """Returns the seconds that each stage of a build is expected to take.

    By those of the version before, as the inputs have grown; else by what a hundred thousand and a
    million events of ten columns take.

    Args:
        config: The build.
        before: Id of the current version, None where there is none.
        input_bytes: Of all inputs.
    """
    known = _read_seconds(config, before)
    if known is None:
        cores = min(os.cpu_count() or 1, 16)
        total = _FIRST_S + _CPU_S_PER_MB * input_bytes / 1e6 / cores
        return {stage: share * total for stage, share in STAGES.items()}
    seconds, bytes_before = known
    growth = input_bytes / bytes_before if input_bytes and bytes_before else 1.0
    start = {"start": _FIRST_S * STAGES["start"]}
    return start | {stage: seconds[stage] * growth for stage in STAGES if stage in seconds}


def _read_seconds(
    config: BuildConfig, before: str | None
) -> tuple[Mapping[str, float], int] | None:
    """Seconds by stage and bytes of the inputs of a version; None where it does not lie here."""
    if before is None or is_remote(config.output.root):
        return None
    folder = DatasetPaths(local_path(config.output.root).resolve(), config.name).version(before)
    try:
        manifest = read_manifest(folder)
    except InputDataError:  # The build says what is wrong with it, if it matters.
        return None
    if not manifest.stage_seconds:
        return None
    return manifest.stage_seconds, sum(file.bytes for file in manifest.source.inputs)


@dataclass
class BuildProgress:
    """How far a build is, by the stages that are done and the time that they were expected to take.

    Attributes:
        expected: Seconds by stage, in their order.
        now: The clock.
    """

    expected: Mapping[str, float]
    now: Callable[[], float] = time.monotonic
    stage: str = "start"
    _begun: float = field(init=False)
    _stage_begun: float = field(init=False)
    _done: float = 0.0
    _shown: float = 0.0

    def __post_init__(self) -> None:
        self._begun = self._stage_begun = self.now()

    def begin(self, stage: str) -> None:
        """Says that a stage begins: all before it are done."""
        names = list(self.expected)
        before = names[: names.index(stage)] if stage in names else []
        self._done = max(self._done, sum(self.expected[name] for name in before))
        self.stage, self._stage_begun = stage, self.now()

    def measure(self) -> tuple[float, float]:
        """Returns the share that is done, below 1, and the seconds that are left.

        A build that has taken twice the time that was expected so far is expected to take twice
        the time for the rest.
        """
        elapsed, in_stage = self.now() - self._begun, self.now() - self._stage_begun
        total = sum(self.expected.values())
        pace = 1.0 if self._done == 0.0 else (elapsed - in_stage) / self._done
        pace = pace or 1.0
        expected = self.expected.get(self.stage, 0.0)
        done = self._done + min(in_stage / pace, _NEARLY * expected)
        self._shown = max(self._shown, min(done / total, _NEARLY))
        return self._shown, (total - done) * pace


@contextmanager
def show_build(expected: Mapping[str, float]) -> Iterator[Callable[[str], None]]:
    """Shows a bar on a terminal's standard error; elsewhere nothing.

    Args:
        expected: Seconds by stage, in their order.

    Yields:
        Called with the name of each stage as it begins.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    progress, stop = BuildProgress(expected), threading.Event()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(progress.stage, total=1.0, left="")

        def show() -> None:
            while not stop.wait(0.5):
                done, left = progress.measure()
                text = f"{done:.0%}, about {describe_seconds(left)} left"
                bar.update(task, completed=done, description=progress.stage, left=text)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield progress.begin
        finally:
            stop.set()
            thread.join()


def describe_seconds(seconds: float) -> str:
    """Returns a time as a person says it: `40 s`, `3 min`."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
