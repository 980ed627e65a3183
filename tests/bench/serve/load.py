"""A server in a process of its own, and a client that keeps connections busy and times answers.

The client is a process too, so that neither takes the other's interpreter; where there are two
cores, the server has one and the client another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.bench.clock import REPOSITORY, run_driver_process

_PORT = re.compile(r"http://[^,\s]+:(\d+)")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)

Request = tuple[str, str, Any]
"""Verb, path, and what is sent: text as it is, anything else as JSON."""


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        process: Its process.
        port: Where it listens.
    """

    process: psutil.Process
    port: int

    def read_mib(self) -> float:
        """Resident memory of the server."""
        return float(self.process.memory_info().rss) / 2**20

    def read_cpu_s(self) -> float:
        """Processor seconds of the server so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


def take_core(number: int) -> None:
    """Keeps this process to one core, where the machine has more."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


@contextmanager
def serve(models: Path, *options: str) -> Iterator[Served]:
    """Runs `sluice serve` on one core until the block ends."""
    command = [sys.executable, "-m", "jobs.cli", "serve", "--export", str(models), "--port", "0"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=REPOSITORY, preexec_fn=lambda: take_core(0),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if (found := _PORT.search(line)) is None:
            raise RuntimeError(f"the server did not start: exit code {process.wait()}")
        yield Served(psutil.Process(process.pid), int(found[1]))
    finally:
        process.terminate()
        process.wait()


def ask(
    served: Served,
    requests: Sequence[Request],
    connections: int,
    *,
    seconds: float = 0.0,
    count: int = 0,
) -> dict[str, Any]:
    """Sends requests over and over, on several connections at once.

    Args:
        served: The server.
        requests: Sent in turn.
        connections: How many there are; each waits for its answer.
        seconds: How long; 0: until `count`.
        count: How many requests at most; 0: no limit.

    Returns:
        `p50`, `p95`, `p99`, `max` in milliseconds, `per_s`, `count` and `codes` by status.
    """  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(requests), file)
        file.flush()
        return run_job(
            {
                "what": "load",
                "port": served.port,
                "requests": file.name,
                "connections": connections,
                "seconds": seconds,
                "count": count,
            }
        )


def ask_by_wrk(
    served: Served, request: Request, connections: int, seconds: int
) -> dict[str, Any] | None:
    """Sends one request over and over by `wrk`, a load tool in C; None: it is not installed.

    Args:
        served: The server.
        request: Sent each time.
        connections: How many there are; each waits for its answer.
        seconds: How long.

    Returns:
        `p50` and `p99` in milliseconds, `per_s`, and `failed`: answers that are not 200.
    """
    if (command := shutil.which("wrk")) is None:
        return None
    verb, path, content = request
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(f"wrk.method = {json.dumps(verb)}\nwrk.body = [==[{json.dumps(content)}]==]\n")
        script.flush()
        done = subprocess.run(
            [command, "--threads", "1", "--connections", str(connections), "--latency",
             "--duration", f"{seconds}s", "--timeout", "30s", "--script", script.name,
             f"http://localhost:{served.port}{path}"],
            capture_output=True, text=True, check=True, preexec_fn=lambda: take_core(1),
        )  # fmt: skip
    return _read_wrk(done.stdout)


_WRK_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def _read_wrk(text: str) -> dict[str, Any]:
    found = {
        f"p{percent}": float(value) * _WRK_MS[unit]
        for percent, value, unit in re.findall(r"^\s*(50|99)%\s+([\d.]+)(us|ms|s)$", text, re.M)
    }
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    per_s = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert per_s is not None, text
    return {**found, "per_s": float(per_s[1]), "failed": int(failed[1]) if failed else 0}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Does a job in a process of its own.

    Raises:
        RuntimeError: It failed.
    """
    done = run_driver_process("tests.bench.serve", job)
    if done.returncode:
        raise RuntimeError(done.errors[-2000:])
    return done.value


def drive(job: dict[str, Any]) -> dict[str, Any]:
    """Does the job of `ask`; in a process of its own."""
    take_core(1)
    requests = json.loads(Path(job["requests"]).read_text(encoding="utf-8"))
    messages = [_build_message(*request) for request in requests]
    times: list[float] = []
    codes: Counter[str] = Counter()
    start = time.perf_counter()
    stop = start + (job["seconds"] or 1e9)
    asyncio.run(_keep_busy(job, messages, stop, times, codes))
    return {**summarize(times), "per_s": len(times) / (time.perf_counter() - start),
            "count": len(times), "codes": dict(codes)}  # fmt: skip


def summarize(seconds: Sequence[float]) -> dict[str, float]:
    """Returns percentiles of times, and the longest, in milliseconds."""
    found = np.percentile(np.asarray(seconds) * 1e3, (50, 95, 99, 100))
    return dict(zip(("p50", "p95", "p99", "max"), map(float, found), strict=True))


def _build_message(verb: str, path: str, content: Any) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    body = b"" if content is None else text.encode("utf-8", "replace")
    head = f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _keep_busy(
    job: dict[str, Any], messages: list[bytes], stop: float, times: list[float],
    codes: Counter[str],
) -> None:  # fmt: skip
    left = itertools.count()

    async def work(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", job["port"])
        turn = itertools.islice(itertools.cycle(messages), first, None)
        for message in turn:
            if time.perf_counter() >= stop or (job["count"] and next(left) >= job["count"]):
                break
            start = time.perf_counter()
            writer.write(message)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                found = _LENGTH.search(head)
                await reader.readexactly(int(found[1]) if found else 0)
                code = head[9:12].decode()
            except (ConnectionError, asyncio.IncompleteReadError):
                head, code = b"", "lost"
            times.append(time.perf_counter() - start)
            codes[code] += 1
            # After 413 the server reads nothing more.
            if code in ("lost", "413") or b"connection: close" in head.lower():
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", job["port"])
        writer.close()

    each = max(1, len(messages) // job["connections"])
    await asyncio.gather(*(work(n * each) for n in range(job["connections"])))
