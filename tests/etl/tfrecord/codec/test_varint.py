"""The groups of varints, by instruction and by shifts, against plain integers."""

import importlib.util
from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from etl.tfrecord.codec import kernels, varint
from etl.tfrecord.codec.varint import FAILED, select_groups
from tests.machine import examples

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


@njit
def write(address: int, value: np.uint64) -> int:
    return varint.store_varint(address, value)


@njit
def write_exact(address: int, value: int) -> int:
    return varint.store_exact_varint(address, value)


@njit
def read(address: int, end: int) -> tuple:
    return varint.read_varint(address, end)


@given(st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bits: 1 << bits))
@settings(max_examples=examples(300), deadline=None)
def test_store_and_read_match_protobuf(value: int) -> None:
    expected = _VarintBytes(value)
    out = np.zeros(24, np.uint8)
    base = out.ctypes.data
    assert write(base, np.uint64(value)) - base == len(expected)
    assert out[: len(expected)].tobytes() == expected
    found, stop = read(base, base + len(expected))
    assert int(found) == value
    assert stop - base == len(expected)


_VALUES = st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bits: 1 << bits)
_SPARES = (0, 71, 72, 200)  # bytes that may be read past the list: blocks want 72 of them


@njit
def count(address: int, end: int) -> int:
    return varint.count_packed(address, end)


@njit
def packed_read(address: int, end: int, limit: int, target: int) -> int:
    return varint.read_packed(address, end, limit, target)


@njit
def packed_write(is_wide: bool, values: int, first: int, last: int, address: int) -> int:
    return varint.write_packed(is_wide, values, first, last, address)


@njit
def read_by_words(address: int, end: int, limit: int, target: int) -> int:
    return varint.read_words(address, end, target)


@njit
def write_by_words(is_wide: bool, values: int, first: int, last: int, address: int) -> int:
    return varint.write_words(is_wide, values, first, last, address)


@njit
def measure(is_wide: bool, address: int, first: int, last: int) -> int:
    return varint.packed_bytes(is_wide, address, first, last)


def run(
    data: bytes, spare: int, read: Callable[..., int] = packed_read
) -> tuple[int, list[int] | None]:
    """Number of varints, and their values or None."""
    buffer = np.frombuffer(b"\x80\x01" + data + b"\x85" * spare, np.uint8)
    start = buffer.ctypes.data + 2
    found = int(count(start, start + len(data)))
    target = np.full(len(data) + 1, 0xEE, np.uint64)
    base = target.ctypes.data
    stop = int(read(start, start + len(data), start + len(data) + spare, base))
    if stop == FAILED:
        return found, None
    values = (stop - base) // 8
    assert target[values:].tolist() == [0xEE] * (len(data) + 1 - values)
    return found, target[:values].tolist()


@given(st.lists(_VALUES | st.integers(0, 2**21), max_size=80), st.sampled_from(_SPARES))
@settings(max_examples=examples(300), deadline=None)
def test_lanes_and_words_read_and_write_what_protobuf_does(values: list[int], spare: int) -> None:
    expected = b"".join(map(_VarintBytes, values))
    array = np.array([7, *values, 7], np.uint64)
    assert measure(True, array.ctypes.data, 1, 1 + len(values)) == len(expected)
    for store in (packed_write, write_by_words):
        out = np.full(len(expected) + 8, 0xEE, np.uint8)
        assert int(
            store(True, array.ctypes.data, 1, 1 + len(values), out.ctypes.data)
        ) - out.ctypes.data == len(expected)
        assert out[: len(expected)].tobytes() == expected
        assert out[-1] == 0xEE
    for load in (packed_read, read_by_words):
        assert run(expected, 72, load) == (len(values), values)
    assert run(expected, spare) == (len(values), values)


@pytest.mark.parametrize("spare", _SPARES)
@pytest.mark.parametrize("before", range(60, 68))  # the odd one lies across the end of a block
def test_padded_varints_keep_their_values(before: int, spare: int) -> None:
    padded = b"\x83\x80\x80\x80\x80\x80\x80\x80\x80\x00"
    assert run(bytes(before) + padded + b"\x07", spare) == (before + 2, [0] * before + [3, 7])


@pytest.mark.parametrize("spare", _SPARES)
@pytest.mark.parametrize("before", [0, 3, 60, 64])
@pytest.mark.parametrize("bad", [b"\x80", b"\xff" * 10 + b"\x01", b"\x80" * 70 + b"\x01"])
def test_cut_and_overlong_varints_are_refused(bad: bytes, before: int, spare: int) -> None:
    found, values = run(b"\x01" * before + bad, spare)
    assert values is None
    assert found == (FAILED if bad[-1] >= 0x80 else before + 1)


@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(-(2**31), 300), max_size=40))
@settings(deadline=None)
def test_int32_are_written_as_the_int64_they_equal(values: list[int]) -> None:
    expected = b"".join(_VarintBytes(value % 2**64) for value in values)
    array = np.array([7, *values, 7], np.int32)
    place = (False, array.ctypes.data, 1, 1 + len(values))
    assert measure(*place) == len(expected)
    for store in (packed_write, write_by_words):
        out = np.full(len(expected) + 8, 0xEE, np.uint8)
        assert int(store(*place, out.ctypes.data)) - out.ctypes.data == len(expected)
        assert out[: len(expected)].tobytes() == expected
        assert out[-1] == 0xEE


_ALL = dict.fromkeys(("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "bmi2"), True)
_NONE = varint.select_lanes("riscv64-unknown-linux-gnu", {})
_PACKED_LANES_VALUES = [
    *(0, 1, 127, 128, 2**14, 2**21 - 1, 2**55, 2**56 - 1, 2**56, 2**64 - 1), *range(90)
]  # fmt: skip


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", _ALL, True),
        ("x86_64-unknown-linux-gnu", {**_ALL, "avx512vbmi2": False}, False),
        ("x86_64-unknown-linux-gnu", {"bmi2": True, "avx2": True}, False),
        ("aarch64-unknown-linux-gnu", _ALL, False),
    ],
)
def test_packed_lanes_the_cpu_decides(triple: str, features: dict, expected: bool) -> None:
    found = varint.select_lanes(triple, features)
    assert found[0] == expected
    assert (found[1:] != _NONE[1:]) == expected


def test_a_cpu_without_lanes_reads_and_writes_the_same(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "HOST", ("riscv64-unknown-linux-gnu", {}))
    spec = importlib.util.spec_from_file_location("packed_without_lanes", varint.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    read, write = module.read_packed, module.write_packed

    @njit
    def copy(values, count, middle, target):
        end = write(True, values, 0, count, middle)
        return end - middle, read(middle, end, end + 80, target) - target

    values = np.array(_PACKED_LANES_VALUES, np.uint64)
    middle, target = np.zeros(1000, np.uint8), np.zeros(len(values), np.uint64)
    addresses = (middle.ctypes.data, target.ctypes.data)
    sizes = copy(values.ctypes.data, len(values), *addresses)
    expected = b"".join(map(_VarintBytes, _PACKED_LANES_VALUES))
    assert tuple(map(int, sizes)) == (len(expected), values.nbytes)
    assert middle[: len(expected)].tobytes() == expected
    assert target.tolist() == _PACKED_LANES_VALUES
