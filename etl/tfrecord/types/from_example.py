"""The plan that turns decoded features back into the columns of a schema.

Names may differ in case; the manifest says how dates, timestamps, maps and vectors were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.arrays import innermost, is_bytes, is_list, is_text, split_lists
from etl.tfrecord.types.features import Kind, WireFeature
from etl.tfrecord.types.to_example import MAP_PARTS, SEPARATOR, join_path
from etl.tfrecord.types.type_options import TypeOptions
from etl.tfrecord.types.values import UnfitError
from etl.tfrecord.types.vectors import (
    SPARSE_PARTS,
    is_vector,
    join_bytes,
    join_dense,
    join_sparse,
)

_BYTES, _TEXT = pa.binary(), pa.string()

Build = Callable[[pa.RecordBatch], pa.Array]
"""Builds a column, or a field of a struct, from decoded features; picklable."""
Join = Callable[[list[pa.Array], pa.DataType], pa.Array]


def find_name(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """What a name stands for where upper and lower case do not matter, as in Spark.

    That is the name itself if it is known, else those that differ from it in case alone, sorted.
    """
    same = {other for other in known if other.lower() == name.lower()}
    return (name,) if name in same else tuple(sorted(same))


@dataclass(frozen=True)
class FeatureNames:
    """What the features of the files are called; nothing where no manifest lists them."""

    known: tuple[str, ...] = ()

    @cached_property
    def _paths(self) -> dict[str, set[str]]:
        """All features and the structs around them, by their names in lower case."""
        paths: dict[str, set[str]] = {}
        for name in self.known:
            parts = name.split(SEPARATOR)
            for count in range(1, len(parts) + 1):
                path = SEPARATOR.join(parts[:count])
                paths.setdefault(path.lower(), set()).add(path)
        return paths

    def find(self, path: str) -> str:
        """Finds the column or field that a path stands for; the path itself where there is none.

        Raises:
            UnfitError: Several differ from it in case alone.
        """
        spellings = find_name(path, self._paths.get(path.lower(), ()))
        if len(spellings) > 1:
            raise UnfitError(f"which of {', '.join(spellings)} is meant? Spell it as it is there")
        return spellings[0] if spellings else path


def _read_leaf(
    feature: str, path: str, target: pa.DataType, form: str, batch: pa.RecordBatch
) -> pa.Array:
    column = batch.column(feature)
    try:
        return cast_values(column, target, form)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        is_text_wanted = pa.types.is_string(innermost(target)) and is_bytes(innermost(column.type))
        raise InputDataError(
            f"feature {path!r} does not fit the type it is to be read as",
            received=str(error),
            allowed=str(target),
            fix=f"give a schema with {path!r} as binary: its bytes are no text"
            if is_text_wanted
            else "read it as a wider type",
        ) from error


def _read_parts(
    join: Join, path: str, target: pa.DataType, parts: tuple[Build, ...], batch: pa.RecordBatch
) -> pa.Array:
    if not parts:  # a struct without fields
        return pa.StructArray.from_buffers(target, batch.num_rows, [None])
    arrays = [part(batch) for part in parts]
    try:
        return join(arrays, target)
    except InputDataError as error:
        raise _within(repr(path), error) from None


def _within(place: str, error: InputDataError) -> InputDataError:
    """The same error, told of the place that it occurred in."""
    what = f"{place}: {error.what}"
    return InputDataError(what, received=error.received, allowed=error.allowed, fix=error.fix)


def _join_struct(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    """A struct from its fields; null where all of them are."""
    absent = np.logical_and.reduce([np.asarray(array.is_null()) for array in arrays])
    for child, array in zip(target, arrays, strict=True):
        missing = np.asarray(array.is_null()) & ~absent
        if not child.nullable and missing.any():
            raise InputDataError(
                f"field {child.name!r} is missing in {missing.sum()} record(s), but is not "
                "nullable",
                fix="make the field nullable in the schema",
            )
    mask = pa.array(absent) if absent.any() else None
    return pa.StructArray.from_arrays(arrays, fields=list(target), mask=mask)


def _join_map(arrays: list[pa.Array], target: pa.MapType) -> pa.Array:
    """A map from the list of its keys and the list of its values."""
    (keys, rows), (values, value_rows) = map(split_lists, arrays)
    if not np.array_equal(rows.offsets, value_rows.offsets):
        row = int(np.argmax(rows.lengths != value_rows.lengths))
        raise InputDataError(
            "a map has other numbers of keys than of values",
            received=f"{rows.lengths[row]} keys and {value_rows.lengths[row]} values in row "
            f"{row} of the batch",
            allowed="a value for each key",
        )
    return rows.build_maps(keys, values, target)


def cast_values(column: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    """Casts decoded values, or lists of them.

    Args:
        column: int64, float32, binary, lists or lists of lists of these `[rows]`.
        target: Type to cast to, as deep in lists.
        form: How dates (`days`, `iso`) or timestamps (`s`, `ms`, `us`, `iso`) were written; of no
            meaning for other types.

    Returns:
        The column in that type `[rows]`.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if column.type == target:
        return column
    if not is_list(target):
        return _cast_scalars(column, target, form)
    values, rows = split_lists(column)
    if pa.types.is_fixed_size_list(target):
        lengths = rows.lengths if rows.is_null is None else rows.lengths[~rows.is_null]
        if (lengths != target.list_size).any():
            raise pa.ArrowInvalid(f"a list that has not {target.list_size} values")
    return rows.build(cast_values(values, target.value_type, form), target)


def _cast_scalars(values: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    t = pa.types
    if target == _TEXT and values.type == _BYTES and _is_ascii(values):
        return pa.Array.from_buffers(
            target, len(values), values.buffers(), values.null_count, values.offset
        )
    if t.is_decimal(target) or (form == "iso" and (t.is_date(target) or t.is_timestamp(target))):
        # A decimal of the shortest digits that give back the float32: 12.34, not 12.3400001525.
        return values.cast(pa.string()).cast(target)
    if t.is_boolean(target):
        wrong = np.asarray(values.drop_null())
        wrong = wrong[(wrong != 0) & (wrong != 1)]
        if wrong.size:
            raise pa.ArrowInvalid(f"{wrong[0]} is no boolean, which is 0 or 1")
    elif t.is_date(target):
        return values.cast(pa.int32()).cast(pa.date32()).cast(target)
    elif t.is_timestamp(target):
        return values.cast(pa.timestamp(form, target.tz)).cast(target)
    return values.cast(target)


def _is_ascii(values: pa.Array) -> bool:
    """Whether all bytes are ASCII, and so text; one look at them all, not one per value."""
    _, offsets, data = values.buffers()
    if data is None or not len(values):
        return False
    bounds = np.frombuffer(offsets, np.int32)
    first, last = bounds[values.offset], bounds[values.offset + len(values)]
    text = np.frombuffer(data, np.int8)[first:last]
    return not text.size or bool(text.min() >= 0)


@dataclass
class _Planner:
    """Plans columns one by one; `problems` says what cannot be read, one sentence each."""

    record_type: str
    options: TypeOptions
    names: FeatureNames
    features: dict[str, WireFeature] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def plan(self, path: str, column: pa.Field) -> Build | None:
        """Plans a column or a field; None, with a problem noted, where it cannot be read."""
        try:
            return self._plan(self.names.find(path), column)
        except UnfitError as error:
            spark_type = (column.metadata or {}).get(b"sluice.spark_type")
            shown = spark_type.decode() if spark_type else column.type
            self.problems.append(f"{path} ({shown}): {error}")
            return None

    def _plan(self, path: str, column: pa.Field) -> Build:
        if is_vector(column):
            return self._plan_vector(path, column.type)
        if pa.types.is_struct(column.type):
            fields = [self.plan(join_path(path, f.name), f) for f in column.type]
            parts = tuple(part for part in fields if part is not None)
            return partial(_read_parts, _join_struct, path, column.type, parts)
        if pa.types.is_map(column.type):
            return self._plan_map(path, column.type)
        return self._plan_leaf(path, column.type)

    def _plan_leaf(self, path: str, target: pa.DataType) -> Build:
        values, depth = target, 0
        while is_list(values):
            values, depth = values.value_type, depth + 1
        if depth > 2 or (depth == 2 and self.record_type != "SequenceExample"):
            raise UnfitError("arrays of arrays are feature lists of record type SequenceExample")
        kind, form = self._find_kind(values)
        feature = WireFeature(path, kind, depth == 1, depth == 2)
        if self.features.setdefault(path, feature) != feature:
            raise UnfitError(f"feature {path} is also wanted in another form")
        return partial(_read_leaf, path, path, target, form)

    def _find_kind(self, data_type: pa.DataType) -> tuple[Kind, str]:
        """Kind of the feature that holds such values, and the form of dates and timestamps."""
        t = pa.types
        if t.is_boolean(data_type) or t.is_integer(data_type):
            return "int64", ""
        if t.is_floating(data_type) or t.is_decimal(data_type):
            return "float32", ""
        if is_text(data_type) or is_bytes(data_type):
            return "bytes", ""
        if not t.is_date(data_type) and not t.is_timestamp(data_type):
            raise UnfitError("no feature is read as this type")
        name = "dates" if t.is_date(data_type) else "timestamps"
        form = getattr(self.options, name)
        if form == "error":
            raise UnfitError(f"option {name}, as it was written")
        return ("bytes" if form == "iso" else "int64"), form

    def _plan_map(self, path: str, target: pa.MapType) -> Build:
        if self.options.maps == "error":
            raise UnfitError("option maps=entries")
        types = (pa.list_(target.key_type), pa.list_(target.item_type))
        parts = zip(MAP_PARTS, types, strict=True)
        leaves = tuple(self._plan_leaf(join_path(path, part), kind) for part, kind in parts)
        return partial(_read_parts, _join_map, path, target, leaves)

    def _plan_vector(self, path: str, target: pa.StructType) -> Build:
        if self.options.vectors == "bytes":
            leaf = self._plan_leaf(path, pa.binary())
            return partial(_read_parts, join_bytes, path, target, (leaf,))
        if self.options.vectors == "dense":
            leaf = self._plan_leaf(path, target.field("values").type)
            return partial(_read_parts, join_dense, path, target, (leaf,))
        leaves = tuple(
            self._plan_leaf(join_path(path, part), target.field(part).type) for part in SPARSE_PARTS
        )
        return partial(_read_parts, join_sparse, path, target, leaves)


@dataclass(frozen=True)
class FromExample:
    """Turns batches of `features`, decoded in this order, into those of `target`; picklable."""

    target: pa.Schema
    features: tuple[WireFeature, ...]
    builds: tuple[Build, ...]

    def apply(self, batch: pa.RecordBatch, name: str = "<buffer>") -> pa.RecordBatch:
        """Turns a decoded batch `[rows]` of an origin, which errors name, into one in `target`.

        Raises:
            InputDataError: A value does not fit its column, or is missing where the column is not
                nullable; names the origin and the feature.
        """
        if not self.builds:
            rows = pa.StructArray.from_buffers(pa.struct([]), batch.num_rows, [None])
            return pa.RecordBatch.from_struct_array(rows)
        try:
            columns = [build(batch) for build in self.builds]
            for column_field, column in zip(self.target, columns, strict=True):
                _check_nulls(column_field, column)
        except InputDataError as error:
            raise _within(name, error) from error.__cause__
        return pa.RecordBatch.from_arrays(columns, schema=self.target)


def _check_nulls(column_field: pa.Field, column: pa.Array) -> None:
    if column.null_count and not column_field.nullable:
        raise InputDataError(
            f"feature {column_field.name!r} is missing in {column.null_count} record(s), but its "
            "column is not nullable",
            fix="make the column nullable in the schema",
        )


def plan_from_example(
    target: pa.Schema,
    record_type: str,
    options: TypeOptions | None = None,
    names: FeatureNames | None = None,
) -> FromExample:
    """Plans how features become the columns of a schema.

    `options` say how they were written; without `names` every column goes by its own name.

    Raises:
        ConfigError: Columns that cannot be read, all of them in one message.
    """
    planner = _Planner(record_type, options or TypeOptions(), names or FeatureNames())
    builds = [planner.plan(column.name, column) for column in target]
    if planner.problems:
        raise ConfigError(
            f"{len(planner.problems)} column(s) cannot be read from tf.train.{record_type}",
            received="; ".join(planner.problems),
            allowed="boolean, integers, float, double, decimal, string, binary, arrays of these; "
            "structs of these; by option dates, timestamps, maps, vectors",
            fix="give the options named above, or read the column as another type",
        )
    schema = pa.schema([pa.field(column.name, column.type, column.nullable) for column in target])
    built = tuple(build for build in builds if build is not None)
    return FromExample(schema, tuple(planner.features.values()), built)
