"""Progress of training: a bar on a terminal, lines now and then otherwise, JSON for schedulers."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from conf.errors import render_event

if TYPE_CHECKING:  # Progress is made before TensorFlow starts.
    from training.monitoring.run_logs import EpochRecord

LogFormat = Literal["text", "json"]
_SHOWN_METRICS = ("hit_rate@10", "ndcg@10", "mrr")


@dataclass(frozen=True)
class StepStatus:
    """Where training stands: in a one-based epoch (sums and means are of it), and in the run.

    `eta_s` is None while unknown, `metric` (the one that chooses the epoch, as it was last) while
    there is none.
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


class TrainingProgress:
    """Receives what happens during training, and shows none of it."""

    def message(self, text: str, **fields: Any) -> None:
        """Something that the user should know; the fields are for machines."""

    def step(self, status: StepStatus) -> None:
        """Some steps are done; called often."""

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        """An epoch is done and saved."""

    def close(self) -> None:
        """Training has ended, well or not."""


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


class LineProgress(TrainingProgress):
    """Plain lines, for log files and pipes; those about steps every so many seconds."""

    def __init__(self, stream: TextIO, every_seconds: float) -> None:
        self._stream, self._every_seconds, self._last = stream, every_seconds, time.monotonic()

    def message(self, text: str, **fields: Any) -> None:
        print(text, file=self._stream, flush=True)

    def step(self, status: StepStatus) -> None:
        now = time.monotonic()
        if now - self._last >= self._every_seconds:
            self._last = now
            self._show(status)

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        print(render_epoch(record, best, metric), file=self._stream, flush=True)

    def _show(self, status: StepStatus) -> None:
        print(render_status(status), file=self._stream, flush=True)


class JsonProgress(LineProgress):
    """One JSON object per line."""

    def message(self, text: str, **fields: Any) -> None:
        self._write("message", {"message": text, **fields})

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        self._write("epoch", {**asdict(record), "best": best})

    def _show(self, status: StepStatus) -> None:
        metric = status.metric and dict(zip(("name", "value"), status.metric, strict=True))
        self._write("steps", {**asdict(status), "metric": metric})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        print(render_event(event, fields), file=self._stream, flush=True)


class TerminalProgress(TrainingProgress):
    """A line about the current epoch, a bar where there is room, the finished ones above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        text = TextColumn("{task.description}", markup=False)
        self._bar = Progress(text, BarColumn(), console=self._console, transient=True)
        self._task = self._bar.add_task("training", total=None)
        self._bar.start()

    def message(self, text: str, **fields: Any) -> None:
        self._console.print(text, highlight=False, markup=False)

    def step(self, status: StepStatus) -> None:
        line = render_status(status, self._console.width)
        self._bar.update(self._task, total=status.steps, completed=status.step, description=line)

    def epoch(self, record: EpochRecord, best: bool, metric: str | None) -> None:
        self.message(render_epoch(record, best, metric))

    def close(self) -> None:
        self._bar.stop()


def render_status(status: StepStatus, width: int | None = None) -> str:
    """Returns where training stands as one line; shorter words where it would not fit a width."""
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
    """Returns one epoch's summary as text; the metric that chooses comes before the others."""
    shown = [name for name in _SHOWN_METRICS if name in record.validation]
    names = shown or sorted(record.validation)[: len(_SHOWN_METRICS)]
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
