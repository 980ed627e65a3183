"""The plan that turns the columns of any schema into features of records, made before any task.

Every column that does not fit is named in one error, with the cast that makes it fit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.arrays import holds_same, innermost, is_bytes, is_text, split_maps
from etl.tfrecord.types.type_options import TypeOptions
from etl.tfrecord.types.values import (
    Convert,
    RefusedError,
    UnfitError,
    describe_unfit,
    plan_lists,
)
from etl.tfrecord.types.vectors import (
    DENSE_LISTS,
    SPARSE_PARTS,
    is_vector,
    split_bytes,
    split_dense,
    split_sparse,
)

SEPARATOR = "."
"""Between the name of a column and that of its part."""
MAP_PARTS = ("keys", "values")

Outputs = tuple[tuple[str, pa.DataType], ...]
Split = Callable[[pa.Array], list[pa.Array]]


def join_path(path: str, part: str) -> str:
    """Name of a part of a column."""
    return f"{path}{SEPARATOR}{part}"


@dataclass(frozen=True)
class ColumnPlan:
    """How a column, or a part of one, becomes features; picklable.

    `outputs` are their names and types; `split` makes an array for each, None: the column itself is
    the feature.
    """

    outputs: Outputs
    split: Split | None = None

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """Features of a column; raises InputDataError for a value that is refused."""
        return [column] if self.split is None else self.split(column)


def _convert(name: str, convert: Convert, column: pa.Array) -> list[pa.Array]:
    try:
        return [convert(column)]
    except RefusedError as refused:
        raise InputDataError(
            f"column {name!r} has {refused.what}",
            received=f"{refused.received} in row {refused.index} of the batch",
            allowed=refused.allowed,
            fix=refused.fix,
        ) from None


def _split_parts(split: Split, parts: tuple[ColumnPlan, ...], column: pa.Array) -> list[pa.Array]:
    pairs = zip(parts, split(column), strict=True)
    return [feature for part, array in pairs for feature in part.apply(array)]


def _flatten(column: pa.Array) -> list[pa.Array]:
    """A struct's fields, null where the struct is."""
    fields: list[pa.Array] = column.flatten()
    return fields


def _join_parts(parts: Iterable[ColumnPlan], split: Split) -> ColumnPlan:
    parts = tuple(parts)
    outputs = tuple(output for part in parts for output in part.outputs)
    return ColumnPlan(outputs, partial(_split_parts, split, parts))


@dataclass
class _Planner:
    """Plans columns one by one; `problems` says what does not fit, one sentence each."""

    record_type: str
    options: TypeOptions
    problems: list[str] = field(default_factory=list)

    def plan(self, path: str, column: pa.Field) -> ColumnPlan:
        """Plans a column or a field; where it does not fit a problem is noted."""
        try:
            return self._plan(path, column)
        except UnfitError as error:
            self.problems.append(describe_unfit(path, column, error))
            return ColumnPlan(())

    def _plan(self, path: str, column: pa.Field) -> ColumnPlan:
        if is_vector(column):
            return self._plan_vector(path)
        if pa.types.is_struct(column.type):
            if not column.type.num_fields:
                raise UnfitError
            fields = [self.plan(join_path(path, f.name), f) for f in column.type]
            return _join_parts(fields, _flatten)
        if pa.types.is_map(column.type):
            return self._plan_map(path, column.type)
        return self._plan_leaf(path, column.type)

    def _plan_leaf(self, path: str, data_type: pa.DataType) -> ColumnPlan:
        depth = 2 if self.record_type == "SequenceExample" else 1
        rule = plan_lists(data_type, self.options, depth)
        split = rule.convert and partial(_convert, path, rule.convert)
        return ColumnPlan(((path, rule.target),), split)

    def _plan_map(self, path: str, data_type: pa.MapType) -> ColumnPlan:
        if self.options.maps == "error":
            raise UnfitError("option maps=entries")
        types = (pa.list_(data_type.key_type), pa.list_(data_type.item_type))
        parts = zip(MAP_PARTS, types, strict=True)
        leaves = [self._plan_leaf(join_path(path, part), kind) for part, kind in parts]
        return _join_parts(leaves, split_maps)

    def _plan_vector(self, path: str) -> ColumnPlan:
        if self.options.vectors == "dense":
            return _join_parts([self._plan_leaf(path, DENSE_LISTS)], split_dense)
        if self.options.vectors == "bytes":
            return _join_parts([self._plan_leaf(path, pa.large_binary())], split_bytes)
        parts = [self._plan_leaf(join_path(path, n), kind) for n, kind in SPARSE_PARTS.items()]
        return _join_parts(parts, split_sparse)


def _check_byte_array(schema: pa.Schema, outputs: Outputs) -> list[str]:
    """What a schema has that payloads of their own cannot hold."""
    if len(schema) == 1 and all(is_bytes(kind) or is_text(kind) for _, kind in outputs):
        return []
    shown = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no column"
    return [f"{shown}: one binary or string column is wanted"]


def _check_names(outputs: Outputs) -> list[str]:
    counts = Counter(name for name, _ in outputs)
    return [
        f"{name}: {count} columns end up under this name: rename one"
        for name, count in counts.items()
        if count > 1
    ]


@dataclass(frozen=True)
class ToExample:
    """Turns batches of `source` into those of `schema`, which the encoder takes; picklable."""

    source: pa.Schema
    schema: pa.Schema
    options: TypeOptions
    plans: tuple[ColumnPlan, ...]

    @property
    def is_identity(self) -> bool:
        """Whether batches go out as they come in."""
        return all(plan.split is None for plan in self.plans)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turns a batch `[rows]` in the planned schema into one in `schema`.

        Raises:
            InputDataError: A value that is refused, or another schema than planned; names the
                column and the row.
        """
        if self.is_identity and batch.schema.types == self.source.types:
            return batch
        pairs = zip(self.plans, self._conform(batch), strict=True)
        arrays = [array for plan, column in pairs for array in plan.apply(column)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _conform(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns in the planned types, which may differ in zones, nullability and width."""
        types, given = self.source.types, batch.schema
        if given.names == self.source.names and all(map(holds_same, given.types, types)):
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
                pairs = zip(batch.columns, types, strict=True)
                return [c if c.type == planned else c.cast(planned) for c, planned in pairs]
        raise InputDataError(
            "a batch has another schema than the write was planned for",
            received=str(given),
            allowed=str(self.source),
        )

    def describe(self) -> dict[str, Any]:
        """What reading back needs, as JSON; see `TypeOptions.read_manifest`."""
        binary = [f.name for f in self.schema if is_bytes(innermost(f.type))]
        return {**self.options.chosen(), **({"binary": binary} if binary else {})}


def plan_to_example(
    schema: pa.Schema, record_type: str, options: TypeOptions | None = None
) -> ToExample:
    """Plans how the columns of a schema become features of records of a type.

    Raises:
        ConfigError: Columns that do not fit, all of them in one message with what would make each
            fit.
    """
    planner = _Planner(record_type, options or TypeOptions())
    plans = tuple(planner.plan(field.name, field) for field in schema)
    outputs = tuple(output for plan in plans for output in plan.outputs)
    payload = _check_byte_array(schema, outputs) if record_type == "ByteArray" else []
    problems = [*planner.problems, *payload, *_check_names(outputs)]
    if problems:
        kind = "ByteArray records" if record_type == "ByteArray" else f"tf.train.{record_type}"
        raise ConfigError(
            f"{len(problems)} column(s) cannot be written as {kind}",
            received="; ".join(problems),
            allowed="booleans, integers, floats, decimals, strings, binary, lists of these; by "
            "option dates, timestamps, maps, structs' fields, vectors",
            fix="write the casts named above, or give the options for the whole job",
        )
    if all(plan.split is None for plan in plans):
        return ToExample(schema, schema, planner.options, plans)
    features = pa.schema([pa.field(name, data_type) for name, data_type in outputs])
    return ToExample(schema, features, planner.options, plans)
