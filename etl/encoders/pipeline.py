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
from conf.encoders import ENCODERS_FILE, EncoderPlan, RawColumn
from conf.errors import InputDataError, did_you_mean
from conf.schema import FeatureSchema, FeatureSpec
from etl.encoders.base import RowEncoder
from etl.encoders.builders import RAW_TYPES, Fitted, build_encoder, raw_inputs
from etl.encoders.checks import check_plan
from etl.encoders.lists import is_list_type
from etl.encoders.tables import load_table
from etl.encoders.tokens import TokenEncoder
from etl.encoders.vocabulary import load_vocabulary


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
        fitted = Fitted(tokens, tables or {})
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
        if not pt.is_null(column.type) and is_list_type(column.type) != raw.is_list:
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
    plan = read_plan(root)
    if features is not None:
        plan = replace(
            plan,
            schema=FeatureSchema(tuple(s for s in plan.schema.features if s.name in features)),
            columns=tuple(column for column in plan.columns if column.feature in features),
        )
    return EncoderPipeline(
        plan,
        {spec.name: load_vocabulary(root, spec) for spec in plan.vocabularies},
        {spec.name: load_table(root, spec) for spec in plan.tables},
    )


def read_plan(directory: Path) -> EncoderPlan:
    """Reads `encoders.json`.

    Raises:
        InputDataError: It is missing, damaged, or of a later format version.
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
