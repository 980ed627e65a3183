"""Processes that do the same beside each other, kept alive by the one that started them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from conf.errors import ExitCode

LONGEST_WAIT_SECONDS = 30.0
"""Before a process that keeps ending is started once more."""
STOP_SECONDS = 120.0
"""For processes to end by themselves, after the time that each gives what it has begun."""

Work = Callable[[Callable[[str], None]], int]
"""Picklable; is given what tells that the process is ready, and returns its exit code."""

_log = logging.getLogger("sluice.jobs")


class _NotStartedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class _Process:
    process: SpawnProcess
    told: Connection
    is_ready: bool = False

    def is_starting(self) -> bool:
        """Whether it has neither said that it is ready nor ended."""
        return not wait([self.told, self.process.sentinel], 0.5)


@dataclass
class Supervisor:
    """Starts processes, starts those anew that end, and ends all at SIGTERM or Ctrl-C.

    The first one alone begins: what cannot start is reported once, and what processes share is
    there when the others come.

    Attributes:
        work: What each of them does.
        count: How many there are.
        forget: Called with the id of each process that has ended.
        end: Called when all are to end, before they are told.
    """

    work: Work
    count: int
    forget: Callable[[int], None] = lambda _: None
    end: Callable[[], None] = lambda: None
    _running: list[_Process] = field(default_factory=list, init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, tell: Callable[[str], None]) -> int:
        """Runs them until a signal comes.

        Args:
            tell: Given what the first process said when it was ready, once all are.

        Returns:
            The exit code: that of a process that could not start, else 0.
        """
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            said = [self._wait(self._start())]
            said += [self._wait(one) for one in [self._start() for _ in range(1, self.count)]]
            tell(said[0])
            self._keep_alive()
            return ExitCode.OK
        except _NotStartedError as error:
            return error.code
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, *_: Any) -> None:
        self._ended.set()

    def _start(self) -> _Process:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_run, args=(self.work, theirs, os.getpid()))
        process.start()
        theirs.close()
        self._running.append(_Process(process, ours))
        return self._running[-1]

    def _wait(self, one: _Process) -> str:
        while not self._ended.is_set() and one.is_starting():
            pass
        if self._ended.is_set():
            raise _NotStartedError(ExitCode.OK)
        try:
            text: str = one.told.recv()
        except EOFError:
            one.process.join()
            code = one.process.exitcode or ExitCode.FAILED
            if code < 0:
                _log.error("a process was ended by signal %d before it was ready", -code)
                code = ExitCode.FAILED
            raise _NotStartedError(code) from None
        one.is_ready = True
        return text

    def _keep_alive(self) -> None:
        """Starts anew what ends; ever later, where it ends before it was ready."""
        seconds, due = 0.0, 0.0
        while not self._ended.wait(0.2):
            for one in list(self._running):
                if one.process.is_alive():
                    one.is_ready = one.is_ready or one.told.poll()
                    continue
                self._running.remove(one)
                self.forget(one.process.pid or 0)
                seconds = 0.0 if one.is_ready else min(2 * seconds + 1, LONGEST_WAIT_SECONDS)
                due = time.monotonic() + seconds
                _log.error(
                    "a process ended with code %s: another one is started in %.0f s",
                    one.process.exitcode, seconds,
                )  # fmt: skip
            if len(self._running) < self.count and time.monotonic() >= due:
                self._start()

    def _end_all(self) -> None:
        self.end()
        for process in [one.process for one in self._running]:
            process.terminate()
        end = time.monotonic() + STOP_SECONDS
        for process in [one.process for one in self._running]:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run(work: Work, ready: Connection, parent: int) -> None:
    """Runs in a process: it ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the first one tells us.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def tell(text: str) -> None:
        ready.send(text)

    raise SystemExit(work(tell))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
