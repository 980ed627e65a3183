"""Checks of a plan against itself and what was fitted, before a row is encoded."""

from __future__ import annotations

from collections.abc import Collection

from conf.encoders import IDENTITY, ColumnEncoding, EncoderPlan
from conf.errors import InputDataError, did_you_mean
from conf.schema import FeatureSpec
from etl.encoders.builders import RAW_TYPES

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
