"""Plans of Arrow columns, and where their memory lies."""

import pyarrow as pa
import pytest

from conf.errors import ConfigError
from etl.tfrecord import encode_kernels_sizes as k
from etl.tfrecord.columns import plan_columns, read_byte_offsets


@pytest.mark.parametrize(
    ("data_type", "kind", "cast"),
    [
        (pa.int8(), k.INT32, pa.int32()), (pa.bool_(), k.INT32, pa.int32()),
        (pa.int32(), k.INT32, None), (pa.uint32(), k.INT64, pa.int64()),
        (pa.float16(), k.FLOAT32, pa.float32()), (pa.float64(), k.FLOAT64, None),
        (pa.decimal128(5, 2), k.FLOAT64, pa.float64()),
        (pa.dictionary(pa.int8(), pa.string()), k.BINARY, pa.string()),
    ],
)  # fmt: skip
def test_kinds_and_casts(data_type: pa.DataType, kind: int, cast: pa.DataType | None) -> None:
    for column_type, is_list in ((data_type, False), (pa.list_(data_type), True)):
        (plan,) = plan_columns(pa.schema([("x", column_type)]))
        assert (plan.kind, plan.value_type, plan.is_list) == (kind, cast, is_list)


@pytest.mark.parametrize(
    "data_type",
    [pa.uint64(), pa.date32(), pa.timestamp("us"), pa.null(), pa.map_(pa.string(), pa.int8()),
     pa.list_(pa.timestamp("s")), pa.struct([]), pa.duration("s")],
)  # fmt: skip
def test_types_without_a_place_on_the_wire(data_type: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="x"):
        plan_columns(pa.schema([("x", data_type)]))


def test_numbers_under_short_keys_are_compact() -> None:
    plans = plan_columns(pa.schema([("x", pa.int64()), ("y" * 101, pa.int64())]))
    assert [plan.is_compact for plan in plans] == [True, False]


def test_byte_offsets_of_a_slice_point_into_the_whole_buffer() -> None:
    values = pa.array(["ab", "c", None, "def"])
    assert read_byte_offsets(values.slice(1)).tolist() == [2, 3, 3, 6]
    assert read_byte_offsets(values.slice(4)).tolist() == [0]
