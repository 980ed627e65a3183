"""The encoder pipeline: a batch of raw columns in, a batch of features out, in one pass."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.types as pt

from conf.dataset import local_path
from conf.encoders import ENCODERS_FILE, IDENTITY, ColumnEncoding, EncoderPlan
from conf.errors import InputDataError, did_you_mean
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.base import Encoder
from etl.encoders.identity import IdentityEncoder
from etl.encoders.lists import flatten_lists, is_list_type
from etl.encoders.lookup import TokenLookup, build_lookup
from etl.encoders.vocabulary import load_vocabulary

_RAW_TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_RAW_DTYPES_OF_TOKENS = {"int64": ("int64",), "string": ("string", "bytes")}


class EncoderPipeline:
    """Applies a plan to Arrow batches. Built once per task; safe to share between threads.

    Args:
        plan: The encoders.
        vocabularies: Table (`token`, `id`, `count`) of each vocabulary that the plan names.

    Raises:
        InputDataError: The plan contradicts itself or the vocabularies.
    """

    def __init__(self, plan: EncoderPlan, vocabularies: Mapping[str, pa.Table]) -> None:
        self.plan = plan
        _check_plan(plan, vocabularies)
        lookups = {name: build_lookup(table["token"]) for name, table in vocabularies.items()}
        self._encoders = tuple(
            _build_column_encoder(spec, column, lookups)
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
class _ColumnEncoder:
    """One feature: where it comes from and what encodes its values."""

    spec: FeatureSpec
    column: str
    encoder: Encoder

    @property
    def output_type(self) -> pa.DataType:
        values = self.encoder.output_type
        return pa.list_(values) if self.spec.is_list else values

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        column = self._column(batch)
        try:
            if not self.spec.is_list:
                return self.encoder.encode(column)
            if pt.is_null(column.type):
                return pa.nulls(len(column), self.output_type)
            exact_len = None if self.spec.is_ragged else self.spec.shape[0]
            lists = flatten_lists(column, self.spec.max_len, exact_len)
            # The field's own name for list elements, whatever the batch calls them.
            return lists.rebuild(self.encoder.encode(lists.values)).cast(self.output_type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputDataError(
                f"column {self.column!r} holds a value that feature {self.spec.name!r} cannot",
                received=str(error),
                allowed=f"what becomes {self.output_type} without loss",
                fix="declare the column with its real type, or clean it before it is encoded",
            ) from error

    def _column(self, batch: pa.RecordBatch) -> pa.Array:
        found = batch.schema.get_all_field_indices(self.column)
        if len(found) != 1:
            raise InputDataError(
                f"feature {self.spec.name!r} needs exactly one column {self.column!r}",
                received=f"{len(found)} such columns among {', '.join(batch.schema.names)}",
                fix=did_you_mean(self.column, batch.schema.names),
            )
        column = batch.column(found[0])
        if not pt.is_null(column.type) and is_list_type(column.type) != self.spec.is_list:
            raise InputDataError(
                f"column {self.column!r} has another shape than feature {self.spec.name!r}",
                received=column.type,
                allowed="a list column" if self.spec.is_list else "a scalar column",
            )
        return column


def read_pipeline(
    directory: str | os.PathLike[str], features: Collection[str] | None = None
) -> EncoderPipeline:
    """Reads a pipeline: `encoders.json` and the vocabularies beside it.

    Args:
        directory: Where they lie; a plain path or a `file:` URI.
        features: Features to make, in the plan's order; None for all.

    Raises:
        InputDataError: A file is missing or damaged, of another format version, or not the one
            that the plan was written with.
    """
    root = local_path(directory)
    plan = read_plan(root)
    if features is not None:
        plan = replace(
            plan,
            schema=FeatureSchema(tuple(s for s in plan.schema.features if s.name in features)),
            columns=tuple(column for column in plan.columns if column.feature in features),
        )
    return EncoderPipeline(
        plan, {spec.name: load_vocabulary(root, spec) for spec in plan.vocabularies}
    )


def read_plan(directory: Path) -> EncoderPlan:
    """Reads the plan of a directory of encoders.

    Raises:
        InputDataError: `encoders.json` is missing, damaged or of another format version.
    """
    path = directory / ENCODERS_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputDataError(
            f"cannot read the encoders of a dataset: {path}",
            received=error,
            fix="build the dataset again; earlier versions are untouched",
        ) from error
    if not isinstance(data, dict):
        raise InputDataError(f"{path} is no JSON object", received=type(data).__name__)
    return EncoderPlan.from_json(data)


def _build_column_encoder(
    spec: FeatureSpec, column: ColumnEncoding, lookups: Mapping[str, TokenLookup]
) -> _ColumnEncoder:
    raw_type = _RAW_TYPES[column.raw_dtype]
    if column.encoder != IDENTITY:
        return _ColumnEncoder(spec, column.column, lookups[column.encoder])
    if spec.dtype == "bytes":
        output_type = pa.binary() if column.raw_dtype == "bytes" else pa.string()
    else:
        output_type = _RAW_TYPES[spec.dtype]
    return _ColumnEncoder(spec, column.column, IdentityEncoder(raw_type, output_type))


def _check_plan(plan: EncoderPlan, vocabularies: Mapping[str, pa.Table]) -> None:
    features = [column.feature for column in plan.columns]
    if features != list(plan.schema.names) or len(set(features)) != len(features):
        raise InputDataError(
            "the encoders' columns do not match the features one for one",
            received=", ".join(features),
            allowed=", ".join(plan.schema.names),
        )
    named = {spec.name: spec for spec in plan.vocabularies}
    if named.keys() != vocabularies.keys():
        raise InputDataError(
            "the vocabularies are not those that the plan names",
            received=", ".join(sorted(vocabularies)) or "none",
            allowed=", ".join(sorted(named)) or "none",
        )
    for spec, column in zip(plan.schema.features, plan.columns, strict=True):
        if column.encoder == IDENTITY:
            allowed: tuple[str, ...] = tuple(_RAW_TYPES)
        elif column.encoder in named:
            allowed = _RAW_DTYPES_OF_TOKENS[named[column.encoder].token_dtype]
        else:
            raise InputDataError(
                f"feature {spec.name!r} has an unknown encoder",
                received=column.encoder,
                fix=did_you_mean(column.encoder, [IDENTITY, *named]),
            )
        if column.raw_dtype not in allowed:
            raise InputDataError(
                f"feature {spec.name!r} reads a column whose type its encoder does not take",
                received=column.raw_dtype,
                allowed=", ".join(allowed),
            )
        if column.encoder != IDENTITY and spec.dtype != "int64":
            raise InputDataError(
                f"feature {spec.name!r} has a vocabulary, so its type must be int64",
                received=spec.dtype,
            )
