"""Raw memory access stays inside its ranges, and the kernel cache follows the sources."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from etl.tfrecord import kernels


@njit
def run_copy(target: int, source: int, length: int) -> None:
    kernels.copy_bytes(target, source, length)


@njit
def run_same(left: int, right: int, length: int) -> bool:
    return kernels.same_bytes(left, right, length)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17, 64])
def test_copy_touches_its_range_alone(length: int) -> None:
    source = np.arange(1, 101, dtype=np.uint8)
    target = np.zeros(100, np.uint8)
    run_copy(target.ctypes.data + 3, source.ctypes.data + 5, length)
    assert target[3 : 3 + length].tolist() == source[5 : 5 + length].tolist()
    assert not target[:3].any()
    assert not target[3 + length :].any()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17])
def test_same_bytes_sees_each_difference_and_nothing_beyond(length: int) -> None:
    left = np.arange(40, dtype=np.uint8)
    for changed in range(length + 1):
        right = left.copy()
        right[changed] ^= 1
        assert run_same(left.ctypes.data, right.ctypes.data, length) == (changed >= length)


def test_digest_follows_compiled_sources_alone(tmp_path: Path) -> None:
    def digest() -> str:
        kernels.digest_kernels.cache_clear()
        return kernels.digest_kernels(tmp_path)

    (tmp_path / "inner.py").write_text("from etl.tfrecord.kernels import inlined\n")
    (tmp_path / "plain.py").write_text("x = 1\n")
    before = digest()
    (tmp_path / "plain.py").write_text("x = 2\n")
    assert digest() == before
    (tmp_path / "inner.py").write_text("from etl.tfrecord.kernels import inlined  # changed\n")
    assert digest() != before


def test_a_change_in_an_inlined_module_recompiles_its_callers(tmp_path: Path) -> None:
    """Stock numba would run the stale code of `inner` out of the cache of `outer`."""
    inner, results = tmp_path / "inner.py", []
    (tmp_path / "outer.py").write_text(
        "from inner import step\nfrom etl.tfrecord.kernels import kernel\n"
        "@kernel\ndef run(x):\n    return step(x)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(kernels.__file__).parents[2])])
    for amount in (1, 2, 2):
        inner.write_text(
            "from etl.tfrecord.kernels import inlined\n"
            f"@inlined\ndef step(x):\n    return x + {amount}\n"
        )
        program = "from outer import run\nprint(run(40), sum(run.stats.cache_hits.values()))"
        done = subprocess.run(
            [sys.executable, "-B", "-c", program], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )  # fmt: skip
        results.append(done.stdout.split())
    assert results == [["41", "0"], ["42", "0"], ["42", "1"]]


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
