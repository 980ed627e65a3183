from __future__ import annotations

import pyarrow as pa
import pytest

from etl.encoders.identity import IdentityEncoder


def test_values_pass_through_the_declared_type():
    encoder = IdentityEncoder(pa.float32(), pa.int64())
    # 2**24 + 1 is no float32: what the raw column was declared with decides, as in serving.
    assert encoder.encode(pa.array([float(2**24 + 1), None])).to_pylist() == [2**24, None]


def test_a_loss_is_refused():
    with pytest.raises(pa.ArrowInvalid):
        IdentityEncoder(pa.float32(), pa.int64()).encode(pa.array([0.5]))
