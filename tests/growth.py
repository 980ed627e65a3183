"""How the work of a function grows with its input, told apart from what else the machine does."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any


def growth(prepare: Callable[[int], Callable[[], Any]], few: int, many: int) -> float:
    """Returns how many times the CPU time of this thread grows from `few` to `many`.

    The least of three runs counts, and no garbage is collected in between: what other tests have
    left behind is not this function's work.

    Args:
        prepare: Makes the work of a given size; its own time does not count.
        few: A size.
        many: A larger one.
    """
    seconds = [min(_seconds(prepare(size)) for _ in range(3)) for size in (few, many)]
    return seconds[1] / seconds[0]


def _seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        work()
        return time.thread_time() - start
    finally:
        gc.enable()
