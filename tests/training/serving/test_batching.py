"""Requests share calls, wait within limits, and change threads twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from training.serving.batching import AT_ONCE_BYTES, Batcher, Call, Steps
from training.serving.errors import RequestError
from training.serving.limits import CallLimits, Cost, RequestLimits, ServerLimits, SignatureCost


class Doubles:
    """A model that doubles numbers, and refuses negative ones; may be held up."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.called: list[tuple[int, ...]] = []
        self.threads: list[str] = []
        self.may_end = threading.Event()
        if not is_held:
            self.may_end.set()

    def apply(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.called.append(inputs["x"].shape)
        self.note()
        assert self.may_end.wait(60)
        if (inputs["x"] < 0).any():
            raise RequestError("negative")
        return {"y": inputs["x"] * 2}

    def note(self) -> None:
        self.threads.append(threading.current_thread().name.partition("_")[0])

    def ask(self, rows: np.ndarray, times: int = 1) -> Steps:
        """A request of a few calls, each of what the one before it gave."""
        for _ in range(times):
            self.note()
            cost = Cost(len(rows), rows.size, rows.shape[1])
            found = yield Call(self.apply, {"x": rows}, cost, SignatureCost(), rows.shape[1:])
            rows = found["y"]
        self.note()
        return repr(rows.tolist()).encode()


def run(work: Callable[[Batcher], Awaitable[Any]], waiting: int = 99) -> Any:
    async def main() -> Any:
        batcher = Batcher(ServerLimits(calls=CallLimits(1, waiting)), lambda _: None)
        try:
            return await work(batcher)
        finally:
            assert batcher.waiting == 0
            batcher.close()

    return asyncio.run(main())


async def wait_until(is_so: Callable[[], Any]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("size", "reader"), [(1, "MainThread"), (AT_ONCE_BYTES + 1, "model")])
def test_a_request_changes_threads_twice(size, reader) -> None:
    model = Doubles()
    asked = model.ask(np.ones((1, 2)), 2)
    assert run(lambda batcher: batcher.answer(size, asked)) == b"[[4.0, 4.0]]"
    assert model.threads == [reader, *["model"] * 4]


def test_those_that_wait_share_calls_and_one_at_fault_fails_alone() -> None:
    model = Doubles(is_held=True)
    rows = [np.full((count, 2), count) for count in (1, 1, 2, 3)]
    rows[2] = -rows[2]

    async def work(batcher: Batcher) -> list[Any]:
        first = asyncio.create_task(batcher.answer(1, model.ask(rows[0])))
        await wait_until(lambda: model.called)
        rest = [asyncio.create_task(batcher.answer(1, model.ask(one, 2))) for one in rows[1:]]
        await asyncio.sleep(0.05)
        model.may_end.set()
        return await asyncio.gather(first, *rest, return_exceptions=True)

    found = run(work)
    assert [str(one) for one in found[:2]] == ["b'[[2, 2]]'", "b'[[4, 4]]'"]
    assert (type(found[2]), str(found[2])) == (RequestError, "negative")
    assert found[3] == repr([[12, 12]] * 3).encode()
    # Together, each alone, and the two that go on together again.
    assert model.called == [(1, 2), (6, 2), (1, 2), (2, 2), (3, 2), (4, 2)]


def test_what_waits_too_long_is_never_called_and_a_full_queue_says_so() -> None:
    model = Doubles(is_held=True)

    async def work(batcher: Batcher) -> None:
        tasks = [asyncio.create_task(batcher.answer(1, model.ask(np.ones((1, 2 + n)))))
                 for n in range(3)]  # fmt: skip
        await wait_until(lambda: model.called)
        with pytest.raises(RequestError, match="too many requests") as caught:
            await batcher.answer(1, model.ask(np.ones((1, 2))))
        assert caught.value.status == 503
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        model.may_end.set()
        await asyncio.gather(tasks[0], tasks[2])

    run(work, waiting=3)
    assert model.called == [(1, 2), (1, 4)]


def test_what_all_that_wait_hold_has_a_limit() -> None:
    model, most = Doubles(is_held=True), RequestLimits.values

    async def work(batcher: Batcher) -> None:
        tasks = [asyncio.create_task(batcher.answer(1, model.ask(np.ones((1, most + n)))))
                 for n in range(20)]  # fmt: skip
        await wait_until(lambda: any(task.done() for task in tasks))
        model.may_end.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {one.status for one in found if isinstance(one, RequestError)} == {503}
        assert sum(isinstance(one, bytes) for one in found) == 15
        assert await batcher.answer(1, model.ask(np.ones((1, most))))

    run(work)
