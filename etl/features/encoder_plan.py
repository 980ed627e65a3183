"""The encoders that features ask for: operations, raw inputs, tables and the schema of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from conf.encoders import (
    IDENTITY,
    ColumnEncoding,
    EncoderPlan,
    RawColumn,
    RawDType,
    TableSpec,
    VocabularySpec,
    fold_column,
)
from conf.encoders.bags import BagWeightsConfig
from conf.encoders.declaration import Operation
from conf.encoders.hashing import CrossConfig
from conf.encoders.target import TargetConfig
from conf.encoders.tokens import IdentityConfig
from conf.etl.encodings import FeatureConfig
from conf.schema import DType, FeatureSchema, FeatureSpec
from etl.features.plan import FeaturePlan

_WIRE_DTYPES: dict[str, DType] = {
    "int64": "int64",
    "float32": "float32",
    "float64": "float32",
    "string": "bytes",
    "bytes": "bytes",
}


def build_plan(
    plan: FeaturePlan,
    vocabularies: Sequence[VocabularySpec],
    operations: Mapping[str, Operation] | None = None,
    tables: Sequence[TableSpec] = (),
) -> EncoderPlan:
    """Builds the encoder plan.

    Args:
        plan: The features.
        vocabularies: The fitted vocabularies.
        operations: Operation by feature; the others are identities and plain vocabularies.
        tables: The fitted tables of statistics.
    """
    sizes = {vocabulary.name: vocabulary.size for vocabulary in vocabularies}
    specs, columns = [], []
    for feature in plan.features:
        operation = (operations or {}).get(feature.name)
        if operation is None:
            spec, column = _plain(plan, feature, sizes)
        else:
            spec, column = _operated(plan, feature, operation)
        specs.append(spec)
        columns.append(column)
    return EncoderPlan(
        FeatureSchema(tuple(specs)), tuple(columns), tuple(vocabularies), tuple(tables)
    )


def _plain(
    plan: FeaturePlan, feature: FeatureConfig, sizes: Mapping[str, int]
) -> tuple[FeatureSpec, ColumnEncoding]:
    dtype, vocabulary = _raw_dtype(plan, feature.column), feature.vocabulary
    is_vector = feature.length is not None and isinstance(feature.encoding, IdentityConfig)
    spec = FeatureSpec(
        name=feature.name,
        dtype="int64" if vocabulary else _WIRE_DTYPES[plan.value_type(feature.column)],
        role=feature.role,
        shape=_raw_shape(plan, feature),
        max_len=feature.max_len,
        encoding=vocabulary or IDENTITY,
        vocabulary_size=sizes[vocabulary] if vocabulary else None,
        shared_embedding=vocabulary,
        pad_value=0 if vocabulary else 0.0 if is_vector and dtype.startswith("float") else None,
    )
    return spec, ColumnEncoding(feature.name, feature.column, dtype, vocabulary or IDENTITY)


def _operated(
    plan: FeaturePlan, feature: FeatureConfig, operation: Operation
) -> tuple[FeatureSpec, ColumnEncoding]:
    output, encoder = operation.output, f"{operation.kind}:{feature.name}"
    shape = _raw_shape(plan, feature) if output.shape is None else output.shape
    spec = FeatureSpec(
        name=feature.name,
        dtype=output.dtype,
        role=feature.role,
        shape=shape,
        max_len=feature.max_len if shape == (None,) else None,
        encoding=encoder,
        vocabulary_size=output.vocabulary_size,
        shared_embedding=None if output.vocabulary_size is None else feature.name,
        pad_value=output.pad_value,
    )
    inputs = plan_inputs(plan, feature)
    return spec, ColumnEncoding(
        feature.name, feature.column, inputs[0].dtype, encoder, operation, inputs
    )


def plan_inputs(plan: FeaturePlan, feature: FeatureConfig) -> tuple[RawColumn, ...]:
    """Returns the raw columns that the operation of a feature reads."""
    names = list(feature.columns)
    if isinstance(feature.encoding, BagWeightsConfig):
        names += plan.feature(feature.encoding.of).columns
    columns = [RawColumn(name, _raw_dtype(plan, name), plan.is_list(name)) for name in names]
    if isinstance(feature.encoding, TargetConfig):
        columns.append(RawColumn(fold_column(feature.encoding.folds), "int64", is_served=False))
    return tuple(columns)


def _raw_dtype(plan: FeaturePlan, column: str) -> RawDType:
    return cast(RawDType, plan.value_type(column))


def _raw_shape(plan: FeaturePlan, feature: FeatureConfig) -> tuple[int | None, ...]:
    # A cross is a list where any of its fields is.
    crosses = isinstance(feature.encoding, CrossConfig)
    columns = feature.columns if crosses else (feature.column,)
    return (feature.length,) if any(plan.is_list(column) for column in columns) else ()
