"""The encoder pipeline: a batch of raw columns in, a batch of features out, in one pass."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import Length, Weights
from conf.errors import InputDataError, did_you_mean
from conf.local_paths import local_path
from conf.schema import PAD_ID, FeatureSchema, FeatureSpec
from etl.encoders.arrow_columns import (
    RAW_TYPES,
    build_lists,
    cast_values,
    check_lengths,
    flatten_lists,
)
from etl.encoders.operations import Encoded, Fitted, RawValues, encode
from etl.encoders.token_lookup import JoinedTokenEncoder, TokenEncoder, found_column
from etl.encoders.vocabulary import load_vocabulary, read_statistic_table
from etl.tfrecord.types.features import is_list


def raw_inputs(spec: FeatureSpec, column: ColumnEncoding) -> tuple[RawColumn, ...]:
    """Returns the raw columns that a feature reads."""
    return column.inputs or (RawColumn(column.column, column.raw_dtype, spec.is_list),)


@dataclass(frozen=True)
class EncoderPipeline:
    """Applies a plan to Arrow batches. Built once per task; safe to share between threads."""

    plan: EncoderPlan
    encoders: tuple[FeatureEncoder, ...]

    @cached_property
    def output_schema(self) -> pa.Schema:
        """A column of each feature."""
        return pa.schema([(own.spec.name, own.output_type) for own in self.encoders])

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Encodes a batch to one column per feature, as `output_schema` says.

        A vocabulary gives null and unknown tokens the OOV id, inside lists too; a null list stays
        null (the feature is absent), an empty one empty. Lists longer than the feature's
        `max_len` keep their first values: histories are most recent first.
        """
        columns = [encoder.encode(batch) for encoder in self.encoders]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)


@dataclass(frozen=True)
class FeatureEncoder:
    """One feature: where it comes from and what encodes it."""

    spec: FeatureSpec
    column: ColumnEncoding
    inputs: tuple[RawColumn, ...]
    fitted: Fitted
    pad_token: int | None  # pads raw lists of tokens

    @cached_property
    def _value_type(self) -> pa.DataType:
        if self.spec.dtype == "bytes":
            return pa.string() if self.column.raw_dtype == "string" else pa.binary()
        return RAW_TYPES[self.spec.dtype]

    @cached_property
    def output_type(self) -> pa.DataType:
        """Type of the feature's column."""
        return pa.list_(self._value_type) if self.spec.is_list else self._value_type

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """Encodes the raw columns of a batch `[rows]` to the feature `[rows]`."""
        columns = [self._find_column(batch, raw) for raw in self.inputs]
        try:
            read = map(self._read_values, columns, self.inputs)
            values, rows = self._encode(list(read))
            return values if rows is None else build_lists(rows, values)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            names = ", ".join(repr(raw.name) for raw in self.inputs)
            raise InputDataError(
                f"column {names} holds a value that feature {self.spec.name!r} cannot",
                received=str(error),
                allowed=f"what becomes {self.output_type} without loss",
                fix="declare the column with its real type, or clean it before it is encoded",
            ) from error

    def _encode(self, inputs: Sequence[RawValues]) -> Encoded:
        if self.column.operation is not None:
            return encode(self.column.operation, inputs, self.fitted)
        [raw] = inputs
        if self.fitted.tokens is None:
            # By way of the declared type, as a served model reads them.
            return cast_values(raw.as_declared, self._value_type), raw.rows
        ids = self.fitted.tokens.encode(raw.values)
        if raw.rows is not None and self.pad_token is not None:
            is_pad = pc.equal(raw.values, pa.scalar(self.pad_token, raw.values.type))
            ids = pc.if_else(is_pad.fill_null(False), pa.scalar(PAD_ID, pa.int64()), ids)
        return ids, raw.rows

    def _find_column(self, batch: pa.RecordBatch, raw: RawColumn) -> pa.Array:
        found = batch.schema.get_all_field_indices(raw.name)
        if len(found) != 1:
            raise InputDataError(
                f"feature {self.spec.name!r} needs exactly one column {raw.name!r}",
                received=f"{len(found)} such columns among {', '.join(batch.schema.names)}",
                fix=did_you_mean(raw.name, batch.schema.names),
            )
        column = batch.column(found[0])
        if pt.is_null(column.type) and raw.is_list:
            return pa.nulls(len(column), pa.list_(RAW_TYPES[raw.dtype]))
        if not pt.is_null(column.type) and is_list(column.type) != raw.is_list:
            raise InputDataError(
                f"column {raw.name!r} has another shape than feature {self.spec.name!r}",
                received=column.type,
                allowed="a list column" if raw.is_list else "a scalar column",
            )
        return column

    def _read_values(self, column: pa.Array, raw: RawColumn) -> RawValues:
        declared, operation = RAW_TYPES[raw.dtype], self.column.operation
        if not raw.is_list or isinstance(operation, Length):
            return RawValues(column, declared)
        # All weights are read, as there must be one for each id.
        max_len = None if isinstance(operation, Weights) else self.spec.max_len
        values, rows = flatten_lists(column, max_len)
        has_shape_of_lists = operation is None or operation.output.shape is None
        if has_shape_of_lists and (length := self.spec.shape[0]) is not None:
            check_lengths(rows, length)
        return RawValues(values, declared, rows)


def read_pipeline(
    directory: str | os.PathLike[str],
    features: Collection[str] | None = None,
    joined: Collection[str] = (),
) -> EncoderPipeline:
    """Reads a pipeline: `encoders.json` and what lies beside it.

    Args:
        directory: Where they lie; a plain path or a `file:` URI.
        features: Features to make, in the plan's order; None for all.
        joined: Vocabularies whose tokens a join has looked up before; their files are not read.
    """
    root = local_path(directory)
    plan = read_plan_file(root)
    if features is not None:
        plan = replace(
            plan,
            schema=FeatureSchema(tuple(s for s in plan.schema.features if s.name in features)),
            columns=tuple(column for column in plan.columns if column.feature in features),
        )
    tokens: dict[str | None, Any] = {
        spec.name: JoinedTokenEncoder(spec.oov_buckets)
        if spec.name in joined
        else TokenEncoder.of(spec, load_vocabulary(root, spec))
        for spec in plan.vocabularies
    }
    tables: dict[Any, Any] = {own.name: read_statistic_table(root, own) for own in plan.tables}
    pads: dict[Any, int | None] = {own.name: own.pad_token for own in plan.vocabularies}
    encoders = []
    for spec, column in zip(plan.schema.features, plan.columns, strict=True):
        name, table = column.vocabulary, getattr(column.operation, "table", None)
        first, *others = raw_inputs(spec, column)
        if name is not None and name in joined:
            first = replace(first, name=found_column(name, first.name))
        fitted = Fitted(spec.max_len, tokens.get(name), tables.get(table))
        encoders.append(FeatureEncoder(spec, column, (first, *others), fitted, pads.get(name)))
    return EncoderPipeline(plan, tuple(encoders))
