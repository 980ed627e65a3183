"""Attacks that are no whole HTTP requests: silence, floods, heads and streams without an end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from tests.bench.serve.load import take_core

CONNECTIONS = 4
"""That attack at a time."""
SILENT = 600
"""Connections that say nothing; more than a server takes."""
TRAILER = (
    b"POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\nX: "
)
FLOOD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000


def drive_attack(job: dict[str, Any]) -> dict[str, int]:
    """Does the job of an attack; in a process of its own.

    Args:
        job: `kind` of `ATTACKS`, `port`, and `seconds` that it lasts.
    """
    take_core(1)
    return dict(ATTACKS[job["kind"]](job["port"], time.perf_counter() + job["seconds"]))


def _keep_silent(port: int, stop: float) -> Counter[str]:
    async def open_one() -> str:
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = await reader.read(12)  # Until it is refused, or closed.
        writer.close()
        if not head:
            return "closed"
        tenths = 1 + int((time.perf_counter() - start) * 10)
        return f"{head[9:].decode()} within {tenths / 10} s"

    async def run() -> Counter[str]:
        tasks = [asyncio.create_task(open_one()) for _ in range(SILENT)]
        await asyncio.wait(tasks, timeout=stop - time.perf_counter())
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return Counter(one if isinstance(one, str) else "open" for one in ended)

    return asyncio.run(run())


def _send_without_end(first: bytes, more: bytes, port: int, stop: float) -> Counter[str]:
    """Sends on and on, on several connections, and reads nothing until that ends."""

    def send_one(_: int) -> Counter[str]:
        codes: Counter[str] = Counter()
        while time.perf_counter() < stop:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as found:
                with suppress(OSError):  # It takes no more, or has closed.
                    found.sendall(first)
                    while time.perf_counter() < stop:
                        found.sendall(more)
                        codes["MB sent"] += len(more)
                codes[_read_code(found)] += 1
        return codes

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        codes = sum(pool.map(send_one, range(CONNECTIONS)), Counter[str]())
    codes["MB sent"] //= 1_000_000
    return codes


def _read_code(found: socket.socket) -> str:
    try:
        return found.recv(12)[9:].decode() or "closed"
    except OSError:
        return "reset"


ATTACKS: dict[str, Callable[[int, float], Counter[str]]] = {
    "silent": _keep_silent,
    "trailer": partial(_send_without_end, TRAILER, b"y" * 65536),
    "flood": partial(_send_without_end, b"", FLOOD),
}
