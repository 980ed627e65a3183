"""Statistics of features: gathered per shard in the encoding pass, merged by the driver.

The values of some batches are counted at once; all else follows from the distinct values and
their counts. A scaling, boundaries of buckets and a table of statistics are fitted anew by each
build, and most encoders give a missing value an id or a number: so the raw column that a feature
was made of is described beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from conf.encoders import IDENTITY, EncoderPlan
from conf.errors import InputDataError
from conf.manifest import WEIGHTED_MEAN
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSchema
from conf.splits import CATALOG, USERS
from etl.encoders.arrow_columns import RAW_TYPES, build_lists, cast_values, flatten_lists
from etl.encoders.pipeline import raw_inputs
from etl.quality.label_statistics import (
    COMPARED_ROWS,
    Comparison,
    LabelFocus,
    is_numeric,
    readable,
    sum_weighted,
    to_floats,
)
from etl.quality.sketches import (
    ENTRIES,
    FrequencySketch,
    Moments,
    QuantileSummary,
    count_ordered,
)
from etl.tfrecord.types.features import is_bytes, is_list, is_text

DENSE_VALUES = 1 << 16
"""Integers from 0 up to here are counted in an array: ids, as frequency orders them, mostly are."""
UNSCALED = 10
"""Mean or deviation beyond which a number is far from 1, where weights are drawn for."""
_PENDING_BYTES = 1 << 24
_PENDING_PARTS = 16
_COUNTS = ("rows", "missing", "values", "zeros", "oov", "nan", "infinite")
_RAW_COUNTS = ("missing", "null_values", "bucketed")
"""Null rows, nulls inside of lists, ids of OOV buckets."""
_LENGTH_BINS = 33


def _given(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


@dataclass(frozen=True)
class Numbers:
    """Finite numbers of a feature."""

    moments: Moments
    low: float | None
    high: float | None
    summary: QuantileSummary

    @classmethod
    def of(cls, values: np.ndarray, counts: np.ndarray) -> Numbers:
        """Describes distinct numbers, rising, that occur so many times."""
        low, high = (values[0].item(), values[-1].item()) if len(values) else (None, None)
        exact = values.astype(np.float64, copy=False)
        moments = Moments.of(exact[None], counts)
        return cls(moments, low, high, QuantileSummary(exact, counts).cut(ENTRIES))

    @classmethod
    def merge(cls, parts: Sequence[Numbers]) -> Numbers:
        return cls(
            Moments.merge([part.moments for part in parts]),
            min(_given(part.low for part in parts), default=None),
            max(_given(part.high for part in parts), default=None),
            QuantileSummary.merge([part.summary for part in parts]),
        )

    def to_json(self) -> dict[str, Any]:
        count, mean, std = self.moments.count, None, None
        if count:
            mean = float(self.moments.mean[0])
            std = math.sqrt(self.moments.scatter[0, 0] / count)
        extremes = {"min": self.low, "max": self.high}
        return {**extremes, "mean": mean, "std": std, **self.summary.to_json()}

    @classmethod
    def from_json(cls, count: int, data: Mapping[str, Any]) -> Numbers:
        mean, std = np.array([data["mean"] or 0.0]), data["std"] or 0.0
        moments = Moments(count, mean, np.array([[std * std * count]]))
        return cls(moments, data["min"], data["max"], QuantileSummary.loads(data["summary"]))


@dataclass(frozen=True)
class Lengths:
    """Lengths of lists; the bins are by their number of binary digits: 0, 1, 2-3, 4-7, ..."""

    low: int | None
    high: int | None
    total: int
    bins: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        bins = np.bincount(np.frexp(lengths)[1], minlength=_LENGTH_BINS)
        low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (None, None)
        return cls(low, high, int(lengths.sum()), bins)

    @classmethod
    def merge(cls, parts: Sequence[Lengths]) -> Lengths:
        return cls(
            min(_given(part.low for part in parts), default=None),
            max(_given(part.high for part in parts), default=None),
            sum(part.total for part in parts),
            np.sum([part.bins for part in parts], axis=0),
        )

    def to_json(self) -> dict[str, Any]:
        lists, filled = int(self.bins.sum()), np.flatnonzero(self.bins).tolist()
        return {
            "min": self.low,
            "max": self.high,
            "mean": self.total / lists if lists else None,
            "total": self.total,
            "histogram": [
                {"low": (1 << k) >> 1, "high": (1 << k) - 1, "count": int(self.bins[k])}
                for k in filled
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lengths:
        bins = np.zeros(_LENGTH_BINS, np.int64)
        for item in data["histogram"]:
            bins[item["high"].bit_length()] = item["count"]
        return cls(data["min"], data["max"], data["total"], bins)


@dataclass(frozen=True)
class RawStatistics:
    """The raw column of a feature: counts by `_RAW_COUNTS`, and its values where they are kept."""

    counts: Mapping[str, int]
    values: FeatureStatistics | None

    @classmethod
    def merge(cls, parts: Sequence[RawStatistics]) -> RawStatistics:
        values = _merge(FeatureStatistics, [part.values for part in parts])
        return cls(_add_counts([part.counts for part in parts]), values)


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of one feature.

    Attributes:
        dtype: `int64`, `float32` or `bytes`.
        counts: `rows`, `missing` (null), `values` (list elements counted one by one), and by type
            `zeros`, `oov` (ids equal to 1), `nan`, `infinite`.
        frequencies: Its values, finite ones alone.
        numbers: The same as numbers, or None for texts.
        lengths: Of a list.
        comparison: With the label.
        weighted: Of a label: the sum of the rows' weights, and of weight times value.
        raw: The raw column that it was made of.
    """

    dtype: str
    counts: Mapping[str, int]
    frequencies: FrequencySketch
    numbers: Numbers | None = None
    lengths: Lengths | None = None
    comparison: Comparison | None = None
    weighted: tuple[float, float] | None = None
    raw: RawStatistics | None = None

    @classmethod
    def of(cls, name: str, column: pa.Array) -> FeatureStatistics:
        """Describes some rows of a feature."""
        counts, lengths = {"rows": len(column), "missing": column.null_count}, None
        if is_list(column.type):
            lengths = Lengths.of(pc.list_value_length(column).drop_null().to_numpy())
            column = column.flatten()
        values = column.drop_null()
        counts["values"] = len(values)
        dtype = find_dtype(name, column.type)
        if dtype == "bytes":
            return cls(dtype, counts, _count_texts(values), lengths=lengths)
        data_type = pa.int64() if dtype == "int64" else pa.float32()
        found, times, unfinite = count_numbers(values.cast(data_type, safe=False).to_numpy())
        counts |= {**unfinite, "zeros": int(times[found == 0].sum())}
        if dtype == "int64":
            counts["oov"] = int(times[found == OOV_ID].sum())
        sketch = FrequencySketch.of(pa.array(found), times)
        return cls(dtype, counts, sketch, Numbers.of(found, times), lengths)

    @classmethod
    def merge(cls, parts: Sequence[FeatureStatistics]) -> FeatureStatistics:
        """Merges statistics; counts come out as from one pass over all rows.

        Mean and deviation agree with one pass to rounding. Merge in the order of the shards, and
        the result is the same in each run.
        """
        weighted = _given(part.weighted for part in parts)
        return cls(
            parts[0].dtype,
            _add_counts([part.counts for part in parts]),
            FrequencySketch.merge([part.frequencies for part in parts]),
            _merge(Numbers, [part.numbers for part in parts]),
            _merge(Lengths, [part.lengths for part in parts]),
            _merge(Comparison, [part.comparison for part in parts]),
            (sum(w for w, _ in weighted), sum(t for _, t in weighted)) if weighted else None,
            _merge(RawStatistics, [part.raw for part in parts]),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as JSON values.

        `dtype` and the counts; `min`, `max`, `mean`, `std` (of the finite values) and `quantiles`
        of numbers; `distinct` and `top` with whether they are exact; `length` of lists; `raw` of
        the raw column; `sketch`, `summary`, `by_label` and `weighted`, which only merging reads.
        """
        data = {"dtype": self.dtype, **self.counts, **self.frequencies.to_json()}
        data |= {} if self.numbers is None else self.numbers.to_json()
        data |= {} if self.lengths is None else {"length": self.lengths.to_json()}
        data |= {} if self.comparison is None else {"by_label": self.comparison.to_json()}
        if self.weighted is not None:
            data["weighted"] = list(self.weighted)
        if self.raw is not None:
            values = self.raw.values
            data["raw"] = dict(self.raw.counts)
            data["raw"] |= {} if values is None else {"values": values.to_json()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FeatureStatistics:
        """Builds statistics from what `to_json` returned."""
        finite = data["values"] - data.get("nan", 0) - data.get("infinite", 0)
        raw = data.get("raw")
        values = (raw or {}).get("values")
        counts = {key: raw[key] for key in _RAW_COUNTS} if raw else {}
        return cls(
            data["dtype"],
            {key: data[key] for key in _COUNTS if key in data},
            FrequencySketch.loads(data["sketch"]),
            Numbers.from_json(finite, data) if "summary" in data else None,
            Lengths.from_json(data["length"]) if "length" in data else None,
            Comparison.from_json(data["by_label"]) if "by_label" in data else None,
            tuple(data["weighted"]) if "weighted" in data else None,
            raw and RawStatistics(counts, values and cls.from_json(values)),
        )


def _merge(kind: Any, parts: Sequence[Any]) -> Any:
    """Merges the parts that have what is merged."""
    given = [part for part in parts if part is not None]
    return kind.merge(given) if given else None


def _add_counts(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def find_dtype(name: str, data_type: pa.DataType) -> str:
    """Returns `int64`, `float32` or `bytes`: how the values of a feature are described."""
    if pt.is_integer(data_type) or pt.is_boolean(data_type):
        return "int64"
    if pt.is_floating(data_type) or pt.is_decimal(data_type):
        return "float32"
    if is_text(data_type) or is_bytes(data_type):
        return "bytes"
    raise InputDataError(
        f"there are no statistics for feature {name!r}",
        received=data_type,
        allowed="integers, booleans, floats, decimals, strings, binaries, and lists of them",
    )


def count_numbers(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Counts int64 or float32 numbers.

    Returns:
        The distinct finite ones, rising, int64 or float64; how often each occurs; of floats, how
        many are NaN and how many infinite.
    """
    is_float = numbers.dtype == np.float32
    if not is_float and len(numbers) and numbers.min() >= 0 and numbers.max() < DENSE_VALUES:
        counts = np.bincount(numbers)
        values = np.flatnonzero(counts)
        return values, counts[values], {}
    ordered = np.sort(numbers)
    if not is_float:
        return *count_ordered(ordered), {}
    low = int(np.searchsorted(ordered, np.float32(-np.inf), "right"))
    high = int(np.searchsorted(ordered, np.float32(np.inf), "left"))
    nan = len(ordered) - int(np.searchsorted(ordered, np.float32(np.inf), "right"))  # the last
    values, counts = count_ordered(ordered[low:high])
    unfinite = {"nan": nan, "infinite": len(ordered) - (high - low) - nan}
    exact = values.astype(np.float64)
    exact += 0.0  # -0 becomes 0
    return exact, counts, unfinite


def _count_texts(values: pa.Array) -> FrequencySketch:
    counted = values.cast(pa.large_binary()).value_counts()
    sketch = FrequencySketch.of(counted.field("values"), counted.field("counts").to_numpy())
    shown = pa.array([readable(text) for text in sketch.values.to_pylist()], pa.string())
    order = pc.sort_indices(shown)
    return replace(sketch, values=shown.take(order), counts=sketch.counts[order.to_numpy()])


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

    def describe(self, source: pa.RecordBatch, records: pa.RecordBatch) -> RawStatistics:
        """Describes the raw column of some rows, and the ids that were made of it."""
        column = source.column(source.schema.get_field_index(self.column))
        if pt.is_null(column.type):
            kind = pa.list_(self.value_type) if self.is_list else self.value_type
            column = pa.nulls(len(column), kind)
        values, nulls = column, 0
        if self.is_list and (self.keeps_values or column.flatten().null_count):
            items, rows = flatten_lists(column, self.max_len)
            nulls = items.null_count
            values = build_lists(rows, cast_values(items, self.value_type))
        elif self.keeps_values:
            values = cast_values(column, self.value_type)
        counts = {
            "missing": column.null_count,
            "null_values": nulls,
            "bucketed": self._count_bucketed(records),
        }
        kept = FeatureStatistics.of(self.name, values) if self.keeps_values else None
        return RawStatistics(counts, kept)

    def _count_bucketed(self, records: pa.RecordBatch) -> int:
        if self.first_token_id is None:
            return 0
        ids = records.column(self.name)
        plain = (ids.flatten() if is_list(ids.type) else ids).drop_null()
        numbers = plain.to_numpy(zero_copy_only=False)
        return int(np.count_nonzero((numbers >= FIRST_TOKEN_ID) & (numbers < self.first_token_id)))


def plan_raw_features(plan: EncoderPlan, names: Collection[str]) -> tuple[RawFeature, ...]:
    """Plans the raw statistics of some features; those that are their raw column need none."""
    known = {vocabulary.name: vocabulary for vocabulary in plan.vocabularies}
    planned = []
    for spec, column in zip(plan.schema.features, plan.columns, strict=True):
        if column.encoder == IDENTITY or spec.name not in names:
            continue
        raw, vocabulary = raw_inputs(spec, column)[0], known.get(column.encoder)
        has_buckets = vocabulary is not None and vocabulary.oov_buckets
        planned.append(
            RawFeature(
                name=spec.name,
                column=raw.name,
                value_type=RAW_TYPES[raw.dtype],
                is_list=raw.is_list,
                max_len=spec.max_len if spec.is_ragged else None,
                keeps_values=column.operation is not None
                and column.operation.raw_values != "counted",
                first_token_id=vocabulary.first_token_id if vocabulary and has_buckets else None,
            )
        )
    return tuple(planned)


class StatisticsAccumulator:
    """Statistics of every feature of one shard.

    Args:
        schema: Types of the features: integers, booleans, floats, decimals, strings, binaries,
            and lists of them.
        focus: The label that features are compared with, or None.
        raw: Features whose raw columns are described too; then each update brings these.

    Raises:
        InputDataError: A feature is of another type.
    """

    def __init__(
        self,
        schema: pa.Schema,
        focus: LabelFocus | None = None,
        raw: Sequence[RawFeature] = (),
    ) -> None:
        for field in schema:
            find_dtype(field.name, field.type.value_type if is_list(field.type) else field.type)
        self._schema, self._raw = schema, {feature.name: feature for feature in raw}
        self._focus = focus if focus is not None and focus.label in schema.names else None
        self._pending: list[tuple[pa.RecordBatch, pa.RecordBatch | None]] = []
        self._parts: list[dict[str, FeatureStatistics]] = []
        self._rows = self._pending_bytes = 0

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Adds the rows of a batch; holds on to it until some more have come."""
        self._pending.append((batch, source if self._raw else None))
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= _PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        batches = [batch for batch, _ in self._pending] or [
            pa.RecordBatch.from_pylist([], schema=self._schema)
        ]
        sources = [source for _, source in self._pending if source is not None]
        source = pa.concat_batches(sources) if sources else None
        self._parts.append(self._describe(pa.concat_batches(batches), source))
        self._pending, self._pending_bytes = [], 0
        if len(self._parts) >= _PENDING_PARTS:
            self._parts = [_merge_parts(self._parts)]

    def _describe(
        self, batch: pa.RecordBatch, source: pa.RecordBatch | None
    ) -> dict[str, FeatureStatistics]:
        found = {n: FeatureStatistics.of(n, batch.column(n)) for n in batch.schema.names}
        for name, feature in self._raw.items() if source is not None else ():
            found[name] = replace(found[name], raw=feature.describe(source, batch))
        if self._focus is not None:
            found = self._compare(self._focus, batch, found)
        self._rows += batch.num_rows
        return found

    def _compare(
        self, focus: LabelFocus, batch: pa.RecordBatch, found: dict[str, FeatureStatistics]
    ) -> dict[str, FeatureStatistics]:
        label, compared = to_floats(batch.column(focus.label)), dict(found)
        left = max(COMPARED_ROWS - self._rows, 0)
        for name, feature in found.items():
            if feature.lengths is None and name != focus.label:
                is_slice = name in focus.slices
                rows = batch.num_rows if is_slice else left
                if not rows and self._parts:
                    continue
                column = batch.column(name)[:rows]
                comparison = Comparison.of(column, label[:rows], is_slice)
                compared[name] = replace(feature, comparison=comparison)
        if focus.weight in found:
            weights = to_floats(batch.column(focus.weight))
            for name in focus.weighted:
                if name in found and is_numeric(batch.column(name).type):
                    sums = sum_weighted(batch.column(name), weights)
                    compared[name] = replace(compared[name], weighted=sums)
        return compared

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics by feature as `FeatureStatistics.to_json` gives them."""
        if self._pending or not self._parts:
            self._flush()
        return {name: found.to_json() for name, found in _merge_parts(self._parts).items()}


def _merge_parts(parts: Sequence[Mapping[str, FeatureStatistics]]) -> dict[str, FeatureStatistics]:
    return {name: FeatureStatistics.merge([part[name] for part in parts]) for name in parts[0]}


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges what `StatisticsAccumulator.to_dict` or this function returned, in the same form."""
    if not parts:
        return {}
    loaded = [{n: FeatureStatistics.from_json(f) for n, f in part.items()} for part in parts]
    return {name: found.to_json() for name, found in _merge_parts(loaded).items()}


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
    """Drops what only merging needs."""
    return {name: _summarize_feature(feature) for name, feature in merged.items()}


_OPAQUE = ("sketch", "summary", "by_label", "raw", "weighted")


def _summarize_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    summary = {key: value for key, value in feature.items() if key not in _OPAQUE}
    if "by_label" in feature:
        summary["label"] = Comparison.from_json(feature["by_label"]).summarize()
    if "weighted" in feature:
        weights, total = feature["weighted"]
        summary[WEIGHTED_MEAN] = total / weights if weights else None
    if raw := feature.get("raw"):
        nan = raw.get("values", {}).get("nan", 0)
        summary["raw"] = {**{key: raw[key] for key in _RAW_COUNTS}, "nan": nan}
    return summary


def refuse_negative_weights(
    schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuses weights of samples below 0: a model would learn the opposite of such a row."""
    for split, by_feature in statistics.items():
        for spec in schema.by_role("weight"):
            low = by_feature.get(spec.name, {}).get("min")
            if low is not None and low < 0:
                raise InputDataError(
                    f"weights of samples are below 0: feature {spec.name!r}, split {split}",
                    received=f"{low:g} at least",
                    allowed="0 or more: a row of weight 0 is not learned",
                    fix="correct the column of the weight; its `minimum: 0` makes such rows bad "
                    "rows, which are counted and left out",
                )


def find_not_finite(statistics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Finds features with values that are no numbers: a line for each feature of a split."""
    return [
        f"feature {name!r}, split {split}: {found['nan']:,} values are NaN and "
        f"{found['infinite']:,} infinite; training on it ends with exit code 5"
        for split, by_feature in statistics.items()
        for name, found in by_feature.items()
        if found.get("nan") or found.get("infinite")
    ]


def find_unscaled(
    schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Finds numbers far from 1, which models read as they are and learn badly from."""
    found = {}
    for spec in schema.by_role("user", "item", "context"):
        values = statistics["train"].get(spec.name, {})
        mean, std = values.get("mean"), values.get("std")
        if spec.vocabulary_size is not None or spec.encoding != IDENTITY or mean is None:
            continue
        if max(abs(mean), std) > UNSCALED:
            found[spec.name] = f"mean {mean:.3g}, deviation {std:.3g}"
    return found
