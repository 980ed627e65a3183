"""The plan that turns decoded features back into the columns of a schema.

Names may differ in case; the manifest says how dates, timestamps, maps and vectors were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.features import Kind, TypeOptions, WireFeature, is_bytes, is_list, is_text
from etl.tfrecord.types.parts import Join, check_nulls, find_parts, split_lists
from etl.tfrecord.types.refusals import UnfitError, restate, shown_type

Build = Callable[[pa.RecordBatch], pa.Array]
"""Builds a column, or a field of a struct, from decoded features; picklable."""


def find_name(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """What a name stands for where upper and lower case do not matter, as in Spark.

    That is the name itself if it is known, else those that differ from it in case alone, sorted.
    """
    same = {other for other in known if other.lower() == name.lower()}
    return (name,) if name in same else tuple(sorted(same))


def _read_leaf(path: str, target: pa.DataType, form: str, batch: pa.RecordBatch) -> pa.Array:
    column = batch.column(path)
    try:
        return cast_values(column, target, form)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputDataError(
            f"feature {path!r} does not fit the type it is to be read as",
            received=str(error),
            allowed=str(target),
            fix=f"give a schema with {path!r} of a wider type; as binary, if its bytes are no text",
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
        raise restate(error, what=f"{path!r}: {error.what}") from None


def cast_values(column: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    """Casts decoded values `[rows]`, or lists of lists of them, to a type that is as deep in lists.

    `form` is how dates (`days`, `iso`) or timestamps (`s`, `ms`, `us`, `iso`) were written. Raises
    pa.ArrowInvalid for a value that does not fit.
    """
    if column.type == target:
        return column
    if not is_list(target):
        return _cast_scalars(column, target, form)
    values, rows = split_lists(column)
    return rows.build(cast_values(values, target.value_type, form), target)


def _cast_scalars(values: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    t = pa.types
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


@dataclass
class _Planner:
    """Plans columns one by one; `problems` says what cannot be read, one sentence each."""

    record_type: str
    options: TypeOptions
    known: Mapping[str, Sequence[str]]  # features of the files by their names in lower case
    features: dict[str, WireFeature] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def plan(self, column: pa.Field) -> Build | None:
        """Plans a column or a field, named by its path; None, and a problem, where it cannot."""
        try:
            return self._plan(column)
        except UnfitError as error:
            self.problems.append(f"{column.name} ({shown_type(column)}): {error}")
            return None

    def _plan(self, column: pa.Field) -> Build:
        parts = find_parts(column, self.options)
        if parts is None:
            return self._plan_leaf(column)
        plan = self.plan if parts.is_struct else self._plan_leaf
        builds = tuple(build for build in map(plan, parts.fields) if build is not None)
        return partial(_read_parts, parts.join, column.name, column.type, builds)

    def _plan_leaf(self, column: pa.Field) -> Build:
        path, values, depth = self._find(column.name), column.type, 0
        while is_list(values):
            values, depth = values.value_type, depth + 1
        if depth > 2 or (depth == 2 and self.record_type != "SequenceExample"):
            raise UnfitError("arrays of arrays are feature lists of record type SequenceExample")
        kind, form = self._find_kind(values)
        feature = WireFeature(path, kind, depth == 1, depth == 2)
        if self.features.setdefault(path, feature) != feature:
            raise UnfitError(f"feature {path} is also wanted in another form")
        return partial(_read_leaf, path, column.type, form)

    def _find(self, path: str) -> str:
        """The feature that a path stands for; the path itself where none is known."""
        spellings = find_name(path, self.known.get(path.lower(), ()))
        if len(spellings) > 1:
            raise UnfitError(f"which of {', '.join(spellings)} is meant? Spell it as it is there")
        return spellings[0] if spellings else path

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


@dataclass(frozen=True)
class FromExample:
    """Turns batches of `features`, decoded in this order, into those of `target`; picklable."""

    target: pa.Schema
    features: tuple[WireFeature, ...]
    builds: tuple[Build, ...]

    def apply(self, batch: pa.RecordBatch, name: str = "<buffer>") -> pa.RecordBatch:
        """Turns a decoded batch `[rows]` of an origin, which errors name, into one in `target`.

        Raises InputDataError for a value that does not fit, or is missing, in its column.
        """
        if not self.builds:
            rows = pa.StructArray.from_buffers(pa.struct([]), batch.num_rows, [None])
            return pa.RecordBatch.from_struct_array(rows)
        try:
            columns = [build(batch) for build in self.builds]
            for column_field, column in zip(self.target, columns, strict=True):
                check_nulls(column_field, column)
        except InputDataError as error:
            raise restate(error, what=f"{name}: {error.what}") from error.__cause__
        return pa.RecordBatch.from_arrays(columns, schema=self.target)


def plan_from_example(
    target: pa.Schema,
    record_type: str,
    options: TypeOptions | None = None,
    names: Iterable[str] = (),
) -> FromExample:
    """Plans how features become the columns of a schema; refuses all that cannot be read at once.

    `options` say how they were written; `names` are the features of the files where these are
    known, else every column goes by its own name.
    """
    known: dict[str, list[str]] = {}
    for name in names:
        known.setdefault(name.lower(), []).append(name)
    planner = _Planner(record_type, options or TypeOptions(), known)
    builds = [planner.plan(column) for column in target]
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
