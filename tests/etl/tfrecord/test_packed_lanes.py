"""Lanes are for CPUs that have them; without them the codec does the same value by value."""

import importlib.util

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from numba import njit

from etl.tfrecord import packed, packed_lanes

_ALL = dict.fromkeys(("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "bmi2"), True)
_NONE = packed_lanes.select_lanes("riscv64-unknown-linux-gnu", {})
_VALUES = [0, 1, 127, 128, 2**14, 2**21 - 1, 2**55, 2**56 - 1, 2**56, 2**64 - 1, *range(90)]


@pytest.mark.parametrize(
    ("triple", "features", "expected"),
    [
        ("x86_64-unknown-linux-gnu", _ALL, True),
        ("x86_64-unknown-linux-gnu", {**_ALL, "avx512vbmi2": False}, False),
        ("x86_64-unknown-linux-gnu", {"bmi2": True, "avx2": True}, False),
        ("aarch64-unknown-linux-gnu", _ALL, False),
    ],
)
def test_the_cpu_decides(triple: str, features: dict, expected: bool) -> None:
    found = packed_lanes.select_lanes(triple, features)
    assert found[0] == expected
    assert (found[1:] != _NONE[1:]) == expected


def test_a_cpu_without_lanes_reads_and_writes_the_same(monkeypatch) -> None:
    names = ("HAS_LANES", "pack_lanes", "pack_int32_lanes", "drop_lanes", "unpack_lanes")
    for name, value in zip(names, _NONE, strict=True):
        monkeypatch.setattr(packed_lanes, name, value)
    spec = importlib.util.spec_from_file_location("packed_without_lanes", packed.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    read, write = module.read_packed, module.write_packed

    @njit
    def copy(values, count, middle, target):
        end = write(True, values, 0, count, middle)
        return end - middle, read(middle, end, end + 80, target) - target

    values = np.array(_VALUES, np.uint64)
    middle, target = np.zeros(1000, np.uint8), np.zeros(len(values), np.uint64)
    addresses = (middle.ctypes.data, target.ctypes.data)
    sizes = copy(values.ctypes.data, len(values), *addresses)
    expected = b"".join(map(_VarintBytes, _VALUES))
    assert tuple(map(int, sizes)) == (len(expected), values.nbytes)
    assert middle[: len(expected)].tobytes() == expected
    assert target.tolist() == _VALUES
