"""The encoder pipeline: a batch of raw columns in, a batch of features out, in one pass.

A plan is checked against itself and against what was fitted before a row is encoded; what its
operations are executed by stands in the file of each family.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.types as pt

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import IDENTITY, ColumnEncoding, EncoderPlan, RawColumn
from conf.errors import InputDataError, did_you_mean
from conf.local_paths import local_path
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.base import (
    RAW_TYPES,
    Fitted,
    IdentityEncoder,
    RowEncoder,
    ValueEncoder,
    row_encoders,
    value_encoders,
)
from etl.encoders.target import load_statistic_table
from etl.encoders.token_lookup import ListTokenEncoder, TokenEncoder
from etl.encoders.vocabulary import load_vocabulary
from etl.tfrecord.types.features import is_list


def build_encoder(spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted) -> RowEncoder:
    """Builds the encoder of a feature; the plan has been checked."""
    operation = column.operation
    if operation is not None:
        of_values = value_encoders.find(operation)
        if of_values is not None:
            return ValueEncoder(spec, of_values(RAW_TYPES[column.raw_dtype], operation))
        return row_encoders[operation](operation, spec, column, fitted)
    if column.vocabulary is not None:
        tokens = fitted.list_tokens if spec.is_list else fitted.tokens
        return ValueEncoder(spec, tokens[column.vocabulary])
    if spec.dtype == "bytes":
        output_type = pa.binary() if column.raw_dtype == "bytes" else pa.string()
    else:
        output_type = RAW_TYPES[spec.dtype]
    return ValueEncoder(spec, IdentityEncoder(RAW_TYPES[column.raw_dtype], output_type))


def raw_inputs(spec: FeatureSpec, column: ColumnEncoding) -> tuple[RawColumn, ...]:
    """Returns the raw columns that a feature reads."""
    return column.inputs or (RawColumn(column.column, column.raw_dtype, spec.is_list),)


_RAW_DTYPES_OF_TOKENS = {"int64": ("int64",), "string": ("string", "bytes")}


def check_plan(
    plan: EncoderPlan, vocabularies: Collection[str], tables: Collection[str] = ()
) -> None:
    """Checks that a plan's parts fit each other.

    Args:
        plan: The plan.
        vocabularies: Names of the vocabularies that were read.
        tables: Names of the tables that were read.

    Raises:
        InputDataError: They do not.
    """
    features = [column.feature for column in plan.columns]
    if features != list(plan.schema.names) or len(set(features)) != len(features):
        raise InputDataError(
            "the encoders' columns do not match the features one for one",
            received=", ".join(features),
            allowed=", ".join(plan.schema.names),
        )
    _check_names("vocabularies", {spec.name for spec in plan.vocabularies}, set(vocabularies))
    _check_names("tables", {spec.name for spec in plan.tables}, set(tables))
    for spec, column in zip(plan.schema.features, plan.columns, strict=True):
        if column.operation is not None:
            _check_operation(plan, spec, column)
        _check_values(plan, spec, column)


def _check_names(what: str, named: set[str], received: set[str]) -> None:
    if named != received:
        raise InputDataError(
            f"the {what} are not those that the plan names",
            received=", ".join(sorted(received)) or "none",
            allowed=", ".join(sorted(named)) or "none",
        )


def _check_operation(plan: EncoderPlan, spec: FeatureSpec, column: ColumnEncoding) -> None:
    operation = column.operation
    if operation is None or not column.inputs:
        raise InputDataError(f"feature {spec.name!r} does not say which columns it reads")
    for raw in column.inputs:
        if raw.is_served:
            _check_raw_dtype(spec, raw.dtype, operation.accepts)
    output = operation.output
    shape = spec.shape if output.shape is None else output.shape
    received = (spec.dtype, spec.vocabulary_size, spec.shape)
    if received != (output.dtype, output.vocabulary_size, shape):
        raise InputDataError(
            f"feature {spec.name!r} is not what its encoder makes",
            received=received,
            allowed=(output.dtype, output.vocabulary_size, shape),
        )
    table = getattr(operation, "table", None)
    if table is not None and table not in {known.name for known in plan.tables}:
        raise InputDataError(f"feature {spec.name!r} reads an unknown table", received=table)


def _check_values(plan: EncoderPlan, spec: FeatureSpec, column: ColumnEncoding) -> None:
    named = {known.name: known for known in plan.vocabularies}
    if column.vocabulary is None:
        if column.operation is None:
            _check_raw_dtype(spec, column.raw_dtype, tuple(RAW_TYPES))
        return
    if column.vocabulary not in named:
        raise InputDataError(
            f"feature {spec.name!r} has an unknown encoder",
            received=column.vocabulary,
            fix=did_you_mean(column.vocabulary, [IDENTITY, *named]),
        )
    allowed = _RAW_DTYPES_OF_TOKENS[named[column.vocabulary].token_dtype]
    _check_raw_dtype(spec, column.raw_dtype, allowed)
    if column.operation is None and spec.dtype != "int64":
        raise InputDataError(
            f"feature {spec.name!r} has a vocabulary, so its type must be int64",
            received=spec.dtype,
        )


def _check_raw_dtype(spec: FeatureSpec, received: str, allowed: tuple[str, ...]) -> None:
    if received not in allowed:
        raise InputDataError(
            f"feature {spec.name!r} reads a column whose type its encoder does not take",
            received=received,
            allowed=", ".join(allowed),
        )


class EncoderPipeline:
    """Applies a plan to Arrow batches. Built once per task; safe to share between threads.

    Args:
        plan: The encoders.
        vocabularies: Table (`token`, `id`, `count`) of each vocabulary that the plan names.
        tables: Table of each statistic that the plan names.

    Raises:
        InputDataError: The plan contradicts itself or what was fitted.
    """

    def __init__(
        self,
        plan: EncoderPlan,
        vocabularies: Mapping[str, pa.Table],
        tables: Mapping[str, pa.Table] | None = None,
    ) -> None:
        self.plan = plan
        check_plan(plan, vocabularies, tables or {})
        tokens = {
            name: TokenEncoder(plan.vocabulary(name), table) for name, table in vocabularies.items()
        }
        padded = {
            spec.name: ListTokenEncoder(tokens[spec.name], spec.pad_token)
            for spec in plan.vocabularies
            if spec.pad_token is not None
        }
        fitted = Fitted(tokens, {**tokens, **padded}, tables or {})
        self._encoders = tuple(
            _FeatureEncoder(spec, raw_inputs(spec, column), build_encoder(spec, column, fitted))
            for spec, column in zip(plan.schema.features, plan.columns, strict=True)
        )
        self.output_schema: pa.Schema = pa.schema(
            [pa.field(encoder.spec.name, encoder.output_type) for encoder in self._encoders]
        )

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Encodes a batch.

        A vocabulary gives null and unknown tokens the OOV id, inside lists too; a null list stays
        null (the feature is absent), an empty one empty. Lists longer than the feature's
        `max_len` keep their first values: histories are most recent first.

        Args:
            batch: Raw columns in any order; those that no feature reads are ignored.

        Returns:
            One column per feature, as `output_schema` says, same number of rows.

        Raises:
            InputDataError: A column is missing, of another shape, or holds a value that the
                feature's type cannot.
        """
        columns = [encoder.encode(batch) for encoder in self._encoders]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)


@dataclass(frozen=True)
class _FeatureEncoder:
    """One feature: where it comes from and what encodes it."""

    spec: FeatureSpec
    inputs: tuple[RawColumn, ...]
    encoder: RowEncoder

    @property
    def output_type(self) -> pa.DataType:
        return self.encoder.output_type

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        columns = [self._column(batch, raw) for raw in self.inputs]
        try:
            return self.encoder.encode(columns)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            names = ", ".join(repr(raw.name) for raw in self.inputs)
            raise InputDataError(
                f"column {names} holds a value that feature {self.spec.name!r} cannot",
                received=str(error),
                allowed=f"what becomes {self.output_type} without loss",
                fix="declare the column with its real type, or clean it before it is encoded",
            ) from error

    def _column(self, batch: pa.RecordBatch, raw: RawColumn) -> pa.Array:
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


def read_pipeline(
    directory: str | os.PathLike[str], features: Collection[str] | None = None
) -> EncoderPipeline:
    """Reads a pipeline: `encoders.json` and what lies beside it.

    Args:
        directory: Where they lie; a plain path or a `file:` URI.
        features: Features to make, in the plan's order; None for all.

    Raises:
        InputDataError: A file is missing or damaged, of another format version, or not the one
            that the plan was written with.
    """
    root = local_path(directory)
    plan = read_plan_file(root)
    if features is not None:
        plan = replace(
            plan,
            schema=FeatureSchema(tuple(s for s in plan.schema.features if s.name in features)),
            columns=tuple(column for column in plan.columns if column.feature in features),
        )
    return EncoderPipeline(
        plan,
        {spec.name: load_vocabulary(root, spec) for spec in plan.vocabularies},
        {spec.name: load_statistic_table(root, spec) for spec in plan.tables},
    )
