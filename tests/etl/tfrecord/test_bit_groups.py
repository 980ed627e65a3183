"""The groups of varints, by instruction and by shifts, against plain integers."""

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from etl.tfrecord.bit_groups import select_groups

_HOST = (
    llvm.get_process_triple(), dict(llvm.get_host_cpu_features()), llvm.get_host_cpu_name()
)  # fmt: skip
_by_shifts = select_groups("riscv64-unknown-linux-gnu", {}, "generic")
_gather_by_shifts, _spread_by_shifts = _by_shifts
_gather_on_host, _spread_on_host = select_groups(*_HOST)


@njit
def run_by_shifts(word):
    return _gather_by_shifts(word), _spread_by_shifts(word)


@njit
def run_on_host(word):
    return _gather_on_host(word), _spread_on_host(word)


@given(st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_groups_are_those_of_plain_integers(word: int) -> None:
    gathered = sum(((word >> 8 * k) & 0x7F) << 7 * k for k in range(8))
    spread = sum(((word >> 7 * k) & 0x7F) << 8 * k for k in range(8))
    for run in (run_by_shifts, run_on_host):
        assert [int(found) for found in run(np.uint64(word))] == [gathered, spread]


@pytest.mark.parametrize(
    ("triple", "features", "cpu", "by_instruction"),
    [
        ("x86_64-unknown-linux-gnu", {"bmi2": True}, "haswell", True),
        ("x86_64-unknown-linux-gnu", {"bmi2": True}, "znver1", False),  # there in microcode alone
        ("x86_64-unknown-linux-gnu", {"bmi2": False}, "nehalem", False),
        ("aarch64-unknown-linux-gnu", {}, "neoverse-n1", False),
    ],
)
def test_the_cpu_decides(triple: str, features: dict, cpu: str, by_instruction: bool) -> None:
    assert (select_groups(triple, features, cpu) != _by_shifts) == by_instruction
