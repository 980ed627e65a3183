"""From a plan's entry to the encoder that executes it: one builder per kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from conf.encoders import ColumnEncoding, RawColumn
from conf.operations import (
    Bucketize,
    Cross,
    Cyclical,
    DatePart,
    Hash,
    MultiHot,
    Ngrams,
    Normalize,
    SparseIndices,
    Statistic,
    Weights,
)
from conf.schema import FeatureSpec
from etl.encoders.bags import MultiHotEncoder, SparseIndicesEncoder, WeightsEncoder
from etl.encoders.base import Encoder, RowEncoder
from etl.encoders.dates import CyclicalEncoder, DatePartEncoder
from etl.encoders.hashed import CrossEncoder, CrossField, HashEncoder, ListShape
from etl.encoders.identity import IdentityEncoder
from etl.encoders.lists import flatten_lists
from etl.encoders.ngrams import NgramEncoder
from etl.encoders.numbers import BucketizeEncoder, NormalizeEncoder
from etl.encoders.statistic import StatisticEncoder

RAW_TYPES: Mapping[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}


@dataclass(frozen=True)
class Fitted:
    """What encoders were fitted to.

    Attributes:
        tokens: Encoder by vocabulary.
        tables: Table of statistics by name.
    """

    tokens: Mapping[str, Encoder]
    tables: Mapping[str, pa.Table]


@dataclass(frozen=True)
class ValueEncoder:
    """An encoder of single values, applied to scalars or inside of lists.

    A null list stays null, an empty one empty; a longer one keeps its first `max_len` values.
    """

    spec: FeatureSpec
    encoder: Encoder

    @property
    def output_type(self) -> pa.DataType:
        """Type of the feature's column."""
        values = self.encoder.output_type
        return pa.list_(values) if self.spec.is_list else values

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one column `[rows]`."""
        (column,) = columns
        if not self.spec.is_list:
            return self.encoder.encode(column)
        exact_len = None if self.spec.is_ragged else self.spec.shape[0]
        lists = flatten_lists(column, self.spec.max_len, exact_len)
        # The field's own name for list elements, whatever the batch calls them.
        return lists.rebuild(self.encoder.encode(lists.values)).cast(self.output_type)


def build_encoder(spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted) -> RowEncoder:
    """Builds the encoder of a feature; the plan has been checked."""
    if column.operation is not None:
        return _BUILDERS[type(column.operation)](column.operation, spec, column, fitted)
    if column.vocabulary is not None:
        return ValueEncoder(spec, fitted.tokens[column.vocabulary])
    if spec.dtype == "bytes":
        output_type = pa.binary() if column.raw_dtype == "bytes" else pa.string()
    else:
        output_type = RAW_TYPES[spec.dtype]
    return ValueEncoder(spec, IdentityEncoder(RAW_TYPES[column.raw_dtype], output_type))


def raw_inputs(spec: FeatureSpec, column: ColumnEncoding) -> tuple[RawColumn, ...]:
    """Returns the raw columns that a feature reads."""
    return column.inputs or (RawColumn(column.column, column.raw_dtype, spec.is_list),)


def _of_values(make: Callable[[pa.DataType, Any], Encoder]) -> Callable[..., RowEncoder]:
    """A builder of what works on single values of the raw type."""

    def build(
        operation: Any, spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted
    ) -> RowEncoder:
        return ValueEncoder(spec, make(RAW_TYPES[column.raw_dtype], operation))

    return build


def _build_cross(
    operation: Cross, spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted
) -> RowEncoder:
    fields = []
    for place, raw in enumerate(column.inputs):
        raw_type, preparation = RAW_TYPES[raw.dtype], operation.preparation(place)
        encoder: Encoder | None = None
        if isinstance(preparation, Bucketize):
            encoder = BucketizeEncoder(raw_type, preparation)
        elif preparation is not None:
            encoder = DatePartEncoder(preparation)
        fields.append(CrossField(raw_type, encoder, raw.is_list))
    shape = None
    if spec.is_list:
        shape = ListShape(spec.max_len, None if spec.is_ragged else spec.shape[0])
    return CrossEncoder(tuple(fields), operation.buckets, shape)


def _build_multi_hot(
    operation: MultiHot, spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted
) -> RowEncoder:
    is_list = column.inputs[0].is_list
    weight_type = RAW_TYPES[column.inputs[1].dtype] if operation.is_weighted else None
    return MultiHotEncoder(fitted.tokens[operation.vocabulary], operation, is_list, weight_type)


def _build_weights(
    operation: Weights, spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted
) -> RowEncoder:
    weights = column.inputs[: len(column.inputs) // 2]
    types = tuple(RAW_TYPES[raw.dtype] for raw in weights)
    return WeightsEncoder(types, operation, spec.max_len)


def _build_statistic(
    operation: Statistic, spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted
) -> RowEncoder:
    return StatisticEncoder(fitted.tokens[operation.vocabulary], fitted.tables[operation.table])


_BUILDERS: Mapping[type, Callable[..., RowEncoder]] = {
    Hash: _of_values(lambda raw_type, operation: HashEncoder(raw_type, operation.buckets)),
    Bucketize: _of_values(BucketizeEncoder),
    Normalize: _of_values(NormalizeEncoder),
    DatePart: _of_values(lambda _, operation: DatePartEncoder(operation)),
    Cross: _build_cross,
    Cyclical: lambda operation, *_: CyclicalEncoder(operation),
    Ngrams: lambda operation, spec, *_: NgramEncoder(operation, spec.max_len),
    MultiHot: _build_multi_hot,
    SparseIndices: lambda operation, spec, *_: SparseIndicesEncoder(operation, spec.max_len),
    Weights: _build_weights,
    Statistic: _build_statistic,
}
