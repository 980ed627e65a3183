"""Columns to features in plain Python, row by row: an independent reference."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from etl.tfrecord.types.features import TypeOptions

EPOCH = datetime.datetime(1970, 1, 1)
MICROSECOND = datetime.timedelta(microseconds=1)


def features_of(row: dict[str, Any], schema: pa.Schema, options: TypeOptions) -> dict[str, Any]:
    """Features of a row; None where one is absent."""
    features: dict[str, Any] = {}
    for field in schema:
        features.update(column_features(field.name, row[field.name], field, options))
    return features


def column_features(name: str, value: Any, field: pa.Field, options: TypeOptions) -> dict:
    if pa.types.is_struct(field.type):
        features = {}
        for child in field.type:
            inner = None if value is None else value[child.name]
            features.update(column_features(f"{name}.{child.name}", inner, child, options))
        return features
    if pa.types.is_map(field.type):
        keys = None if value is None else [k for k, _ in value]
        values = None if value is None else [v for _, v in value]
        return {
            f"{name}.keys": leaf_feature(keys, pa.list_(field.type.key_type), options),
            f"{name}.values": leaf_feature(values, pa.list_(field.type.item_type), options),
        }
    return {name: leaf_feature(value, field.type, options)}


def is_list(kind: pa.DataType) -> bool:
    return hasattr(kind, "value_field") and not pa.types.is_dictionary(kind)


def leaf_feature(value: Any, kind: pa.DataType, options: TypeOptions) -> Any:
    if value is None:
        return None
    if is_list(kind):
        return [leaf_feature(v, kind.value_type, options) for v in value]
    t = pa.types
    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_boolean(kind) or t.is_integer(kind):
        return int(value)
    if t.is_floating(kind) or t.is_decimal(kind):
        return float(np.float32(value))
    if t.is_date(kind):
        return value.isoformat() if options.dates == "iso" else (value - EPOCH.date()).days
    return timestamp_feature(value, kind, options) if t.is_timestamp(kind) else value


def timestamp_feature(value: Any, kind: pa.TimestampType, options: TypeOptions) -> Any:
    if options.timestamps == "iso":
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text + ("" if kind.tz is None else "Z")
    ticks = (value.replace(tzinfo=None) - EPOCH) // MICROSECOND
    return ticks // {"s": 10**6, "ms": 10**3, "us": 1}[options.timestamps]


FLOATS = st.floats(width=32, allow_nan=False)
DOUBLES = st.floats(-1e6, 1e6).map(lambda v: v if v == 0 or abs(v) > 1e-30 else 0.5)
DATES = st.dates(datetime.date(1, 1, 1), datetime.date(9999, 12, 31))
TIMES = st.datetimes(datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31))
UTC = datetime.UTC
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)

SCALARS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**63 - 1)),
    "float": (pa.float32(), FLOATS),
    "double": (pa.float64(), DOUBLES),
    "string": (pa.string(), TEXTS),
    "large": (pa.large_string(), TEXTS),
    "binary": (pa.binary(), st.binary(max_size=5)),
    "date": (pa.date32(), DATES),
    "utc": (pa.timestamp("us", "UTC"), TIMES.map(lambda v: v.replace(tzinfo=UTC))),
    "ntz": (pa.timestamp("us"), TIMES),
}


@st.composite
def fields(
    draw: st.DrawFn, name: str, depth: int = 0, plain: bool = False
) -> tuple[pa.Field, st.SearchStrategy[Any]]:
    """A field of any type, and its values, None among them; see `batches` for `plain`."""
    kinds = ["scalar", "scalar", "list", "large_list", "fixed", "map"]
    kinds += [] if plain else ["dictionary"]
    kind = draw(st.sampled_from([*kinds, "struct"] if depth < 2 else kinds))
    scalar, values = SCALARS[draw(st.sampled_from(sorted(SCALARS)))]
    if kind == "scalar":
        return pa.field(name, scalar), st.none() | values
    maybe = values if plain else st.none() | values
    if kind == "list":
        return pa.field(name, pa.list_(scalar)), st.none() | st.lists(maybe, max_size=3)
    if kind == "large_list":
        return pa.field(name, pa.large_list(scalar)), st.none() | st.lists(maybe, max_size=3)
    if kind == "fixed":
        lists = st.lists(maybe, min_size=2, max_size=2)
        return pa.field(name, pa.list_(scalar, 2)), st.none() | lists
    if kind == "dictionary":
        return pa.field(name, pa.dictionary(pa.int32(), pa.string())), st.none() | TEXTS
    if kind == "map":
        maps = st.dictionaries(st.sampled_from("abc"), maybe, max_size=3)
        entries = maps.map(lambda v: list(v.items()))
        return pa.field(name, pa.map_(pa.string(), scalar)), st.none() | entries
    children = [draw(fields(f"f{k}", depth + 1, plain)) for k in range(draw(st.integers(1, 3)))]
    rows = st.fixed_dictionaries({field.name: inner for field, inner in children})
    return pa.field(name, pa.struct([field for field, _ in children])), st.none() | rows


@st.composite
def batches(draw: st.DrawFn, plain: bool = False) -> pa.RecordBatch:
    """A batch of one to four columns, often a slice of a longer one.

    Args:
        draw: Hypothesis's own.
        plain: Whether to leave out what cannot come back as it was: null elements, dictionaries.
    """
    columns = [draw(fields(f"c{k}", plain=plain)) for k in range(draw(st.integers(1, 4)))]
    rows = draw(st.integers(0, 8))
    schema = pa.schema([field for field, _ in columns])
    arrays = [
        pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), field.type)
        for field, values in columns
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    start = draw(st.integers(0, rows))
    return batch.slice(start, draw(st.integers(0, rows - start)))
