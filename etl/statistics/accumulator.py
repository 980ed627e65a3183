"""Gathers the statistics of a shard's features, batch by batch, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from conf.errors import InputDataError
from etl.encoders.lists import is_list_type
from etl.statistics.histogram import LENGTH_BINS, length_bins, length_histogram
from etl.statistics.labels import LabelAccumulator, LabelFocus
from etl.statistics.values import BytesValues, Float32Values, Int64Values, ValueAccumulator

_PENDING_BYTES = 16 << 20
_PENDING_BATCHES = 16


class StatisticsAccumulator:
    """Statistics of every feature of one shard.

    Args:
        schema: Types of the features: integers, booleans, floats, decimals, strings, binaries,
            and lists of them.
        focus: The label that features are compared with, or None.

    Raises:
        InputDataError: A feature is of another type.
    """

    def __init__(self, schema: pa.Schema, focus: LabelFocus | None = None) -> None:
        self._by_label = None if focus is None else LabelAccumulator(schema, focus)
        self._features = {field.name: _build_feature(field) for field in schema}
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0

    def update(self, batch: pa.RecordBatch) -> None:
        """Adds the rows of a batch; holds on to it until some more have come.

        Args:
            batch: Columns as in `schema`.
        """
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= _PENDING_BYTES or len(self._pending) >= _PENDING_BATCHES:
            self._flush()

    def _flush(self) -> None:
        # Feature by feature, so that each feature's counters are fetched into the cache once.
        for name, feature in self._features.items():
            for batch in self._pending:
                feature.update(batch.column(name))
        if self._by_label is not None:
            for batch in self._pending:
                self._by_label.update(batch)
        self._pending, self._pending_bytes = [], 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics by feature, as JSON values; `merge_statistics` takes them.

        Per feature: `dtype`, `rows`, `missing` (null), `values` (list elements counted one by
        one), and by type: `zeros`, `oov` (ids equal to 1), `nan`, `infinite`, `min`, `max`,
        `mean`, `std` (of the finite values), `histogram`; `distinct` and `top` with whether they
        are exact; `quantiles` of numbers; `length` for lists; `sketch`, `summary` and `by_label`,
        which only merging reads.
        """
        self._flush()
        found = {name: feature.to_dict() for name, feature in self._features.items()}
        for name, comparison in (self._by_label.to_dict() if self._by_label else {}).items():
            found[name]["by_label"] = comparison
        return found


class _Scalars:
    def __init__(self, values: ValueAccumulator) -> None:
        self._values = values
        self._rows = self._missing = 0

    def update(self, column: pa.Array) -> None:
        self._rows += len(column)
        self._missing += column.null_count
        self._values.update(_without_nulls(column))

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self._values.dtype,
            "rows": self._rows,
            "missing": self._missing,
            "values": self._rows - self._missing,
            **self._values.to_dict(),
        }


class _Lists:
    def __init__(self, values: ValueAccumulator) -> None:
        self._values = values
        self._rows = self._missing = self._count = 0
        self._total_length = 0
        self._shortest: int | None = None
        self._longest: int | None = None
        self._bins = np.zeros(LENGTH_BINS, np.int64)

    def update(self, column: pa.Array) -> None:
        self._rows += len(column)
        self._missing += column.null_count
        lengths = _without_nulls(pc.list_value_length(column)).to_numpy(zero_copy_only=True)
        if len(lengths):
            shortest, longest = int(lengths.min()), int(lengths.max())
            self._shortest = min(shortest, shortest if self._shortest is None else self._shortest)
            self._longest = max(longest, longest if self._longest is None else self._longest)
            self._total_length += int(lengths.sum())
            self._bins += length_bins(lengths)
        values = _without_nulls(column.flatten())
        self._count += len(values)
        self._values.update(values)

    def to_dict(self) -> dict[str, Any]:
        present = self._rows - self._missing
        return {
            "dtype": self._values.dtype,
            "rows": self._rows,
            "missing": self._missing,
            "values": self._count,
            **self._values.to_dict(),
            "length": {
                "min": self._shortest,
                "max": self._longest,
                "mean": self._total_length / present if present else None,
                "total": self._total_length,
                "histogram": length_histogram(self._bins),
            },
        }


def _without_nulls(values: pa.Array) -> pa.Array:
    return values.drop_null() if values.null_count else values


def _build_feature(field: pa.Field) -> _Scalars | _Lists:
    if is_list_type(field.type):
        return _Lists(_build_values(field.name, field.type.value_type))
    return _Scalars(_build_values(field.name, field.type))


def _build_values(name: str, data_type: pa.DataType) -> ValueAccumulator:
    if pt.is_integer(data_type) or pt.is_boolean(data_type):
        return Int64Values()
    if pt.is_floating(data_type) or pt.is_decimal(data_type):
        return Float32Values()
    if any(
        is_type(data_type)
        for is_type in (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary)
    ):
        return BytesValues()
    raise InputDataError(
        f"there are no statistics for feature {name!r}",
        received=data_type,
        allowed="integers, booleans, floats, decimals, strings, binaries, and lists of them",
    )
