"""Defaults as values of a column's type."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from etl.tfrecord.lowering.defaults import parse_default, value_kind


@pytest.mark.parametrize(
    ("default", "kind", "value"),
    [
        (None, pa.int8(), 0), (None, pa.float64(), 0.0), (None, pa.string(), ""),
        (None, pa.binary(), b""), (None, pa.bool_(), False), ("-1", pa.int64(), -1),
        (3.0, pa.int16(), 3), ("1e3", pa.int32(), 1000), ("2.5", pa.float32(), 2.5),
        (1, pa.bool_(), True), ("n/a", pa.large_string(), "n/a"), ("é", pa.binary(), b"\xc3\xa9"),
        (str(2**63 - 1), pa.int64(), 2**63 - 1), ("nan", pa.string(), "nan"),
    ],
)  # fmt: skip
def test_parses(default: Any, kind: pa.DataType, value: Any) -> None:
    assert parse_default(default, kind) == value
    assert type(parse_default(default, kind)) is type(value)


@pytest.mark.parametrize(
    ("default", "kind"),
    [(300, pa.int8()), (0.5, pa.int64()), ("x", pa.int64()), ("x", pa.float32()), (5, pa.string()),
     (2, pa.bool_()), (1e39, pa.float64()), ("nan", pa.int64()), (2**63, pa.int64())],
)  # fmt: skip
def test_refuses_what_is_no_value_of_the_type(default: Any, kind: pa.DataType) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_default(default, kind)


def test_kinds() -> None:
    kinds = [value_kind(t) for t in (pa.bool_(), pa.uint8(), pa.decimal128(3), pa.binary())]
    assert kinds == ["int64", "int64", "float", "bytes"]
