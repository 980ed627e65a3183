"""Starts the workers of a training run as the tasks of one Spark barrier job.

Each task runs `sluice train` in a process of its own, with the `TF_CONFIG` that the tasks agree on.
What it prints goes to the task's log; exit codes and the last lines come back to the driver.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import ConfigError, ExitCode, InternalError
from jobs.support.spark_session import build_session, check_executors

if TYPE_CHECKING:
    from pyspark import SparkContext

APP_NAME = "sluice train"
LAST_LINES = 20
STOP_SECONDS = 60
# Spark asks this often, and this many seconds apart, whether there are slots for all tasks.
SLOT_CHECKS, SLOT_CHECK_SECONDS = 8, 15
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SparkLaunch:
    """What each task runs.

    Attributes:
        config: The resolved config, JSON.
        workers: How many tasks.
        resume: Whether to go on with the newest unfinished run of the config.
        report: Whether the run gets its report.
        log_format: `text` or `json`.
    """

    config: str
    workers: int
    resume: bool
    report: bool
    log_format: str


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        index: Number of the worker; 0 is the chief.
        host: Where it ran.
        code: Its exit code.
        lines: The last lines that it printed.
    """

    index: int
    host: str
    code: int
    lines: tuple[str, ...]


def launch_on_spark(start: SparkLaunch, master: str) -> int:
    """Runs all workers at once and returns the exit code of the run.

    Args:
        start: What each of them runs.
        master: Spark's master, unless under spark-submit.

    Raises:
        ConfigError: Spark has fewer slots than there are workers, or executors lack Sluice.
        InternalError: Spark lost a task.
    """
    checks = "spark.scheduler.barrier.maxConcurrentTasksCheck"
    settings = {
        f"{checks}.maxFailures": str(SLOT_CHECKS),
        f"{checks}.interval": f"{SLOT_CHECK_SECONDS}s",
        # A worker that was lost cannot be started anew alone: the run is resumed, by its caller.
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.task.maxFailures": "1",
    }
    session = build_session({"spark.master": master, **settings}, APP_NAME)
    try:
        check_executors(session)
        ends = _run_job(session.sparkContext, start)
    finally:
        session.stop()
    for end in ends:
        print(f"worker {end.index} on {end.host}: exit code {end.code}", file=sys.stderr)
        for line in end.lines if end.code else end.lines[-1:]:
            print(f"  {line}", file=sys.stderr)
    return choose_exit_code([end.code for end in ends])


def choose_exit_code(codes: Iterable[int]) -> int:
    """Returns the code that says why a run ended.

    The workers that are left when one ends do so with 1: any other code is nearer to the cause.
    """
    failed = [code if code > 0 else 128 - code for code in codes if code]
    return next((code for code in failed if code != ExitCode.FAILED), max(failed, default=0))


def _run_job(context: SparkContext, start: SparkLaunch) -> list[WorkerExit]:
    # Spark's own check waits for executors to come; on one machine none will.
    if (context.master or "").startswith("local") and context.defaultParallelism < start.workers:
        raise _too_few_slots(start.workers, f"{context.defaultParallelism} on {context.master}")
    tasks = context.parallelize(range(start.workers), start.workers).barrier()
    try:
        ends = tasks.mapPartitions(functools.partial(_run_worker, start)).collect()
    except Exception as error:  # Py4J's, which names the failure in its text alone.
        text = str(error)
        if "SPARK-24819" in text:
            raise _too_few_slots(start.workers, "fewer") from error
        lines = [line for line in text.splitlines() if "xception" in line or "rror" in line]
        raise InternalError(
            "Spark did not run the workers to their end",
            received=(lines or [type(error).__name__])[0].strip()[:500],
            fix="see the logs of the tasks, then start again with --resume",
        ) from error
    return sorted(ends, key=lambda end: end.index)


def _too_few_slots(workers: int, found: str) -> ConfigError:
    return ConfigError(
        "Spark cannot run all workers at once",
        received=f"--workers {workers}, slots for tasks: {found}",
        allowed="at most as many workers as there are slots (executors x cores / spark.task.cpus)",
        fix="ask Spark for more executors, or set --workers accordingly",
    )


def _run_worker(start: SparkLaunch, _: Iterable[int]) -> Iterator[WorkerExit]:
    """One task: agrees with the others on addresses, and runs its worker to the end."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    host = context.getTaskInfos()[context.partitionId()].address.partition(":")[0]
    with socket.socket() as held:
        # Held until all tasks have one, so that two tasks of a machine get two ports.
        held.bind(("", 0))
        addresses = context.allGather(f"{host}:{held.getsockname()[1]}")
    task = {"type": "worker", "index": context.partitionId()}
    tf_config = json.dumps({"cluster": {"worker": addresses}, "task": task})
    with tempfile.TemporaryDirectory(prefix="sluice-train-") as folder:
        config = Path(folder) / "config.yaml"  # JSON is YAML.
        config.write_text(start.config, encoding="utf-8")
        code, lines = _stream(build_command(start, config), tf_config, context.partitionId())
    yield WorkerExit(context.partitionId(), host, code, lines)


def build_command(start: SparkLaunch, config: Path) -> list[str]:
    """Returns the command line of a worker, by the Python that runs its task."""
    return [
        *(sys.executable, "-m", "jobs.cli", "train", str(config)),
        *("--set", "devices.strategy=multi_worker", "--log-format", start.log_format),
        *(["--resume"] if start.resume else []),
        *([] if start.report else ["--no-report"]),
    ]


def _stream(command: list[str], tf_config: str, index: int) -> tuple[int, tuple[str, ...]]:
    """Runs a worker, passes on what it prints, and returns its exit code and last lines."""
    # Python finds on the path of the task what it found there: Sluice, shipped or installed.
    environment = {
        **os.environ,
        "TF_CONFIG": tf_config,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
    }
    last: deque[str] = deque(maxlen=LAST_LINES)
    process = subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_build_guard(),
    )
    try:
        for line in process.stdout or ():
            last.append(line.rstrip())
            print(f"[worker {index}] {line}", end="", file=sys.stderr, flush=True)
        return process.wait(), tuple(last)
    finally:
        if process.poll() is None:  # The task is cancelled: the worker saves and ends.
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _build_guard() -> functools.partial[int] | None:
    """On Linux a worker gets SIGTERM when its task is killed; looked up before the fork."""
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
