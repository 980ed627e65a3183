"""Values of decoded columns: what stands for absent ones, and which are refused."""

from __future__ import annotations

import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.decode_rows import list_lengths
from training.input.columns import Column


def fill_absent(column: Column, array: pa.Array, where: str) -> pa.Array:
    """Puts the schema's values where records lack a feature, and checks fixed lengths.

    Raises:
        InputDataError: A feature is absent that has no pad value, or a list has another length
            than the schema says; names the feature and the record.
    """
    spec = column.spec
    if column.is_ragged:
        return array.fill_null([]) if array.null_count else array
    if not spec.is_list:
        if not array.null_count:
            return array
        absent = column.absent
        if absent is None:
            raise _unfit(column, where, "no value", "one value")
        value = absent.encode() if isinstance(absent, str) else absent
        return array.fill_null(pa.scalar(value, array.type))
    if not spec.is_ragged:
        lengths = list_lengths(array)
        bad = lengths != spec.shape[0]
        if column.may_be_empty:
            bad &= lengths != 0
        if bad.any():
            found = int(lengths[int(bad.argmax())])
            raise _unfit(column, where, f"a list of {found}", f"a list of {spec.shape[0]}")
    return array


def check_binary(name: str, array: pa.Array, where: str) -> None:
    """Refuses labels other than 0 and 1.

    Raises:
        InputDataError: There is one; names the feature and the value.
    """
    values = array.to_numpy(zero_copy_only=False)
    bad = (values != 0) & (values != 1)
    if bad.any():
        raise InputDataError(
            f"label {name!r} holds a value that a binary objective cannot learn",
            received=f"{values[int(bad.argmax())]} in {where}",
            allowed="0 or 1",
            fix="map the label in the build config, leave such rows out by input.filter, or "
            "choose another objective",
        )


def _unfit(column: Column, where: str, found: str, wanted: str) -> InputDataError:
    return InputDataError(
        f"a record does not hold feature {column.name!r} as the schema says",
        received=f"{found} in {where}",
        allowed=f"{wanted} of {column.spec.dtype}",
        fix="give the feature a pad_value if it may be absent, or build the dataset again",
    )
