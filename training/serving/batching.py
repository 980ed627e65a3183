"""Micro-batching: requests that wait for a signature are answered by one call.

Nothing is held back: a request that finds a free thread is called at once. What arrives while all
threads are busy is joined to one batch, so batches grow with the load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from training.serving.errors import UNAVAILABLE, RequestError
from training.serving.model_store import ServedVersion
from training.serving.tensors import Arrays
from training.serving.vector_index import use_one_thread

ResultT = TypeVar("ResultT")

ALONE = ("top_k",)
"""Signatures whose rows depend on each other."""


@dataclass(frozen=True)
class BatchLimits:
    """What one call and the queue may hold.

    Attributes:
        threads: Calls at the same time.
        rows: Rows of a call.
        waiting: Requests that may wait.
    """

    threads: int = 2
    rows: int = 1024
    waiting: int = 1024


@dataclass
class _Waiting:
    """A request that waits for its answer."""

    inputs: Arrays
    rows: int
    answer: asyncio.Future[Arrays]


class Batcher:
    """Calls signatures for requests of one event loop.

    Args:
        limits: What a call and the queue may hold.
        on_batch: Told the rows of each call.
    """

    def __init__(self, limits: BatchLimits, on_batch: Callable[[int], None]) -> None:
        self._limits, self._on_batch = limits, on_batch
        self._pool = ThreadPoolExecutor(limits.threads, "model", use_one_thread)
        self._queues: dict[Hashable, deque[_Waiting]] = {}
        self._running: dict[Hashable, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.waiting = 0

    async def call(self, version: ServedVersion, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature for the rows of a request.

        Raises:
            RequestError: The model refuses the inputs, they have too many rows, or too many
                requests wait.
        """
        version.find_specs(signature)
        rows = max((len(value) for value in inputs.values()), default=0)
        if rows > self._limits.rows:
            raise RequestError(f"a request may have {self._limits.rows} rows; received {rows}")
        if self.waiting >= self._limits.waiting:
            raise RequestError("too many requests are waiting; try again later", UNAVAILABLE)
        self.waiting += 1
        try:
            return await self._enqueue(version, signature, inputs, rows)
        finally:
            self.waiting -= 1

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Returns what a function gives on one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *args)

    async def _enqueue(
        self, version: ServedVersion, signature: str, inputs: Arrays, rows: int
    ) -> Arrays:
        loop = asyncio.get_running_loop()
        shapes = tuple((name, value.shape[1:]) for name, value in inputs.items())
        can_join = signature not in ALONE and rows > 0
        can_join = can_join and all(len(value) == rows for value in inputs.values())
        key: Hashable = (version, signature, shapes) if can_join else object()
        answer: asyncio.Future[Arrays] = loop.create_future()
        self._queues.setdefault(key, deque()).append(_Waiting(inputs, rows, answer))
        if self._running.get(key, 0) < self._limits.threads:
            self._running[key] = self._running.get(key, 0) + 1
            task = loop.create_task(self._drain(key, version, signature))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def _drain(self, key: Hashable, version: ServedVersion, signature: str) -> None:
        queue = self._queues[key]
        while queue:
            await self._answer(version, signature, self._take(queue))
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key], self._queues[key]

    def _take(self, queue: deque[_Waiting]) -> list[_Waiting]:
        batch, rows = [queue.popleft()], 0
        rows = batch[0].rows
        while queue and rows + queue[0].rows <= self._limits.rows:
            batch.append(queue.popleft())
            rows += batch[-1].rows
        return [one for one in batch if not one.answer.done()]

    async def _answer(self, version: ServedVersion, signature: str, batch: list[_Waiting]) -> None:
        if not batch:
            return
        self._on_batch(sum(one.rows for one in batch))
        inputs = _join([one.inputs for one in batch])
        try:
            outputs = await self.run(version.call, signature, inputs)
        except Exception as error:
            if len(batch) > 1:  # One of them is at fault, the others are not.
                for one in batch:
                    await self._answer(version, signature, [one])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        start = 0
        for one in batch:
            part = slice(start, start + one.rows) if len(batch) > 1 else slice(None)
            start += one.rows
            if not one.answer.done():
                one.answer.set_result({name: value[part] for name, value in outputs.items()})

    def close(self) -> None:
        """Waits for calls that are running, and ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _join(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
