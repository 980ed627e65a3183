"""CRC-32C against RFC 3720's vectors, a bitwise implementation, and every code path."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.tfrecord.codec import crc32c as crc32c_module
from etl.tfrecord.codec import kernels
from etl.tfrecord.codec.crc32c import crc32c


def bitwise_crc(data: bytes, before: int = 0) -> int:
    crc = before ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_matches_rfc_3720_vectors(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@given(st.binary(max_size=300), st.integers(0, 300))
@settings(deadline=None)
def test_streaming_equals_one_piece(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data) == bitwise_crc(data)


_X86 = {"sse4.2": True, "pclmul": True}
HOSTS = [
    ("x86_64-unknown-linux-gnu", {}, 0),
    ("x86_64-unknown-linux-gnu", {"sse4.2": True}, 0),
    ("x86_64-unknown-linux-gnu", _X86, 16),
    ("x86_64-unknown-linux-gnu", {**_X86, "avx512f": True, "vpclmulqdq": True}, 64),
    ("aarch64-unknown-linux-gnu", {"crc": True, "aes": True}, 16),
    ("riscv64-unknown-linux-gnu", {}, 0),
]


@pytest.mark.parametrize(("triple", "features", "block"), HOSTS)
def test_every_way_that_this_cpu_can_go_gives_the_same(monkeypatch, triple, features, block):
    assert crc32c_module.select_crc(triple, features)[-1] == block
    _, of_host = kernels.HOST
    if ("x86_64" not in triple and features) or not all(of_host.get(name) for name in features):
        pytest.skip("the CPU has no such instruction")
    monkeypatch.setattr(kernels, "HOST", (triple, features))
    spec = importlib.util.spec_from_file_location("crc32c_elsewhere", crc32c_module.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    for size in (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 1030, 4999):
        assert module.crc32c(data[1 : 1 + size], 7) == bitwise_crc(data[1 : 1 + size].tobytes(), 7)
