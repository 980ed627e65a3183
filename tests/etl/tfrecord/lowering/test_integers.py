"""Unsigned 64-bit integers to int64."""

from __future__ import annotations

import pyarrow as pa

from etl.tfrecord.lowering.integers import NarrowUnsigned

LARGEST = 2**63 - 1
VALUES = pa.array([7, 0, None, LARGEST, 2**63, 2**64 - 1], pa.uint64())


def test_what_fits_stays() -> None:
    narrowed, refusal = NarrowUnsigned("error").convert(VALUES.slice(1, 3))
    assert narrowed.type == pa.int64()
    assert (narrowed.to_pylist(), refusal) == ([0, None, LARGEST], None)


def test_what_does_not_is_refused_or_clipped() -> None:
    _, refusal = NarrowUnsigned("error").convert(VALUES)
    assert refusal is not None
    assert (refusal.index, refusal.received) == (4, str(2**63))
    clipped, refusal = NarrowUnsigned("clip").convert(VALUES)
    assert (clipped.to_pylist()[3:], refusal) == ([LARGEST] * 3, None)
