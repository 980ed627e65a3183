"""Folding is for CPUs that have it, and gives the same checksum."""

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import njit

from etl.tfrecord import crc32c_fold
from etl.tfrecord.crc32c import select_advance
from etl.tfrecord.kernels import load_u64

_ALL = {"avx512f": True, "vpclmulqdq": True, "sse4.2": True}
_, _advance = select_advance(llvm.get_process_triple(), dict(llvm.get_host_cpu_features()))


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", _ALL, True),
        ("x86_64-unknown-linux-gnu", {**_ALL, "vpclmulqdq": False}, False),
        ("x86_64-unknown-linux-gnu", {"sse4.2": True}, False),
        ("aarch64-unknown-linux-gnu", _ALL, False),
    ],
)
def test_the_cpu_decides(triple: str, features: dict, expected: bool) -> None:
    _, least = crc32c_fold.select_fold(triple, features)
    assert (least < 1 << 40) == expected


@pytest.mark.skipif(crc32c_fold.MIN_FOLDED_BYTES > 1 << 40, reason="the CPU does not fold")
@pytest.mark.parametrize("register", [0, 1, 0xFFFFFFFF, 0x8A9136AA])
def test_folding_gives_what_word_by_word_does(register: int) -> None:
    fold = crc32c_fold.fold_blocks

    @njit
    def by_folding(register, address, blocks):
        return fold(np.uint32(register), address, blocks)

    @njit
    def by_words(register, address, blocks):
        register = np.uint32(register)
        for i in range(8 * blocks):
            register = _advance(register, load_u64(address + 8 * i))
        return register

    data = np.random.default_rng(0).integers(0, 256, 64 * 40 + 3, dtype=np.uint8)
    for blocks in range(4, 41):
        place = (register, data.ctypes.data + 3, blocks)
        assert by_folding(*place) == by_words(*place), blocks
