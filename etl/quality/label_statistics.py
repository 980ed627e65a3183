"""The label's association with each feature: its rate by slice, and whether one gives it away.

Slices, which are declared, are counted over all rows. Every other feature is compared with the
label over the first `COMPARED_ROWS` rows of each shard, which content-ordered shards make a
random sample. Correlation ratio: Kelley, "An unbiased correlation ratio measure", PNAS 21
(1935): the share of the label's variance between the groups of equal feature values, corrected
for their number, so that many values alone do not seem to explain the label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from etl.quality.value_statistics import readable
from etl.tfrecord.types.features import is_list

COMPARED_ROWS = 1 << 16
MAX_GROUPS = 1 << 10
"""A feature with more values has no groups: it is no slice, and too fine to give a label away."""
LISTED_SLICES = 50
_MIN_SPARE_ROWS = 30

SliceValue = int | float | str | bool | None
Groups = dict[SliceValue, tuple[int, float, float]]
"""Rows, sum and sum of squares of the label by value of the feature."""


@dataclass(frozen=True)
class LabelFocus:
    """What is compared with what.

    Attributes:
        label: The label's feature: numbers, or truth values.
        slices: Features for whose values the label rate is given.
        weight: Feature of the rows' weights; None: all rows weigh the same.
        weighted: Features whose mean by these weights is kept: the labels.
    """

    label: str
    slices: tuple[str, ...] = ()
    weight: str | None = None
    weighted: tuple[str, ...] = ()


@dataclass(frozen=True)
class CoMoments:
    """Second moments of pairs of numbers, merged without loss of precision."""

    count: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    squares_x: float = 0.0
    squares_y: float = 0.0
    products: float = 0.0

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> CoMoments:
        """Returns the moments of pairs, float64 `[pairs]` each, all finite."""
        if not len(x):
            return cls()
        mean_x, mean_y = float(x.mean()), float(y.mean())
        dx, dy = x - mean_x, y - mean_y
        return cls(len(x), mean_x, mean_y, float(dx @ dx), float(dy @ dy), float(dx @ dy))

    def merge(self, other: CoMoments) -> CoMoments:
        """Returns the moments of both sets of pairs together.

        Chan, Golub and LeVeque (1979), equation 2.1, for products as for squares.
        """
        if not other.count or not self.count:
            return self if self.count else other
        count = self.count + other.count
        share = other.count / count
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        return CoMoments(
            count,
            self.mean_x + dx * share,
            self.mean_y + dy * share,
            self.squares_x + other.squares_x + dx * dx * self.count * share,
            self.squares_y + other.squares_y + dy * dy * self.count * share,
            self.products + other.products + dx * dy * self.count * share,
        )

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation, in [-1, 1]; None where either does not vary."""
        spread = math.sqrt(self.squares_x) * math.sqrt(self.squares_y)
        return max(-1.0, min(1.0, self.products / spread)) if spread else None


def correlation_ratio(groups: Groups) -> float | None:
    """Returns how far the group determines the label, in [0, 1].

    Args:
        groups: Rows, sum and sum of squares of the label by group.

    Returns:
        The root of Kelley's epsilon squared; None where the label does not vary, or there are
        too few rows for that many groups.
    """
    count = sum(rows for rows, _, _ in groups.values())
    spare = count - len(groups)
    if spare < _MIN_SPARE_ROWS:
        return None
    total = sum(total for _, total, _ in groups.values())
    squares = sum(squares for _, _, squares in groups.values())
    whole = squares - total * total / count
    if whole <= 1e-12 * max(squares, 1e-300):
        return None
    within = sum(q - s * s / n for n, s, q in groups.values())
    explained = 1 - (max(within, 0.0) / spare) / (whole / (count - 1))
    return math.sqrt(min(max(explained, 0.0), 1.0))


class LabelAccumulator:
    """Compares every scalar feature with the label.

    Args:
        schema: The features.
        focus: The label and the slices; those that the schema lacks are left out.
    """

    def __init__(self, schema: pa.Schema, focus: LabelFocus) -> None:
        self._label = focus.label
        scalars = [f for f in schema if f.name != focus.label and not is_list(f.type)]
        known = focus.label in schema.names
        self._features = {
            f.name: _Comparison(f.name in focus.slices, _is_numeric(f.type))
            for f in scalars
            if known
        }
        self._rows = 0

    def update(self, batch: pa.RecordBatch) -> None:
        """Adds the rows of a batch."""
        if not self._features or not batch.num_rows:
            return
        label = _to_floats(batch.column(self._label))
        left = COMPARED_ROWS - self._rows
        self._rows += batch.num_rows
        for name, comparison in self._features.items():
            rows = batch.num_rows if comparison.is_slice else min(left, batch.num_rows)
            if rows > 0:
                comparison.update(batch.column(name)[:rows], label[:rows])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns what was found, by feature, for `merge_comparisons`."""
        return {name: comparison.to_dict() for name, comparison in self._features.items()}


class WeightedSums:
    """Sums by the rows' weights, which the means of labels by these weights are made of.

    Args:
        schema: The features.
        focus: The weight and the features; lists, and those that the schema lacks, are left out.
    """

    def __init__(self, schema: pa.Schema, focus: LabelFocus) -> None:
        names = [f.name for f in schema if not is_list(f.type) and _is_numeric(f.type)]
        self._weight = focus.weight if focus.weight in names else None
        wanted = focus.weighted if self._weight is not None else ()
        self._sums = {name: [0.0, 0.0] for name in wanted if name in names}

    def update(self, batch: pa.RecordBatch) -> None:
        """Adds the rows of a batch; those without a number in either column count for nothing."""
        if not self._sums:
            return
        weights = _to_floats(batch.column(self._weight))
        for name, sums in self._sums.items():
            values = _to_floats(batch.column(name))
            known = np.isfinite(values) & np.isfinite(weights)
            sums[0] += float(weights[known].sum())
            sums[1] += float(weights[known] @ values[known])

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Returns `weights` and `total` (of weight times value), by feature."""
        return {
            name: {"weights": weights, "total": total}
            for name, (weights, total) in self._sums.items()
        }


class _Comparison:
    def __init__(self, is_slice: bool, is_numeric: bool) -> None:
        self.is_slice = is_slice
        self._moments: CoMoments | None = CoMoments() if is_numeric else None
        self._groups: Groups | None = {}

    def update(self, column: pa.Array, label: np.ndarray) -> None:
        known = np.isfinite(label)
        if self._groups is not None:
            self._groups = merge_groups([self._groups, _group(column, label, known)])
        if self._moments is not None:
            numbers = _to_floats(column)
            both = known & np.isfinite(numbers)
            self._moments = self._moments.merge(CoMoments.of(numbers[both], label[both]))

    def to_dict(self) -> dict[str, Any]:
        return _dump(self.is_slice, self._moments, self._groups)


def _group(column: pa.Array, label: np.ndarray, known: np.ndarray) -> Groups | None:
    encoded = column.dictionary_encode(null_encoding="encode")
    size = len(encoded.dictionary)
    if size > MAX_GROUPS:
        return None
    codes, values = encoded.indices.to_numpy(zero_copy_only=False)[known], label[known]
    rows = np.bincount(codes, minlength=size).tolist()
    sums = np.bincount(codes, weights=values, minlength=size).tolist()
    squares = np.bincount(codes, weights=values * values, minlength=size).tolist()
    names = [_plain(value) for value in encoded.dictionary.to_pylist()]
    return _add({}, zip(names, rows, sums, squares, strict=True))


def _add(groups: Groups, entries: Any) -> Groups:
    for value, rows, total, squares in entries:
        if rows:
            n, s, q = groups.get(value, (0, 0.0, 0.0))
            groups[value] = (n + rows, s + total, q + squares)
    return groups


def merge_groups(parts: Sequence[Groups | None]) -> Groups | None:
    """Returns the groups of all parts, or None where there are too many."""
    merged: Groups = {}
    for part in parts:
        if part is None:
            return None
        _add(merged, ((value, *counts) for value, counts in part.items()))
    return merged if len(merged) <= MAX_GROUPS else None


def merge_comparisons(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges what `LabelAccumulator.to_dict` says of one feature."""
    loaded = [_load(part) for part in parts]
    moments: CoMoments | None = loaded[0][0]
    for other, _ in loaded[1:]:
        moments = None if moments is None or other is None else moments.merge(other)
    return _dump(parts[0]["is_slice"], moments, merge_groups([groups for _, groups in loaded]))


def summarize_comparison(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what people read of one feature and the label.

    Returns:
        `rows` compared, `correlation` (Pearson), `correlation_ratio`, None where unknown; of a
        slice also `slices`: (value, rows, mean label), most rows first; None if too many.
    """
    moments, groups = _load(comparison)
    rows = moments.count if moments else 0
    summary: dict[str, Any] = {
        "rows": sum(n for n, _, _ in groups.values()) if groups else rows,
        "correlation": moments.correlation if moments else None,
        "correlation_ratio": correlation_ratio(groups) if groups else None,
    }
    if comparison["is_slice"]:
        summary["slices"] = None if groups is None else _list_slices(groups)
    return summary


def _list_slices(groups: Groups) -> list[list[Any]]:
    ordered = sorted(groups.items(), key=lambda item: (-item[1][0], str(item[0])))
    return [[value, n, s / n] for value, (n, s, _) in ordered[:LISTED_SLICES]]


def _dump(is_slice: bool, moments: CoMoments | None, groups: Groups | None) -> dict[str, Any]:
    listed = None
    if groups is not None:
        ordered = sorted(groups.items(), key=lambda item: (str(type(item[0])), item[0]))
        listed = [[value, *counts] for value, counts in ordered]
    pairs = None if moments is None else list(vars(moments).values())
    return {"is_slice": is_slice, "moments": pairs, "groups": listed}


def _load(comparison: Mapping[str, Any]) -> tuple[CoMoments | None, Groups | None]:
    moments, groups = comparison["moments"], comparison["groups"]
    return (
        None if moments is None else CoMoments(*moments),
        None if groups is None else {v: (n, s, q) for v, n, s, q in groups},
    )


def _is_numeric(data_type: pa.DataType) -> bool:
    return pt.is_integer(data_type) or pt.is_floating(data_type) or pt.is_boolean(data_type)


def _to_floats(column: pa.Array) -> np.ndarray:
    """The numbers as float64, NaN for null."""
    # From a truth value Arrow knows no way to float64 but through an integer.
    plain = column.cast(pa.int8()) if pt.is_boolean(column.type) else column
    return np.asarray(
        plain.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64
    )


def _plain(value: Any) -> SliceValue:
    """A value that strict JSON can hold."""
    if isinstance(value, str | bytes):
        return readable(value.encode() if isinstance(value, str) else value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float) or value is None else str(value)
