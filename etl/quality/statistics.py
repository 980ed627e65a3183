"""Statistics of features: gathered per shard in the encoding pass, merged by the driver.

The values of some batches are counted at once; all else follows from the distinct values and
their counts. A scaling, boundaries of buckets and a table of statistics are fitted anew by each
build, and most encoders give a missing value an id or a number: so the raw column that a feature
was made of is described beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from conf.encoders import IDENTITY, ColumnEncoding, EncoderPlan
from conf.manifest import WEIGHTED_MEAN
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSchema, FeatureSpec
from conf.splits import CATALOG, USERS
from etl.encoders.arrow_columns import RAW_TYPES, build_lists, cast_values, flatten_lists
from etl.encoders.pipeline import raw_inputs
from etl.quality.label_statistics import (
    COMPARED_ROWS,
    LabelFocus,
    compare_label,
    is_numeric,
    merge_comparisons,
    readable,
    sum_weighted,
    summarize_comparison,
    to_floats,
)
from etl.quality.sketches import ENTRIES, FrequencySketch, Moments, QuantileSummary, count_ordered
from etl.tfrecord.types.features import is_list

DENSE_VALUES = 1 << 16
"""Integers from 0 up to here are counted in an array: ids, as frequency orders them, mostly are."""
_PENDING_BYTES = 1 << 24
_PENDING_PARTS = 16
_RAW_COUNTS = ("missing", "null_values", "bucketed")
"""Null rows, nulls inside of lists, ids of OOV buckets."""

Feature = dict[str, Any]
"""Statistics of one feature, by the keys of `_MERGES`.

Its `dtype` is `int64`, `float32` or `bytes`. Counts are `rows`, `missing` (null), `values` (list
elements counted one by one), and by type `zeros`, `oov` (ids equal to 1), `nan`, `infinite`.
`frequencies`, and of numbers `min`, `max`, `moments` and `summary`, are of the finite values.
`length` is of lists, `by_label` the comparison with the label, `weighted` the sums of a label's
weights and of weight times value. `raw` has `_RAW_COUNTS` of the raw column that the feature was
made of, and the statistics of its `values`.
"""


def describe_feature(column: pa.Array) -> Feature:
    """Describes some rows of a feature: numbers, texts or bytes, or lists of them."""
    feature: Feature = {"rows": len(column), "missing": column.null_count}
    if is_list(column.type):
        lengths = pc.list_value_length(column).drop_null().to_numpy()
        feature["length"] = _describe_lengths(lengths)
        column = column.flatten()
    values = column.drop_null()
    feature |= {"dtype": _find_dtype(column.type), "values": len(values)}
    if feature["dtype"] == "bytes":
        return {**feature, "frequencies": _count_texts(values)}
    data_type = pa.int64() if feature["dtype"] == "int64" else pa.float32()
    found, times, unfinite = count_numbers(values.cast(data_type, safe=False).to_numpy())
    feature |= {**unfinite, "zeros": int(times[found == 0].sum())}
    if feature["dtype"] == "int64":
        feature["oov"] = int(times[found == OOV_ID].sum())
    exact = found.astype(np.float64, copy=False)
    return {
        **feature,
        "frequencies": FrequencySketch.of(pa.array(found), times),
        "min": found[0].item() if len(found) else None,
        "max": found[-1].item() if len(found) else None,
        "moments": Moments.of(exact[None], times),
        "summary": QuantileSummary(exact, times).cut(ENTRIES),
    }


def _find_dtype(data_type: pa.DataType) -> str:
    if pt.is_floating(data_type):
        return "float32"
    return "int64" if pt.is_integer(data_type) else "bytes"


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
    exact = values.astype(np.float64)
    exact += 0.0  # -0 becomes 0
    return exact, counts, {"nan": nan, "infinite": len(ordered) - (high - low) - nan}


def _count_texts(values: pa.Array) -> FrequencySketch:
    counted = values.cast(pa.large_binary()).value_counts()
    sketch = FrequencySketch.of(counted.field("values"), counted.field("counts").to_numpy())
    shown = pa.array([readable(text) for text in sketch.values.to_pylist()], pa.string())
    order = pc.sort_indices(shown)
    return replace(sketch, values=shown.take(order), counts=sketch.counts[order.to_numpy()])


def _describe_lengths(lengths: np.ndarray) -> dict[str, Any]:
    bins = np.bincount(np.frexp(lengths)[1])
    counts = {(1 << k) - 1: int(bins[k]) for k in np.flatnonzero(bins).tolist()}
    ends = [int(lengths.min()), int(lengths.max())] if len(lengths) else []
    return _show_lengths(ends, counts, int(lengths.sum()))


def _merge_lengths(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = Counter[int]()
    for part in parts:
        counts.update({item["high"]: item["count"] for item in part["histogram"]})
    ends = [part[end] for part in parts for end in ("min", "max") if part[end] is not None]
    return _show_lengths(ends, counts, sum(part["total"] for part in parts))


def _show_lengths(ends: Sequence[int], counts: Mapping[int, int], total: int) -> dict[str, Any]:
    """Lengths of lists, as JSON; `counts` by their number of binary digits: 0, 1, 2-3, 4-7, ..."""
    return {
        "min": min(ends, default=None),
        "max": max(ends, default=None),
        "mean": total / sum(counts.values()) if ends else None,
        "total": total,
        "histogram": [
            {"low": (high + 1) >> 1, "high": high, "count": counts[high]} for high in sorted(counts)
        ],
    }


def merge_features(parts: Sequence[Feature]) -> Feature:
    """Merges statistics of a feature; counts come out as from one pass over all rows.

    Mean and deviation agree with one pass to rounding. Merge in the order of the shards, and the
    result is the same in each run.
    """
    given = {name: [part[name] for part in parts if name in part] for name in _MERGES}
    return {name: _MERGES[name](found) for name, found in given.items() if found}


def _merge_raw(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {key: sum(part[key] for part in parts) for key in _RAW_COUNTS}
    if "values" in parts[0]:
        merged["values"] = merge_features([part["values"] for part in parts])
    return merged


_MERGES: Mapping[str, Callable[[list[Any]], Any]] = {
    "dtype": itemgetter(0),
    **dict.fromkeys(("rows", "missing", "values", "zeros", "oov", "nan", "infinite"), sum),
    "frequencies": FrequencySketch.merge,
    "min": lambda parts: min((low for low in parts if low is not None), default=None),
    "max": lambda parts: max((high for high in parts if high is not None), default=None),
    "moments": Moments.merge,
    "summary": QuantileSummary.merge,
    "length": _merge_lengths,
    "by_label": merge_comparisons,
    "weighted": lambda parts: [sum(column) for column in zip(*parts, strict=True)],
    "raw": _merge_raw,
}


def feature_to_json(feature: Feature) -> dict[str, Any]:
    """Returns the statistics of a feature as JSON values.

    In the place of sketches are `distinct` and `top` with whether they are exact, and of numbers
    `mean`, `std` and `quantiles`; `sketch`, `summary`, `by_label` and `weighted` are for merging.
    """
    data = {**feature, **feature["frequencies"].to_json()}
    del data["frequencies"]
    if "moments" in feature:
        mean, std = data.pop("moments").mean_and_deviation
        data |= {"mean": mean, "std": std, **feature["summary"].to_json()}
    if "values" in feature.get("raw", {}):
        data["raw"] = {**feature["raw"], "values": feature_to_json(feature["raw"]["values"])}
    return data


def feature_from_json(data: Mapping[str, Any]) -> Feature:
    feature: Feature = {name: data[name] for name in _MERGES if name in data}
    feature["frequencies"] = FrequencySketch.loads(data["sketch"])
    if "summary" in data:
        finite = data["values"] - data.get("nan", 0) - data.get("infinite", 0)
        mean, std = data["mean"] or 0.0, data["std"] or 0.0
        feature["moments"] = Moments(finite, np.array([mean]), np.array([[std * std * finite]]))
        feature["summary"] = QuantileSummary.loads(data["summary"])
    if "values" in data.get("raw", {}):
        feature["raw"] = {**data["raw"], "values": feature_from_json(data["raw"]["values"])}
    return feature


@dataclass(frozen=True)
class RawFeature:
    """A feature that is not its raw column; its ids before `first_token_id` are OOV buckets."""

    spec: FeatureSpec
    encoding: ColumnEncoding
    first_token_id: int

    def describe(self, source: pa.RecordBatch, records: pa.RecordBatch) -> dict[str, Any]:
        """Describes the raw column of some rows, and the ids that were made of it."""
        raw, operation = raw_inputs(self.spec, self.encoding)[0], self.encoding.operation
        keeps_values = operation is not None and operation.raw_values != "counted"
        column, value_type = source.column(raw.name), RAW_TYPES[raw.dtype]
        if pt.is_null(column.type):
            column = column.cast(pa.list_(value_type) if raw.is_list else value_type)
        values, nulls = column, 0
        if raw.is_list and (keeps_values or column.flatten().null_count):
            items, rows = flatten_lists(column, self.spec.max_len if self.spec.is_ragged else None)
            nulls = items.null_count
            values = build_lists(rows, cast_values(items, value_type))
        elif keeps_values:
            values = cast_values(column, value_type)
        counts = (column.null_count, nulls, self._count_bucketed(records))
        found: dict[str, Any] = dict(zip(_RAW_COUNTS, counts, strict=True))
        if keeps_values:
            found["values"] = describe_feature(values)
        return found

    def _count_bucketed(self, records: pa.RecordBatch) -> int:
        if self.first_token_id == FIRST_TOKEN_ID:
            return 0
        ids = records.column(self.spec.name)
        plain = (ids.flatten() if is_list(ids.type) else ids).drop_null()
        numbers = plain.to_numpy(zero_copy_only=False)
        return int(np.count_nonzero((numbers >= FIRST_TOKEN_ID) & (numbers < self.first_token_id)))


def plan_raw_features(plan: EncoderPlan, names: Collection[str]) -> tuple[RawFeature, ...]:
    """Plans the raw statistics of some features; those that are their raw column need none."""
    first = {vocabulary.name: vocabulary.first_token_id for vocabulary in plan.vocabularies}
    return tuple(
        RawFeature(spec, column, first.get(column.encoder, FIRST_TOKEN_ID))
        for spec, column in zip(plan.schema.features, plan.columns, strict=True)
        if column.encoder != IDENTITY and spec.name in names
    )


class StatisticsAccumulator:
    """Statistics of every feature of one shard.

    `focus` is the label that features are compared with; `raw` are features whose raw columns are
    described too: then each update brings these.
    """

    def __init__(
        self,
        schema: pa.Schema,
        focus: LabelFocus | None = None,
        raw: Sequence[RawFeature] = (),
    ) -> None:
        self._schema, self._raw = schema, raw
        self._focus = focus if focus is not None and focus.label in schema.names else None
        self._pending: list[tuple[pa.RecordBatch, pa.RecordBatch | None]] = []
        self._parts: list[dict[str, Feature]] = []
        self._rows = self._pending_bytes = 0

    def update(self, batch: pa.RecordBatch, source: pa.RecordBatch | None = None) -> None:
        """Adds the rows of a batch; holds on to it until some more have come."""
        self._pending.append((batch, source if self._raw else None))
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= _PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        batches = [batch for batch, _ in self._pending]
        batch = pa.concat_batches(batches or [pa.RecordBatch.from_pylist([], self._schema)])
        found = {name: describe_feature(batch.column(name)) for name in batch.schema.names}
        if sources := [source for _, source in self._pending if source is not None]:
            source = pa.concat_batches(sources)
            for raw in self._raw:
                found[raw.spec.name]["raw"] = raw.describe(source, batch)
        if self._focus is not None:
            self._compare(self._focus, batch, found)
        self._parts.append(found)
        self._rows += batch.num_rows
        self._pending, self._pending_bytes = [], 0
        if len(self._parts) >= _PENDING_PARTS:
            self._parts = [_merge_parts(self._parts)]

    def _compare(
        self, focus: LabelFocus, batch: pa.RecordBatch, found: Mapping[str, Feature]
    ) -> None:
        label, left = to_floats(batch.column(focus.label)), max(COMPARED_ROWS - self._rows, 0)
        for name, feature in found.items():
            column, is_slice = batch.column(name), name in focus.slices
            if name in focus.weighted and focus.weight in found and is_numeric(column.type):
                feature["weighted"] = sum_weighted(column, to_floats(batch.column(focus.weight)))
            rows = batch.num_rows if is_slice else left
            if "length" in feature or name == focus.label or (self._parts and not rows):
                continue
            feature["by_label"] = compare_label(column[:rows], label[:rows], is_slice)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics by feature as `feature_to_json` gives them."""
        if self._pending or not self._parts:
            self._flush()
        return {name: feature_to_json(found) for name, found in _merge_parts(self._parts).items()}


def _merge_parts(parts: Sequence[Mapping[str, Feature]]) -> dict[str, Feature]:
    return {name: merge_features([part[name] for part in parts]) for name in parts[0]}


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges what `StatisticsAccumulator.to_dict` or this function returned, in the same form."""
    return {
        name: feature_to_json(merge_features([feature_from_json(part[name]) for part in parts]))
        for name in (parts[0] if parts else ())
    }


def count_labelled(
    statistics: Mapping[str, Mapping[str, Any]], schema: FeatureSchema
) -> dict[str, dict[str, int]]:
    """Counts the records that have each of several labels, by label and split."""
    labels = [spec.name for spec in schema.by_role("label")]
    events = {s: found for s, found in statistics.items() if s not in (CATALOG, USERS)}
    return {
        label: {split: int(n[label]["values"]) for split, n in events.items() if label in n}
        for label in (labels if len(labels) > 1 else ())
    }


def summarize_statistics(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what only merging needs."""
    return {name: _summarize_feature(feature) for name, feature in merged.items()}


_OPAQUE = ("sketch", "summary", "by_label", "raw", "weighted")


def _summarize_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    summary = {key: value for key, value in feature.items() if key not in _OPAQUE}
    if "by_label" in feature:
        summary["label"] = summarize_comparison(feature["by_label"])
    if "weighted" in feature:
        weights, total = feature["weighted"]
        summary[WEIGHTED_MEAN] = total / weights if weights else None
    if raw := feature.get("raw"):
        nan = raw.get("values", {}).get("nan", 0)
        summary["raw"] = {**{key: raw[key] for key in _RAW_COUNTS}, "nan": nan}
    return summary
