"""The encoder pipeline: a batch of raw columns in, a batch of features out, in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.types as pt

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.declaration import Operation
from conf.encoders.hashing import Cross, Hash
from conf.encoders.numbers import Bucketize, IsMissing, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams
from conf.errors import InputDataError, did_you_mean
from conf.local_paths import local_path
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.arrow_columns import RAW_TYPES, Encoder, build_lists, cast_values, flatten_lists
from etl.encoders.bags import (
    LengthEncoder,
    MultiHotEncoder,
    SparseIndicesEncoder,
    VectorBytesEncoder,
    WeightsEncoder,
)
from etl.encoders.hashing import CrossEncoder, CrossField, HashEncoder, ListShape, NgramEncoder
from etl.encoders.numbers import (
    BucketizeEncoder,
    CyclicalEncoder,
    DatePartEncoder,
    MissingEncoder,
    NormalizeEncoder,
)
from etl.encoders.token_lookup import (
    JoinedTokenEncoder,
    ListTokenEncoder,
    StatisticEncoder,
    TokenEncoder,
    found_column,
)
from etl.encoders.vocabulary import load_statistic_table, load_vocabulary
from etl.tfrecord.types.features import is_list


class RowEncoder(Protocol):
    """Turns whole raw columns `[rows]`, in the plan's order, into one feature `[rows]`.

    A value that it cannot take raises `pa.ArrowInvalid`; who calls names the column.
    """

    @property
    def output_type(self) -> pa.DataType: ...

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array: ...


@dataclass(frozen=True)
class Fitted:
    """What encoders were fitted to: by vocabulary the encoder of tokens, by name the tables."""

    tokens: Mapping[str, Encoder]
    list_tokens: Mapping[str, Encoder]  # of the values of lists
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
        shape = ListShape.of(self.spec)
        values, rows = flatten_lists(column, shape.max_len, shape.exact_len)
        return build_lists(rows, self.encoder.encode(values))


@dataclass(frozen=True)
class IdentityEncoder:
    """Casts values to the declared raw type, as a served model does, then to the feature's."""

    raw_type: pa.DataType
    output_type: pa.DataType

    def encode(self, values: pa.Array) -> pa.Array:
        """Casts values `[values]`; null stays null."""
        return cast_values(cast_values(values, self.raw_type), self.output_type)


_OF_VALUES: Mapping[type[Operation], Callable[[pa.DataType, Any], Encoder]] = {
    Bucketize: BucketizeEncoder,
    DatePart: DatePartEncoder,
    Hash: HashEncoder,
    IsMissing: MissingEncoder,
    Normalize: NormalizeEncoder,
}


def build_encoder(spec: FeatureSpec, column: ColumnEncoding, fitted: Fitted) -> RowEncoder:
    """Builds the encoder of a feature."""
    operation, raw_type = column.operation, RAW_TYPES[column.raw_dtype]
    if operation is not None and type(operation) in _OF_VALUES:
        return ValueEncoder(spec, _OF_VALUES[type(operation)](raw_type, operation))
    if operation is not None:
        return _build_row_encoder(operation, spec, column.inputs, fitted)
    if column.vocabulary is not None:
        tokens = fitted.list_tokens if spec.is_list else fitted.tokens
        return ValueEncoder(spec, tokens[column.vocabulary])
    if spec.dtype == "bytes":
        output_type = pa.binary() if column.raw_dtype == "bytes" else pa.string()
    else:
        output_type = RAW_TYPES[spec.dtype]
    return ValueEncoder(spec, IdentityEncoder(raw_type, output_type))


def _build_row_encoder(
    operation: Operation, spec: FeatureSpec, inputs: Sequence[RawColumn], fitted: Fitted
) -> RowEncoder:
    types = tuple(RAW_TYPES[raw.dtype] for raw in inputs)
    match operation:
        case Cross():
            return _build_cross(operation, spec, inputs)
        case Cyclical():
            return CyclicalEncoder(operation)
        case Length():
            return LengthEncoder(operation)
        case MultiHot():
            tokens = fitted.tokens[operation.vocabulary]
            return MultiHotEncoder(tokens, operation, inputs[0].is_list, types[1:])
        case Ngrams():
            return NgramEncoder(operation, spec.max_len)
        case SparseIndices():
            return SparseIndicesEncoder(operation, spec.max_len)
        case Statistic():
            tokens = fitted.tokens[operation.vocabulary]
            return StatisticEncoder(tokens, fitted.tables[operation.table])
        case VectorBytes():
            return VectorBytesEncoder(types[0], operation)
        case Weights():
            return WeightsEncoder(types[: len(types) // 2], operation, spec.max_len)
    raise NotImplementedError(f"nothing encodes {operation.kind!r}")


def _build_cross(operation: Cross, spec: FeatureSpec, inputs: Sequence[RawColumn]) -> CrossEncoder:
    fields = []
    for number, raw in enumerate(inputs):
        raw_type, own = RAW_TYPES[raw.dtype], operation.preparation(number)
        encoder = None if own is None else _OF_VALUES[type(own)](raw_type, own)
        fields.append(CrossField(raw_type, encoder, raw.is_list))
    shape = ListShape.of(spec) if spec.is_list else None
    return CrossEncoder(tuple(fields), operation.buckets, shape)


def raw_inputs(spec: FeatureSpec, column: ColumnEncoding) -> tuple[RawColumn, ...]:
    """Returns the raw columns that a feature reads."""
    return column.inputs or (RawColumn(column.column, column.raw_dtype, spec.is_list),)


def _find_inputs(
    spec: FeatureSpec, column: ColumnEncoding, joined: Collection[str]
) -> tuple[RawColumn, ...]:
    """The columns that a feature is made of: of a joined vocabulary what was found of tokens."""
    first, *others = raw_inputs(spec, column)
    if column.vocabulary is not None and column.vocabulary in joined:
        first = replace(first, name=found_column(column.vocabulary, first.name))
    return (first, *others)


class EncoderPipeline:
    """Applies a plan to Arrow batches. Built once per task; safe to share between threads.

    It takes the table of each statistic that the plan names and of each vocabulary, but for those
    that are `joined`: a join has looked their tokens up (`etl.encoders.joined_vocabulary`).
    """

    def __init__(
        self,
        plan: EncoderPlan,
        vocabularies: Mapping[str, pa.Table],
        tables: Mapping[str, pa.Table] | None = None,
        joined: Collection[str] = (),
    ) -> None:
        self.plan = plan
        tokens: dict[str, Encoder] = {
            name: TokenEncoder.of(plan.vocabulary(name), table)
            for name, table in vocabularies.items()
        }
        tokens |= {n: JoinedTokenEncoder(plan.vocabulary(n).oov_buckets) for n in joined}
        padded = {
            spec.name: ListTokenEncoder(tokens[spec.name], spec.pad_token)
            for spec in plan.vocabularies
            if spec.pad_token is not None
        }
        fitted = Fitted(tokens, {**tokens, **padded}, tables or {})
        self._encoders = tuple(
            _FeatureEncoder(
                spec, _find_inputs(spec, column, joined), build_encoder(spec, column, fitted)
            )
            for spec, column in zip(plan.schema.features, plan.columns, strict=True)
        )
        self.output_schema: pa.Schema = pa.schema(
            [pa.field(made.spec.name, made.encoder.output_type) for made in self._encoders]
        )

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Encodes a batch.

        A vocabulary gives null and unknown tokens the OOV id, inside lists too; a null list stays
        null (the feature is absent), an empty one empty. Lists longer than the feature's
        `max_len` keep their first values: histories are most recent first.

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

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        columns = [self._column(batch, raw) for raw in self.inputs]
        try:
            return self.encoder.encode(columns)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            names = ", ".join(repr(raw.name) for raw in self.inputs)
            raise InputDataError(
                f"column {names} holds a value that feature {self.spec.name!r} cannot",
                received=str(error),
                allowed=f"what becomes {self.encoder.output_type} without loss",
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
    directory: str | os.PathLike[str],
    features: Collection[str] | None = None,
    joined: Collection[str] = (),
) -> EncoderPipeline:
    """Reads a pipeline: `encoders.json` and what lies beside it.

    Args:
        directory: Where they lie; a plain path or a `file:` URI.
        features: Features to make, in the plan's order; None for all.
        joined: Vocabularies whose tokens were looked up before; their files are not read.

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
        {s.name: load_vocabulary(root, s) for s in plan.vocabularies if s.name not in joined},
        {spec.name: load_statistic_table(root, spec) for spec in plan.tables},
        joined,
    )
