"""Random columns of every type that can be lowered, with what the wire makes of them."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from etl.tfrecord.lowering.vectors import VECTOR_METADATA, VECTOR_STORAGE

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
def vectors(draw: st.DrawFn) -> dict[str, Any]:
    values = draw(st.lists(FLOATS, max_size=4))
    if draw(st.booleans()):
        return {"type": 1, "size": None, "indices": None, "values": values}
    indices = sorted(draw(st.permutations(range(6)))[: len(values)])
    return {"type": 0, "size": 6, "indices": indices, "values": values}


@st.composite
def fields(
    draw: st.DrawFn, name: str, depth: int = 0, plain: bool = False
) -> tuple[pa.Field, st.SearchStrategy[Any]]:
    """A field of any type, and its values, None among them; see `batches` for `plain`."""
    kinds = ["scalar", "scalar", "list", "large_list", "fixed", "map"]
    kinds += [] if plain else ["dictionary", "vector"]
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
    if kind == "vector":
        return pa.field(name, VECTOR_STORAGE, metadata=VECTOR_METADATA), st.none() | vectors()
    children = [draw(fields(f"f{k}", depth + 1, plain)) for k in range(draw(st.integers(1, 3)))]
    rows = st.fixed_dictionaries({field.name: inner for field, inner in children})
    return pa.field(name, pa.struct([field for field, _ in children])), st.none() | rows


@st.composite
def batches(draw: st.DrawFn, plain: bool = False) -> pa.RecordBatch:
    """A batch of one to four columns, often a slice of a longer one.

    Args:
        draw: Hypothesis's own.
        plain: Whether to leave out what cannot come back as it was: null elements, dictionaries,
            vectors.
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


def to_wire(column: pa.Array) -> pa.Array:
    """What the decoder makes of a lowered column: int64, float32, binary, lists of these."""
    return pa.array([_plain(value) for value in column.to_pylist()], wire_type(column.type))


def wire_type(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_dictionary(kind):
        return wire_type(kind.value_type)
    if hasattr(kind, "value_field"):
        return pa.list_(wire_type(kind.value_type))
    if t.is_integer(kind) or t.is_boolean(kind):
        return pa.int64()
    return pa.float32() if t.is_floating(kind) or t.is_decimal(kind) else pa.binary()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        return float(np.float32(value))
    return int(value) if isinstance(value, bool) else value
