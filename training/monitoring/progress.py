"""Progress of training: a bar on a terminal, lines now and then otherwise, JSON for schedulers.

Free of TensorFlow: made before it starts.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from conf.errors import render_event
from training.monitoring.epoch_records import EpochRecord

LogFormat = Literal["text", "json"]
SHOWN_METRICS = ("hit_rate@10", "ndcg@10", "mrr")


@dataclass(frozen=True)
class StepStatus:
    """Where training stands.

    Attributes:
        epoch: One-based epoch.
        epochs: Epochs of the whole run.
        step: Steps done in this epoch.
        steps: Steps per epoch.
        loss: Mean loss of this epoch so far.
        examples_per_s: Rows per second in this epoch.
        input_wait_share: Share of the time that steps waited for input, in [0, 1].
        eta_s: Seconds left if no epoch is saved by early stopping; None while unknown.
        run_step: Steps of the run so far: `step` of `metrics.jsonl`.
        run_steps: Steps of the run if no epoch is saved by early stopping.
        metric: Name of the metric that chooses the epoch, and its value after the last epoch; None
            while there is none.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    examples_per_s: float
    input_wait_share: float
    eta_s: float | None
    run_step: int
    run_steps: int
    metric: tuple[str, float] | None = None


class TrainingProgress(Protocol):
    """Receives what happens during training."""

    def message(self, text: str, **fields: Any) -> None:
        """Something that the user should know."""

    def step(self, status: StepStatus) -> None:
        """Some steps are done; called often."""

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """An epoch is done and saved."""

    def close(self) -> None:
        """Training has ended, well or not."""


class NoProgress:
    """Progress that is not shown."""

    def message(self, text: str, **fields: Any) -> None:
        """Drops the message."""

    def step(self, status: StepStatus) -> None:
        """Drops the status."""

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """Drops the record."""

    def close(self) -> None:
        """Nothing to end."""


def build_progress(
    log_format: LogFormat, every_seconds: float = 10.0, stream: TextIO | None = None
) -> TrainingProgress:
    """Returns the progress for an output stream (None: standard error)."""
    stream = stream or sys.stderr
    if log_format == "json":
        return JsonProgress(stream, every_seconds)
    if stream.isatty():
        return TerminalProgress(stream)
    return LineProgress(stream, every_seconds)


class JsonProgress:
    """One JSON object per line.

    Args:
        stream: Where lines go.
        every_seconds: Seconds between two lines about steps.
    """

    def __init__(self, stream: TextIO, every_seconds: float) -> None:
        self._stream = stream
        self._clock = _Interval(every_seconds)

    def message(self, text: str, **fields: Any) -> None:
        """Writes a message with its fields."""
        self._write(render_event("message", {"message": text, **fields}))

    def step(self, status: StepStatus) -> None:
        """Writes the status, if the last one is old enough."""
        if self._clock.is_due():
            name, value = status.metric or (None, None)
            metric = None if name is None else {"name": name, "value": value}
            self._write(render_event("steps", {**asdict(status), "metric": metric}))

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """Writes the epoch's record."""
        self._write(render_event("epoch", {**asdict(record), "best": best}))

    def close(self) -> None:
        """Nothing to end."""

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LineProgress:
    """Plain lines: for log files and pipes.

    Args:
        stream: Where lines go.
        every_seconds: Seconds between two lines about steps.
    """

    def __init__(self, stream: TextIO, every_seconds: float) -> None:
        self._stream = stream
        self._clock = _Interval(every_seconds)

    def message(self, text: str, **fields: Any) -> None:
        """Writes a message; its fields are for machines."""
        print(text, file=self._stream, flush=True)

    def step(self, status: StepStatus) -> None:
        """Writes the status, if the last one is old enough."""
        if self._clock.is_due():
            print(render_status(status), file=self._stream, flush=True)

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """Writes the epoch's summary."""
        print(render_epoch(record, best, metric), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to end."""


class TerminalProgress:
    """A line about the current epoch, with a bar where there is room, the finished ones above it.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=None)
        self._bar.start()

    def message(self, text: str, **fields: Any) -> None:
        """Prints a message above the bar."""
        self._console.print(text, highlight=False, markup=False)

    def step(self, status: StepStatus) -> None:
        """Renews the line and moves the bar."""
        self._bar.update(
            self._task,
            total=status.steps,
            completed=status.step,
            description=render_status(status, self._console.width),
        )

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """Prints the epoch's summary above the bar."""
        self.message(render_epoch(record, best, metric))

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.stop()


def render_status(status: StepStatus, width: int | None = None) -> str:
    """Returns where training stands as one line.

    Args:
        status: Where it stands.
        width: Characters that there is room for: words are shortened where they are too long, no
            figure is left out. None: no bound.
    """
    eta = "" if status.eta_s is None else f"  ETA {render_duration(status.eta_s)}"
    metric = "" if status.metric is None else f"  {status.metric[0]} {status.metric[1]:.4f}"
    loss, wait = f"loss {status.loss:.4f}{metric}", f"{status.input_wait_share:.0%}{eta}"
    epoch, step = f"{status.epoch}/{status.epochs}", f"{status.step}/{status.steps}"
    speed = status.examples_per_s
    line = f"epoch {epoch}  step {step}  {loss}  {speed:,.0f} examples/s  input wait {wait}"
    if width is None or len(line) <= width:
        return line
    return f"{epoch} {step} {loss} {speed:.0f}/s wait {wait}".replace("  ", " ")


def render_epoch(record: EpochRecord, best: bool, metric: str | None) -> str:
    """Returns one epoch's summary as text.

    Args:
        record: The epoch.
        best: Whether it is the best so far.
        metric: What says so, which is shown before the others; None: nothing.
    """
    shown = [name for name in SHOWN_METRICS if name in record.validation]
    names = shown or sorted(record.validation)[: len(SHOWN_METRICS)]
    if metric is not None and metric in record.validation:
        names = [metric, *(name for name in names if name != metric)]
    metrics = "".join(f"  {name} {record.validation[name]:.4f}" for name in names)
    return (
        f"epoch {record.epoch}  loss {record.loss:.4f}{metrics}  {record.seconds:.1f} s  "
        f"{record.examples_per_s:,.0f} examples/s  input wait {record.input_wait_share:.0%}"
        f"{'  (best so far)' if best else ''}"
    )


def render_duration(seconds: float) -> str:
    """Returns a duration as `h:mm:ss`, or `m:ss` below an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Interval:
    """Tells when enough time has passed since it last said so."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
