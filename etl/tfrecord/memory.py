"""Memory for blocks of records and for decoded rows, used again when nobody holds it any more.

Fresh memory of this size comes from the system page by page, at a cost of the order of decoding.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

import numpy as np

ALIGNMENT = 64
"""TensorFlow takes over memory that is aligned so, and copies any other."""

_MOST_KEPT, _MOST_LARGE = 12, 2
_LARGE_BYTES = 64 << 20
_LEAST_SHARE = 0.5
_FREE: list[np.ndarray] = []
# A finalizer may run inside `_take`, in the same thread.
_LOCK = threading.RLock()


def allocate(shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, np.ndarray]:
    """Returns arrays of any content, aligned, in one piece of memory.

    The memory is kept for the next call when the last of the arrays, and of all views of them,
    has gone.

    Args:
        shapes: Shape and type of each.
    """
    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    padded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    owner = _take(sum(padded.values()) + ALIGNMENT)
    # Views of an array refer to what that array itself refers to: behind a memoryview, to it.
    memory = np.frombuffer(memoryview(owner), np.uint8)  # type: ignore[arg-type]
    weakref.finalize(memory, _give_back, owner).atexit = False
    start, arrays = -memory.ctypes.data % ALIGNMENT, {}
    for name, (shape, dtype) in shapes.items():
        arrays[name] = memory[start : start + sizes[name]].view(dtype).reshape(shape)
        start += padded[name]
    return arrays


def _take(size: int) -> np.ndarray:
    with _LOCK:
        for number, owner in enumerate(_FREE):
            if size <= owner.size and size >= _LEAST_SHARE * owner.size:
                return _FREE.pop(number)
    return np.empty(size, np.uint8)


def _give_back(owner: np.ndarray) -> None:
    with _LOCK:
        if owner.size >= _LARGE_BYTES:
            large = [number for number, kept in enumerate(_FREE) if kept.size >= _LARGE_BYTES]
            if len(large) >= _MOST_LARGE:
                del _FREE[large[0]]
        _FREE.append(owner)
        del _FREE[:-_MOST_KEPT]
