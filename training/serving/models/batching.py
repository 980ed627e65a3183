"""Micro-batching: requests that wait for a signature are answered by one call.

Nothing is held back: a request that finds a free thread is called at once. What arrives while all
threads are busy is joined to one batch, so batches grow with the load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from conf.artefacts.export import TOP_K
from training.index.vector_index import use_one_thread
from training.serving.models.served_version import ServedVersion
from training.serving.requests.errors import UNAVAILABLE, RequestError
from training.serving.requests.limits import (
    EXAMPLE_BYTES,
    WAITING_VALUES,
    Budget,
    CallLimits,
    Cost,
    RequestLimits,
    SignatureCost,
    check_count,
)
from training.serving.requests.tensors import Arrays, count_lists

ResultT = TypeVar("ResultT")

ALONE = (TOP_K,)
"""Signatures whose rows depend on each other."""


AT_ONCE_BYTES = 1 << 14
"""Inputs and answers up to this size are built on the event loop: a thread would take longer."""


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its answer."""

    inputs: Arrays
    cost: Cost
    answer: asyncio.Future[Arrays]


class Builder:
    """Builds inputs and answers: small ones at once, long ones beside the event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "builder")

    async def run(self, size: int, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Returns what a function gives whose work grows with a number of bytes."""
        if size <= AT_ONCE_BYTES:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Batcher:
    """Calls signatures for requests of one event loop.

    Args:
        calls: What is called at a time, and what may wait.
        request: What one request may ask for.
        on_batch: Told the rows of each call.
        builder: Looks at long inputs.
    """

    def __init__(
        self,
        calls: CallLimits,
        request: RequestLimits,
        on_batch: Callable[[int], None],
        builder: Builder,
    ) -> None:
        self._calls, self._request, self._on_batch = calls, request, on_batch
        self._builder = builder
        self._pool = ThreadPoolExecutor(calls.threads, "model", use_one_thread)
        self._queues: dict[Hashable, deque[_Waiting]] = {}
        self._running: dict[Hashable, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = Budget(WAITING_VALUES * request.values, "values of inputs")
        self.waiting = 0

    @property
    def most_candidates(self) -> int:
        """Candidates of one request at most."""
        return self._request.pairs

    @property
    def most_values(self) -> int:
        """Values of one request at most."""
        return self._request.values

    async def call(self, version: ServedVersion, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature for the rows of a request.

        Raises:
            RequestError: The model refuses the inputs, they are more than a request may have, or
                too many requests wait.
        """
        version.find_specs(signature)
        if self.waiting >= self._calls.waiting:
            raise RequestError("too many requests are waiting; try again later", UNAVAILABLE)
        self.waiting += 1
        held = 0
        try:
            cost = await self._measure(version, signature, inputs)
            self._held.take(cost.values)
            held = cost.values
            return await self._enqueue(version, signature, inputs, cost)
        finally:
            self.waiting -= 1
            self._held.give_back(held)

    async def _measure(self, version: ServedVersion, signature: str, inputs: Arrays) -> Cost:
        """Returns what a call takes; texts and Examples that are many are looked at beside the
        event loop."""
        limit = version.find_cost(signature)
        size = sum(value.nbytes for value in inputs.values() if value.dtype == object)
        cost = await self._builder.run(size, limit.measure, inputs, self._request)
        for name in limit.examples:
            size = cost.values * EXAMPLE_BYTES
            lists = cost.width * EXAMPLE_BYTES  # Of a few bytes each one may be a value.
            if size > AT_ONCE_BYTES:
                holds = version.find_inputs(signature)[name]["holds"]
                lists = await self._builder.run(size, count_lists, inputs[name], holds)
            what = "values of lists in Examples, padded to the longest"
            check_count(what, cost.rows * lists, self._request.values)
            cost = replace(cost, width=max(cost.width, lists))
        return cost

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Returns what a function gives on one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *args)

    async def _enqueue(
        self, version: ServedVersion, signature: str, inputs: Arrays, cost: Cost
    ) -> Arrays:
        loop = asyncio.get_running_loop()
        shapes = tuple((name, value.shape[1:]) for name, value in inputs.items())
        can_join = signature not in ALONE and cost.rows > 0
        can_join = can_join and all(len(value) == cost.rows for value in inputs.values())
        key: Hashable = (version, signature, shapes) if can_join else object()
        one = _Waiting(inputs, cost, loop.create_future())
        queue = self._queues.setdefault(key, deque())
        queue.append(one)
        if self._running.get(key, 0) < self._calls.threads:
            self._running[key] = self._running.get(key, 0) + 1
            task = loop.create_task(self._drain(key, version, signature))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await one.answer
        except asyncio.CancelledError:  # It waits no longer: its inputs are let go at once.
            with suppress(ValueError):
                queue.remove(one)
            raise

    async def _drain(self, key: Hashable, version: ServedVersion, signature: str) -> None:
        queue = self._queues[key]
        while queue:
            await self._answer(version, signature, self._take(version.find_cost(signature), queue))
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key], self._queues[key]

    def _take(self, limit: SignatureCost, queue: deque[_Waiting]) -> list[_Waiting]:
        """Takes what one call answers: the first that waits, and what can share the call."""
        batch = [queue.popleft()]
        cost = batch[0].cost
        while queue and limit.can_share(joined := cost.join(queue[0].cost), self._request):
            batch.append(queue.popleft())
            cost = joined
        return batch

    async def _answer(self, version: ServedVersion, signature: str, batch: list[_Waiting]) -> None:
        try:
            outputs = await self.run(self._call, version, signature, batch)
        except Exception as error:
            if len(batch) > 1:  # One of them is at fault, the others are not.
                for one in batch:
                    await self._answer(version, signature, [one])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        if outputs is None:
            return
        start = 0
        for one in batch:
            part = slice(start, start + one.cost.rows) if len(batch) > 1 else slice(None)
            start += one.cost.rows
            if not one.answer.done():
                one.answer.set_result({name: value[part] for name, value in outputs.items()})

    def _call(self, version: ServedVersion, signature: str, batch: list[_Waiting]) -> Arrays | None:
        """Calls a signature for a batch; None: nobody waits for it any longer."""
        if all(one.answer.done() for one in batch):
            return None
        self._on_batch(sum(one.cost.rows for one in batch))
        return version.call(signature, _join([one.inputs for one in batch]))

    def close(self) -> None:
        """Waits for calls that are running, and ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _join(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
