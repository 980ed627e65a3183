"""Packed varints against protobuf's own encoder, in blocks and byte by byte."""

from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from etl.tfrecord import packed
from etl.tfrecord.varint import FAILED

_VALUES = st.integers(0, 2**64 - 1) | st.integers(0, 63).map(lambda bits: 1 << bits)
_SPARES = (0, 71, 72, 200)  # bytes that may be read past the list: blocks want 72 of them


@njit
def count(address: int, end: int) -> int:
    return packed.count_packed(address, end)


@njit
def read(address: int, end: int, limit: int, target: int) -> int:
    return packed.read_packed(address, end, limit, target)


@njit
def write(is_wide: bool, values: int, first: int, last: int, address: int) -> int:
    return packed.write_packed(is_wide, values, first, last, address)


@njit
def read_by_words(address: int, end: int, limit: int, target: int) -> int:
    return packed.read_words(address, end, target)


@njit
def write_by_words(is_wide: bool, values: int, first: int, last: int, address: int) -> int:
    return packed.write_words(is_wide, values, first, last, address)


@njit
def measure(is_wide: bool, address: int, first: int, last: int) -> int:
    return packed.packed_bytes(is_wide, address, first, last)


def run(data: bytes, spare: int, read: Callable[..., int] = read) -> tuple[int, list[int] | None]:
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


@given(st.lists(_VALUES, max_size=80), st.sampled_from(_SPARES))
@settings(max_examples=300, deadline=None)
def test_reading_matches_protobuf(values: list[int], spare: int) -> None:
    assert run(b"".join(map(_VarintBytes, values)), spare) == (len(values), values)


@given(st.lists(_VALUES | st.integers(0, 2**21), max_size=80))
@settings(max_examples=300, deadline=None)
def test_lanes_and_words_read_and_write_what_protobuf_does(values: list[int]) -> None:
    expected = b"".join(map(_VarintBytes, values))
    array = np.array([7, *values, 7], np.uint64)
    for store in (write, write_by_words):
        out = np.full(len(expected) + 8, 0xEE, np.uint8)
        assert int(
            store(True, array.ctypes.data, 1, 1 + len(values), out.ctypes.data)
        ) - out.ctypes.data == len(expected)
        assert out[: len(expected)].tobytes() == expected
        assert out[-1] == 0xEE
    for load in (read, read_by_words):
        assert run(expected, 72, load) == (len(values), values)


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


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | _VALUES.map(lambda v: v >> 1), max_size=40))
@settings(deadline=None)
def test_sizes_match_protobuf(values: list[int]) -> None:
    array = np.array([0, *values, 0], np.int64)
    sizes = [len(_VarintBytes(value % 2**64)) for value in values]
    assert measure(True, array.ctypes.data, 1, 1 + len(values)) == sum(sizes)


@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(-(2**31), 300), max_size=40))
@settings(deadline=None)
def test_int32_are_written_as_the_int64_they_equal(values: list[int]) -> None:
    expected = b"".join(_VarintBytes(value % 2**64) for value in values)
    array = np.array([7, *values, 7], np.int32)
    place = (False, array.ctypes.data, 1, 1 + len(values))
    assert measure(*place) == len(expected)
    for store in (write, write_by_words):
        out = np.full(len(expected) + 8, 0xEE, np.uint8)
        assert int(store(*place, out.ctypes.data)) - out.ctypes.data == len(expected)
        assert out[: len(expected)].tobytes() == expected
        assert out[-1] == 0xEE


def test_aarch64_compiles_the_vector_code() -> None:
    """What the intrinsics here emit is valid for LLVM's AArch64 back end."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this llvmlite was built without AArch64")
    module = llvm.parse_assembly(
        "define i64 @ends(ptr %p) {\n"
        "  %v = load <64 x i8>, ptr %p, align 1\n"
        "  %e = icmp sge <64 x i8> %v, zeroinitializer\n"
        "  %m = bitcast <64 x i1> %e to i64\n"
        "  ret i64 %m\n}\n"
        "declare <8 x i64> @llvm.ctlz.v8i64(<8 x i64>, i1)\n"
        "declare i64 @llvm.vector.reduce.add.v8i64(<8 x i64>)\n"
        "define i64 @bytes(ptr %p) {\n"
        "  %v = load <8 x i64>, ptr %p, align 1\n"
        "  %z = call <8 x i64> @llvm.ctlz.v8i64(<8 x i64> %v, i1 true)\n"
        "  %s = call i64 @llvm.vector.reduce.add.v8i64(<8 x i64> %z)\n"
        "  ret i64 %s\n}\n"
    )
    assembly = target.create_target_machine(features="+neon").emit_assembly(module)
    assert "cmge" in assembly
    assert "addp" in assembly
