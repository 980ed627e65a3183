from __future__ import annotations

import math

import pyarrow as pa
import pytest

from conf.operations import Bucketize, Normalize
from etl.encoders.numbers import BucketizeEncoder, NormalizeEncoder

INF = math.inf


def test_a_boundary_belongs_to_the_interval_above_it():
    encoder = BucketizeEncoder(pa.float32(), Bucketize((0.0, 1.0)))
    values = pa.array([-INF, -0.1, 0.0, 0.5, 1.0, INF, None, math.nan], pa.float32())
    assert encoder.encode(values).to_pylist() == [2, 2, 3, 3, 4, 4, 1, 1]


def test_large_integers_are_compared_as_doubles():
    encoder = BucketizeEncoder(pa.int64(), Bucketize((float(2**53),)))
    assert encoder.encode(pa.array([2**53 - 1, 2**53 + 1])).to_pylist() == [2, 3]


@pytest.mark.parametrize(
    ("operation", "value", "expected"),
    [
        (Normalize(center=2.0, factor=0.5), 6.0, 2.0),
        (Normalize(center=2.0, factor=0.5), None, 0.0),
        (Normalize(fill=4.0, center=2.0), math.nan, 2.0),
        (Normalize(minimum=-1.0, maximum=1.0), -INF, -1.0),
        (Normalize(log1p=True), math.e - 1, 1.0),
        (Normalize(log1p=True), 1 - math.e, -1.0),
        (Normalize(), 1e300, INF),
    ],
)
def test_fill_clip_logarithm_and_scale(operation, value, expected):
    (found,) = NormalizeEncoder(pa.float64(), operation).encode(pa.array([value], pa.float64()))
    assert found.as_py() == pytest.approx(expected)
