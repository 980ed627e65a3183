"""Raw memory access stays inside its ranges, and trouble with the cache means compiling."""

from collections.abc import Callable

import numpy as np
import pytest
from numba import njit

from etl.tfrecord import kernels


@njit
def run_copy(target: int, source: int, length: int) -> None:
    kernels.copy_bytes(target, source, length)


@njit
def run_stream(target: int, source: int, length: int) -> None:
    kernels.stream_bytes(target, source, length)
    kernels.fence()


@njit
def run_same(left: int, right: int, length: int) -> bool:
    return kernels.same_bytes(left, right, length)


@pytest.mark.parametrize(
    "length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 90, 128, 200]
)
@pytest.mark.parametrize("copy", [run_copy, run_stream])
def test_copy_touches_its_range_alone(copy: Callable[..., None], length: int) -> None:
    source = np.arange(1, 301, dtype=np.uint8)
    target = np.zeros(300, np.uint8)
    for first in (3, 3 + 61):
        target[:] = 0
        copy(target.ctypes.data + first, source.ctypes.data + 5, length)
        assert target[first : first + length].tolist() == source[5 : 5 + length].tolist()
        assert not target[:first].any()
        assert not target[first + length :].any()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17])
def test_same_bytes_sees_each_difference_and_nothing_beyond(length: int) -> None:
    left = np.arange(40, dtype=np.uint8)
    for changed in range(length + 1):
        right = left.copy()
        right[changed] ^= 1
        assert run_same(left.ctypes.data, right.ctypes.data, length) == (changed >= length)


def test_unusable_cache_entries_mean_recompiling() -> None:
    @kernels.kernel
    def add_one(x):  # type: ignore[no-untyped-def]
        return x + 1

    class Broken:
        def load(self, key):  # type: ignore[no-untyped-def]
            raise EOFError

        def save(self, key, data):  # type: ignore[no-untyped-def]
            raise OSError("disk full")

    add_one._cache._cache_file = Broken()
    assert add_one(41) == 42
