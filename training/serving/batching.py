"""Micro-batching: requests that wait for the same call are answered by one.

A request is a generator: it yields the calls of models that it needs, is sent their outputs, and
returns its answer. A short one is read on the event loop up to its first call, a long one by a
thread; all the rest happens on the thread that takes the call: two hand-overs. Nothing is held
back: what arrives while all threads are busy is joined, so batches grow with the load.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from conf.artefacts.export import TOP_K
from training.index.vector_index import use_one_thread
from training.raw_inputs.requests import RawValueError
from training.serving.errors import UNAVAILABLE, RequestError, forget_frames
from training.serving.limits import WAITING_VALUES, Cost, RequestLimits, ServerLimits, SignatureCost
from training.serving.served_version import ServedVersion
from training.serving.tensors import Arrays, measure_inputs

AT_ONCE_BYTES = 1 << 14
"""Bodies up to this size are read on the event loop: a thread would take longer."""
Apply = Callable[[Arrays], Arrays]


@dataclass(frozen=True, eq=False)
class Call:
    """A call for the rows of a request; those of one key are joined within the limits of one."""

    apply: Apply
    inputs: Arrays
    cost: Cost
    limit: SignatureCost
    key: Hashable


Steps = Generator[Call, Arrays, bytes]


def plan_call(
    version: ServedVersion,
    signature: str,
    inputs: Arrays,
    limits: RequestLimits,
    apply: Apply | None = None,
) -> Call:
    """Plans a call of a signature, which may take so much; `apply` makes it, if not the version."""
    about = version.find_signature(signature)
    cost = measure_inputs(inputs, about, limits)
    are_rows = cost.rows > 0 and all(len(value) == cost.rows for value in inputs.values())
    shapes = tuple((name, value.shape[1:]) for name, value in inputs.items())
    # The rows of `top_k` depend on each other: the largest `k` counts.
    key = (version, signature, shapes) if are_rows and signature != TOP_K else object()
    return Call(apply or partial(version.call, signature), inputs, cost, about.cost, key)


@dataclass(eq=False)
class _Job:
    """A request on its way: what is left of it, the call that it waits for, and its values."""

    steps: Steps
    answer: asyncio.Future[bytes]
    call: Call = field(init=False)
    held: int = 0

    def go_on(self, outputs: Arrays | None = None) -> Call | bytes | Exception:
        """Returns what comes next: a call, the answer, or why there is none."""
        try:
            self.call = self.steps.send(outputs)  # type: ignore[arg-type]
            return self.call
        except StopIteration as end:
            answer: bytes = end.value
            return answer
        except RawValueError as error:
            return RequestError(str(error))
        except Exception as error:
            return error

    def end(self, found: bytes | Exception) -> None:
        """Hands the answer to the event loop."""
        if isinstance(found, RequestError):
            forget_frames(found)  # They hold the request, and the future holds them.
        with suppress(RuntimeError):  # The loop has ended, and nobody waits.
            self.answer.get_loop().call_soon_threadsafe(self._settle, found)

    def _settle(self, found: bytes | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(found, Exception):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


class Batcher:
    """Answers requests by calls of models on threads; `on_batch` is told the rows of each."""

    def __init__(self, limits: ServerLimits, on_batch: Callable[[int], None]) -> None:
        self._limits, self._on_batch = limits, on_batch
        self._pool = ThreadPoolExecutor(limits.calls.threads, "model", use_one_thread)
        self._queues: dict[Hashable, deque[_Job]] = {}
        self._lock = threading.Lock()
        self._most_held = WAITING_VALUES * limits.request.values
        self.waiting = self._held = 0

    async def answer(self, size: int, steps: Steps) -> bytes:
        """Returns the answer to a request of some bytes."""
        if self.waiting >= self._limits.calls.waiting:
            raise RequestError("too many requests are waiting; try again later", UNAVAILABLE)
        job = _Job(steps, asyncio.get_running_loop().create_future())
        self.waiting += 1
        try:
            if size > AT_ONCE_BYTES:
                self._pool.submit(self._read_long, job)
            elif self._begin(job):
                self._pool.submit(self._work, job.call.key)
            return await job.answer
        finally:
            self.waiting -= 1
            self._forget(job)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_long(self, job: _Job) -> None:
        if self._begin(job):
            self._work(job.call.key)

    def _begin(self, job: _Job) -> bool:
        """Reads a request up to its first call; returns whether no other waits for such a call."""
        if job.answer.done():
            return False
        found = job.go_on()
        if not isinstance(found, Call):
            job.end(found)
            return False
        with self._lock:
            if self._held + found.cost.values <= self._most_held:
                job.held = found.cost.values
                self._held += job.held
                queue = self._queues.setdefault(found.key, deque())
                queue.append(job)
                return len(queue) == 1
        full = f"the server is full: requests hold {self._most_held} values; try again later"
        job.end(RequestError(full, UNAVAILABLE))
        return False

    def _forget(self, job: _Job) -> None:
        """Lets go what a request held; one that waits no longer leaves its queue."""
        with self._lock, suppress(KeyError, ValueError):
            self._held -= job.held
            if job.held and job.answer.cancelled():
                self._queues[job.call.key].remove(job)

    def _work(self, key: Hashable) -> None:
        """Answers as many as share a call, with all their further calls."""
        with self._lock:
            queue = self._queues.pop(key, None)
            going = self._take(queue) if queue else []
            if queue:
                self._queues[key] = queue
                self._pool.submit(self._work, key)
        going = self._run(going)
        while going:
            queues: dict[Hashable, deque[_Job]] = {}
            for job in going:
                queues.setdefault(job.call.key, deque()).append(job)
            going = []
            for queue in queues.values():
                while queue:
                    going += self._run(self._take(queue))

    def _take(self, queue: deque[_Job]) -> list[_Job]:
        """Takes the first that waits, and those behind it that can share its call."""
        batch = [queue.popleft()]
        limit, cost = batch[0].call.limit, batch[0].call.cost
        while queue:
            cost = cost.join(queue[0].call.cost)
            if not limit.can_share(cost, self._limits.request):
                break
            batch.append(queue.popleft())
        return batch

    def _run(self, batch: Sequence[_Job]) -> list[_Job]:
        """Makes the call of requests; returns those that have a further one."""
        going = []
        batch = [job for job in batch if not job.answer.done()]
        for job, outputs in zip(batch, self._call(batch) if batch else (), strict=True):
            found = outputs if isinstance(outputs, Exception) else job.go_on(outputs)
            if isinstance(found, Call):
                going.append(job)
            else:
                job.end(found)
        return going

    def _call(self, batch: Sequence[_Job]) -> list[Arrays | Exception]:
        """Returns the outputs of each request's rows, or what is wrong with them."""
        ends = np.cumsum([job.call.cost.rows for job in batch]).tolist()
        self._on_batch(ends[-1])
        try:
            outputs = batch[0].call.apply(_concatenate([job.call.inputs for job in batch]))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [found for job in batch for found in self._call([job])]  # One is at fault.
        if len(batch) == 1:
            return [outputs]
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return [{name: value[part] for name, value in outputs.items()} for part in parts]


def _concatenate(parts: Sequence[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
