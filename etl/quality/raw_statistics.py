"""Statistics of the raw values that features are made of, gathered beside those of the features.

A scaling, the boundaries of buckets and a table of statistics are fitted anew by each build: the
same raw value becomes another one, so such features are compared by what they were made of. And
most encoders give a missing value an id or a number, so only the raw column tells nulls from
unknown tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from conf.encoders import IDENTITY, EncoderPlan
from conf.schema import FIRST_TOKEN_ID
from etl.encoders.arrow_columns import cast_values, flatten_lists
from etl.encoders.base import RAW_TYPES
from etl.encoders.pipeline import raw_inputs
from etl.quality.statistics import FeatureAccumulator, build_feature
from etl.tfrecord.types.features import is_list


@dataclass(frozen=True)
class RawFeature:
    """Where the raw values of a feature stand.

    Attributes:
        name: The feature.
        column: Its first raw column.
        value_type: Type of the column's values.
        is_list: Whether the column holds lists.
        max_len: Values of each list that the feature reads; None for all.
        keeps_values: Whether the values are kept, not only counted where they are missing.
        first_token_id: First id of a token, where ids before it are buckets of unknown ones.
    """

    name: str
    column: str
    value_type: pa.DataType
    is_list: bool
    max_len: int | None
    keeps_values: bool
    first_token_id: int | None


def plan_raw_features(plan: EncoderPlan) -> tuple[RawFeature, ...]:
    """Plans the raw statistics of all features but those that are their raw column as it is."""
    known = {vocabulary.name: vocabulary for vocabulary in plan.vocabularies}
    planned = []
    for spec, column in zip(plan.schema.features, plan.columns, strict=True):
        if column.encoder == IDENTITY:
            continue
        raw = raw_inputs(spec, column)[0]
        vocabulary = known.get(column.encoder)
        planned.append(
            RawFeature(
                name=spec.name,
                column=raw.name,
                value_type=RAW_TYPES[raw.dtype],
                is_list=raw.is_list,
                max_len=spec.max_len if spec.is_ragged else None,
                keeps_values=column.operation is not None
                and column.operation.raw_values != "counted",
                first_token_id=vocabulary.first_token_id
                if vocabulary is not None and vocabulary.oov_buckets
                else None,
            )
        )
    return tuple(planned)


class RawAccumulator:
    """Raw statistics of the records of one shard.

    Args:
        plan: The encoders that made the records.
        names: Features that the records hold.
    """

    def __init__(self, plan: EncoderPlan, names: Collection[str]) -> None:
        planned = plan_raw_features(plan)
        self._columns = [_RawColumn(feature) for feature in planned if feature.name in names]

    def update(self, source: pa.RecordBatch, records: pa.RecordBatch) -> None:
        """Adds the rows of a batch.

        Args:
            source: Raw columns, as the encoders read them.
            records: The features that were made of them, the same rows.
        """
        for column in self._columns:
            column.update(source, records)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics by feature, for `merge_statistics`.

        Per feature: `missing` (null rows), `null_values` (nulls inside of lists), `bucketed` (ids
        of OOV buckets), and where the values are kept, `values`: their statistics.
        """
        return {column.feature.name: column.to_dict() for column in self._columns}


class _RawColumn:
    def __init__(self, feature: RawFeature) -> None:
        self.feature = feature
        self._missing = self._null_values = self._bucketed = 0
        self._values: FeatureAccumulator | None = None
        if feature.keeps_values:
            data_type = feature.value_type
            kind = pa.list_(data_type) if feature.is_list else data_type
            self._values = build_feature(pa.field(feature.name, kind))

    def update(self, source: pa.RecordBatch, records: pa.RecordBatch) -> None:
        feature = self.feature
        column = source.column(source.schema.get_field_index(feature.column))
        if pt.is_null(column.type):
            kind = pa.list_(feature.value_type) if feature.is_list else feature.value_type
            column = pa.nulls(len(column), kind)
        self._missing += column.null_count
        if feature.is_list:
            self._update_lists(column)
        elif self._values is not None:
            self._values.update(cast_values(column, feature.value_type))
        if feature.first_token_id is not None:
            self._bucketed += _count_bucketed(records.column(feature.name), feature.first_token_id)

    def _update_lists(self, column: pa.Array) -> None:
        if self._values is None and not column.flatten().null_count:
            return
        lists = flatten_lists(column, self.feature.max_len)
        self._null_values += lists.values.null_count
        if self._values is not None:
            self._values.update(lists.rebuild(cast_values(lists.values, self.feature.value_type)))

    def to_dict(self) -> dict[str, Any]:
        counts = {
            "missing": self._missing,
            "null_values": self._null_values,
            "bucketed": self._bucketed,
        }
        return counts if self._values is None else {**counts, "values": self._values.to_dict()}


def _count_bucketed(ids: pa.Array, first_token_id: int) -> int:
    values = ids.flatten() if is_list(ids.type) else ids
    numbers = values.drop_null().to_numpy(zero_copy_only=False)
    return int(np.count_nonzero((numbers >= FIRST_TOKEN_ID) & (numbers < first_token_id)))
