"""float64 onto float32: what passes, what is refused, and that kernel and rule agree."""

import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputDataError
from etl.tfrecord.decode import ExampleDecoder, WireFeature
from etl.tfrecord.encode import encode
from etl.tfrecord.framing import index_records
from etl.tfrecord.narrowing import find_refused


def is_refused(value: float) -> bool:
    """The rule once more, in terms of exact integers."""
    with np.errstate(all="ignore"):
        narrow = float(np.float32(value))
    if math.isnan(value) or narrow == value:
        return False
    return math.isinf(narrow) or narrow == 0 or (value.is_integer() and int(narrow) != int(value))


WHOLE = st.integers(-(2**70), 2**70).map(float)
VALUES = st.one_of(
    st.floats(), WHOLE, st.integers(-(2**25), 2**25).map(float), st.floats(1e-50, 1e-37),
    st.floats(width=32), st.floats(3.40e38, 3.41e38),
)  # fmt: skip


def shapes(value: float) -> list[pa.Array]:
    return [pa.array([0.5, value]), pa.array([[0.5], [1.5, value, 2.5]])]


@given(VALUES)
@settings(max_examples=400, deadline=None)
def test_kernel_and_rule_agree(value: float) -> None:
    assert find_refused(np.array([value])).tolist() == [is_refused(value)]
    for column in shapes(value):
        batch = pa.record_batch({"price": column})
        if is_refused(value):
            with pytest.raises(InputDataError, match=r"(?s)'price'.*row 1"):
                encode(batch)
            continue
        data = encode(batch)
        wanted = [WireFeature("price", "float32", is_list=pa.types.is_list(column.type))]
        decoded = ExampleDecoder(wanted).decode(data, index_records(data))
        values = decoded.column(0)
        flat = (values.flatten() if wanted[0].is_list else values).to_numpy()
        with np.errstate(all="ignore"):
            source = column.flatten() if wanted[0].is_list else column
            expected = source.to_numpy().astype(np.float32)
        assert np.array_equal(flat, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float(2**24 + 1), "16777216"), (1.7e12 + 1, "whole number"), (float(2**53 - 1), "whole"),
        (1e300, "beyond"), (-1e39, "beyond"), (1e-300, "zero"), (-1e-46, "zero"),
    ],
)  # fmt: skip
def test_refusal_tells_the_value_and_what_it_would_become(value: float, message: str) -> None:
    for column in shapes(value):
        with pytest.raises(InputDataError, match=message) as caught:
            encode(pa.record_batch({"price": column}))
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 0.1, 12.34, 1e-40, 16777217.5, 2.0**24, -(2.0**100), math.inf, math.nan]
)
def test_what_passes(value: float) -> None:
    for column in shapes(value):
        assert encode(pa.record_batch({"x": column})).size


def test_decimals_fall_under_the_rule() -> None:
    fine = pa.array([decimal.Decimal("12.34"), decimal.Decimal("16777216.00")])
    assert encode(pa.record_batch({"d": fine})).size
    with pytest.raises(InputDataError, match=r"(?s)'d'.*16777216.*row 1"):
        encode(pa.record_batch({"d": pa.array([None, decimal.Decimal("16777217.00")])}))


def test_every_chunk_and_block_is_checked() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    values[4321] = 2.0**24 + 1
    with pytest.raises(InputDataError, match="row 4321"):
        encode(pa.record_batch({"x": values, "y": values[::-1] * 0}))


def test_feature_lists_are_checked() -> None:
    batch = pa.record_batch({"ok": [1.0, 2.0], "q": pa.array([[[1.0]], [[], [0.5, 1e300]]])})
    with pytest.raises(InputDataError, match=r"(?s)'q'.*beyond.*1e\+300 in row 1"):
        encode(batch, "SequenceExample")
