"""Lowering in plain Python, row by row: an independent reference."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from etl.tfrecord.policies import ColumnPolicy, LoweringOptions

EPOCH = datetime.datetime(1970, 1, 1)
MICROSECOND = datetime.timedelta(microseconds=1)
FLOAT32_MAX = float(np.finfo(np.float32).max)


def lower_row(row: dict[str, Any], schema: pa.Schema, options: LoweringOptions) -> dict[str, Any]:
    """Features of a row; None where one is absent."""
    features: dict[str, Any] = {}
    for field in schema:
        features.update(lower_column(field.name, row[field.name], field, options))
    return features


def lower_column(name: str, value: Any, field: pa.Field, options: LoweringOptions) -> dict:
    policy, join = options.policy(name), f"{name}{options.struct_separator}"
    if (field.metadata or {}).get(b"sluice.type") == b"vector":
        return lower_vector(name, join, value, policy)
    if pa.types.is_struct(field.type):
        features = {}
        for child in field.type:
            inner = None if value is None else value[child.name]
            features.update(lower_column(join + child.name, inner, child, options))
        return features
    if pa.types.is_map(field.type):
        return lower_map(join, value, field.type, policy, options)
    return {name: lower_leaf(value, field.type, policy)}


def lower_map(
    join: str, value: Any, kind: pa.MapType, policy: ColumnPolicy, options: LoweringOptions
) -> dict:
    if policy.maps == "keys":
        entries = dict(value or [])
        features = {}
        for key in policy.map_keys:
            inner = entries.get(key)
            features.update(lower_column(join + key, inner, kind.item_field, options))
        return features
    if value is not None and policy.null_elements == "drop":
        value = [(k, v) for k, v in value if v is not None]
    keys = None if value is None else [k for k, _ in value]
    values = None if value is None else [v for _, v in value]
    return {
        f"{join}keys": lower_leaf(keys, pa.list_(kind.key_type), policy),
        f"{join}values": lower_leaf(values, pa.list_(kind.item_type), policy),
    }


def lower_vector(name: str, join: str, value: Any, policy: ColumnPolicy) -> dict:
    indices = values = size = None
    if value is not None:
        values, size = value["values"], value["size"]
        if value["type"] == 1:
            size = len(values)
            indices = [k for k, v in enumerate(values) if v != 0]
            values = [v for v in values if v != 0]
        else:
            indices = value["indices"]
    if policy.vectors == "sparse":
        doubles = pa.list_(pa.float64())
        return {
            f"{join}indices": lower_leaf(indices, pa.list_(pa.int32()), policy),
            f"{join}values": lower_leaf(values, doubles, policy),
            f"{join}size": lower_leaf(size, pa.int32(), policy),
        }
    dense = None
    if value is not None:
        dense = [0.0] * size
        for index, number in zip(indices, values, strict=True):
            dense[index] = number
    return {name: lower_leaf(dense, pa.list_(pa.float64()), policy)}


def is_list(kind: pa.DataType) -> bool:
    return hasattr(kind, "value_field") and not pa.types.is_dictionary(kind)


def default_of(kind: pa.DataType, policy: ColumnPolicy) -> Any:
    lowered = lower_scalar(None, kind, policy)
    return lowered if policy.default is None else type(lowered)(policy.default)


def lower_leaf(value: Any, kind: pa.DataType, policy: ColumnPolicy) -> Any:
    if value is None:
        if policy.nulls != "default":
            return None
        if pa.types.is_fixed_size_list(kind) and policy.null_elements != "drop":
            return [default_of(kind.value_type, policy)] * kind.list_size
        return [] if is_list(kind) else default_of(kind, policy)
    if not is_list(kind):
        return lower_scalar(value, kind, policy)
    elements = list(value)
    if policy.null_elements == "drop":
        elements = [v for v in elements if v is not None]
    if is_list(kind.value_type):
        return [
            ([] if policy.null_elements == "default" else None)
            if v is None
            else lower_leaf(v, kind.value_type, policy)
            for v in elements
        ]
    return [
        (default_of(kind.value_type, policy) if policy.null_elements == "default" else None)
        if v is None
        else lower_scalar(v, kind.value_type, policy)
        for v in elements
    ]


def lower_scalar(value: Any, kind: pa.DataType, policy: ColumnPolicy) -> Any:
    """Value on the wire; the zero of its kind for None."""
    t = pa.types
    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_boolean(kind) or t.is_integer(kind):
        return int(value or 0)
    if t.is_floating(kind) or t.is_decimal(kind):
        return narrow(float(value or 0), policy.float64)
    if t.is_date(kind):
        if policy.dates == "iso":
            return "" if value is None else value.isoformat()
        return 0 if value is None else (value - EPOCH.date()).days
    if t.is_timestamp(kind):
        return lower_timestamp(value, kind, policy)
    if t.is_string(kind) or t.is_large_string(kind):
        return value or ""
    return value or b""


def narrow(value: float, mode: str) -> float:
    with np.errstate(over="ignore"):
        narrowed = float(np.float32(value))
    if mode == "clip" and np.isinf(narrowed) and not np.isinf(value):
        return float(np.copysign(FLOAT32_MAX, value))
    return narrowed


def lower_timestamp(value: Any, kind: pa.TimestampType, policy: ColumnPolicy) -> Any:
    if policy.timestamps == "iso":
        if value is None:
            return ""
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text + ("" if kind.tz is None else "Z")
    if value is None:
        return 0
    ticks = (value.replace(tzinfo=None) - EPOCH) // MICROSECOND
    return ticks // {"s": 10**6, "ms": 10**3, "us": 1}[policy.timestamps]
