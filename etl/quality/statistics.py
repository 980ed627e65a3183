"""Statistics of features: gathered per shard in the encoding pass, merged by the driver.

What is kept of each type of value is in `value_statistics.py`; quantiles and distinct counts are
sketches (`sketches.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from conf.errors import InputDataError
from conf.manifest import WEIGHTED_MEAN
from conf.schema import FeatureSchema
from conf.splits import CATALOG, USERS
from etl.quality.label_statistics import (
    LabelAccumulator,
    LabelFocus,
    WeightedSums,
    merge_comparisons,
    summarize_comparison,
)
from etl.quality.sketches import (
    FrequencySketch,
    QuantileSummary,
    merge_sketches,
    merge_summaries,
    summarize_counted,
)
from etl.quality.value_statistics import (
    LENGTH_BINS,
    BytesValues,
    Float32Values,
    Int64Values,
    RunningMoments,
    ValueAccumulator,
    length_bins,
    length_histogram,
    merge_histograms,
)
from etl.tfrecord.types.features import is_list

_PENDING_BYTES = 16 << 20
_PENDING_BATCHES = 16


class RawStatistics(Protocol):
    """Collects what is to be known of the raw columns that records are made of."""

    def update(self, source: pa.RecordBatch, records: pa.RecordBatch) -> None:
        """Takes rows in: raw columns, and the features that were made of them."""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics by feature, as JSON values."""


class StatisticsAccumulator:
    """Statistics of every feature of one shard.

    Args:
        schema: Types of the features: integers, booleans, floats, decimals, strings, binaries,
            and lists of them.
        focus: The label that features are compared with, or None.
        raw: Statistics of the raw columns, or None; then each update brings these.

    Raises:
        InputDataError: A feature is of another type.
    """

    def __init__(
        self,
        schema: pa.Schema,
        focus: LabelFocus | None = None,
        raw: RawStatistics | None = None,
    ) -> None:
        self._by_label = None if focus is None else LabelAccumulator(schema, focus)
        self._weighted = None if focus is None else WeightedSums(schema, focus)
        self._features = {field.name: build_feature(field) for field in schema}
        self._raw = raw
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Adds the rows of a batch; holds on to it until some more have come.

        Args:
            batch: Columns as in `schema`.
            source: The raw columns that the rows were made of, where they are known.
        """
        if self._raw is not None and source is not None:
            self._raw.update(source, batch)
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
        if self._weighted is not None:
            for batch in self._pending:
                self._weighted.update(batch)
        self._pending, self._pending_bytes = [], 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics by feature, as JSON values; `merge_statistics` takes them.

        Per feature: `dtype`, `rows`, `missing` (null), `values` (list elements counted one by
        one), and by type: `zeros`, `oov` (ids equal to 1), `nan`, `infinite`, `min`, `max`,
        `mean`, `std` (of the finite values), `histogram`; `distinct` and `top` with whether they
        are exact; `quantiles` of numbers; `length` for lists; `raw` of the raw column;
        `weighted` of labels; `sketch`, `summary` and `by_label`, which only merging reads.
        """
        self._flush()
        features = {name: feature.to_dict() for name, feature in self._features.items()}
        for name, raw in (self._raw.to_dict() if self._raw else {}).items():
            features[name][_RAW] = raw
        for name, comparison in (self._by_label.to_dict() if self._by_label else {}).items():
            features[name]["by_label"] = comparison
        for name, sums in (self._weighted.to_dict() if self._weighted else {}).items():
            features[name][_WEIGHTED] = sums
        return features


class FeatureAccumulator(Protocol):
    """Statistics of one feature."""

    def update(self, column: pa.Array) -> None:
        """Adds the rows of a column."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON values."""


class _ScalarAccumulator:
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


class _ListAccumulator:
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


def build_feature(field: pa.Field) -> FeatureAccumulator:
    """Builds the statistics of a feature.

    Args:
        field: Its name and type; see `StatisticsAccumulator`.

    Raises:
        InputDataError: It is of a type without statistics.
    """
    if is_list(field.type):
        return _ListAccumulator(_build_values(field.name, field.type.value_type))
    return _ScalarAccumulator(_build_values(field.name, field.type))


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


_ADDED = ("rows", "missing", "values", "zeros", "oov", "nan", "infinite")
_SKETCH, _SUMMARY, _BY_LABEL, _RAW = "sketch", "summary", "by_label", "raw"
_WEIGHTED = "weighted"
_OPAQUE = (_SKETCH, _SUMMARY, _BY_LABEL, _RAW, _WEIGHTED)
_RAW_COUNTS = ("missing", "null_values", "bucketed")


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges statistics; counts and histograms come out as from one pass over all rows.

    Mean and standard deviation agree with one pass to rounding. Merge in the order of the
    shards, and the result is the same in each run.

    Args:
        parts: What `StatisticsAccumulator.to_dict` or this function returned.

    Returns:
        Statistics by feature, in the same form; empty where there are no parts.

    Raises:
        InputDataError: The parts have different features, or were summarised before.
    """
    if not parts:
        return {}
    names = list(parts[0])
    for part in parts[1:]:
        if list(part) != names:
            raise InputDataError(
                "statistics of different features cannot be merged",
                received=", ".join(part),
                allowed=", ".join(names),
            )
    return {name: _merge_feature(name, [part[name] for part in parts]) for name in names}


def count_labelled(
    statistics: Mapping[str, Mapping[str, Any]], schema: FeatureSchema
) -> dict[str, dict[str, int]]:
    """Counts the records that have each of several labels, by label and split."""
    labels = [spec.name for spec in schema.by_role("label")]
    return {
        label: {
            split: int(found[label]["values"])
            for split, found in statistics.items()
            if label in found and split not in (CATALOG, USERS)
        }
        for label in (labels if len(labels) > 1 else ())
    }


def summarize_statistics(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what only merging needs.

    Args:
        merged: Statistics by feature.

    Returns:
        The same without `sketch` and `summary`, with `label` for `by_label`, `weighted_mean` for
        `weighted`, and of `raw` the counts alone: small enough for a manifest.
    """
    return {name: _summarize_feature(feature) for name, feature in merged.items()}


def _summarize_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    summary = {key: value for key, value in feature.items() if key not in _OPAQUE}
    if _BY_LABEL in feature:
        summary["label"] = summarize_comparison(feature[_BY_LABEL])
    if _WEIGHTED in feature:
        sums = feature[_WEIGHTED]
        summary[WEIGHTED_MEAN] = sums["total"] / sums["weights"] if sums["weights"] else None
    if _RAW in feature:
        raw = feature[_RAW]
        summary[_RAW] = {key: raw[key] for key in _RAW_COUNTS}
        summary[_RAW]["nan"] = raw.get("values", {}).get("nan", 0)
    return summary


def _merge_feature(name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kinds = {(part["dtype"], "length" in part) for part in parts}
    if len(kinds) > 1 or not all(_SKETCH in part for part in parts):
        raise InputDataError(
            f"statistics of feature {name!r} cannot be merged",
            received=", ".join(sorted(str(dtype) for dtype, _ in kinds)),
            allowed="one type, with the `sketch` that summarising drops",
        )
    merged: dict[str, Any] = {"dtype": parts[0]["dtype"]}
    merged |= {key: sum(part[key] for part in parts) for key in _ADDED if key in parts[0]}
    if "mean" in parts[0]:
        merged |= _merge_moments(parts)
    if "histogram" in parts[0]:
        merged["histogram"] = merge_histograms([part["histogram"] for part in parts])
    sketch = merge_sketches([FrequencySketch.loads(part[_SKETCH]) for part in parts])
    merged |= sketch.to_json()
    if _SUMMARY in parts[0]:
        summaries = [QuantileSummary.loads(part[_SUMMARY]) for part in parts]
        merged |= (summarize_counted(sketch) or merge_summaries(summaries)).to_json()
    if "length" in parts[0]:
        merged["length"] = _merge_lengths(parts, merged["rows"] - merged["missing"])
    if all(_BY_LABEL in part for part in parts):
        merged[_BY_LABEL] = merge_comparisons([part[_BY_LABEL] for part in parts])
    # Shards that an earlier release wrote have none: then the whole has none.
    if all(_WEIGHTED in part for part in parts):
        sums = [part[_WEIGHTED] for part in parts]
        merged[_WEIGHTED] = {key: sum(s[key] for s in sums) for key in ("weights", "total")}
    if all(_RAW in part for part in parts):
        merged[_RAW] = _merge_raw(name, [part[_RAW] for part in parts])
    return merged


def _merge_raw(name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {key: sum(part[key] for part in parts) for key in _RAW_COUNTS}
    if all("values" in part for part in parts):
        merged["values"] = _merge_feature(name, [part["values"] for part in parts])
    return merged


def _merge_moments(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = RunningMoments()
    for part in parts:
        count = part["values"] - part.get("nan", 0) - part.get("infinite", 0)
        merged = merged.merge(RunningMoments.from_json(count, part))
    return merged.to_json()


def _merge_lengths(parts: Sequence[Mapping[str, Any]], present: int) -> dict[str, Any]:
    lengths = [part["length"] for part in parts]
    known = [length for length in lengths if length["min"] is not None]
    total = sum(length["total"] for length in lengths)
    return {
        "min": min((length["min"] for length in known), default=None),
        "max": max((length["max"] for length in known), default=None),
        "mean": total / present if present else None,
        "total": total,
        "histogram": merge_histograms([length["histogram"] for length in lengths]),
    }
