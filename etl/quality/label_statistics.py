"""The label's association with each feature: its rate by slice, and whether one gives it away.

Slices, which are declared, are counted over all rows. Every other feature is compared with the
label over the first `COMPARED_ROWS` rows of each shard, which content-ordered shards make a
random sample. Correlation ratio: Kelley, "An unbiased correlation ratio measure", PNAS 21
(1935): the share of the label's variance between the groups of equal feature values, corrected
for their number, so that many values alone do not seem to explain the label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from etl.encoders.hashing import fingerprint_values
from etl.quality.sketches import Moments

COMPARED_ROWS = 1 << 16
MAX_GROUPS = 1 << 10
"""A feature with more values has no groups: it is no slice, and too fine to give a label away."""
LISTED_SLICES = 50
_MIN_SPARE_ROWS = 30
_TEXT_CHARS = 64

Groups = dict[int | float | str | bool | None, tuple[int, float, float]]
"""Rows, sum and sum of squares of the label by value of the feature."""


@dataclass(frozen=True)
class LabelFocus:
    """What is compared with what: the label with all features, and its rate by value of slices.

    Of the `weighted` features, the labels, the mean by the rows' `weight` is kept.
    """

    label: str
    slices: tuple[str, ...] = ()
    weight: str | None = None
    weighted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One feature and the label.

    `moments` are of the feature's numbers and the label, None of a feature without numbers;
    `groups` are None where there are too many values.
    """

    is_slice: bool
    moments: Moments | None
    groups: Groups | None

    @classmethod
    def of(cls, column: pa.Array, label: np.ndarray, is_slice: bool) -> Comparison:
        """Compares rows: a column of scalars with the label, float64 `[rows]`, NaN for null."""
        known, moments = np.isfinite(label), None
        if is_numeric(column.type):
            numbers = to_floats(column)
            both = known & np.isfinite(numbers)
            moments = Moments.of(np.stack((numbers[both], label[both])))
        return cls(is_slice, moments, _group(column, label, known))

    @classmethod
    def merge(cls, parts: Sequence[Comparison]) -> Comparison:
        """Returns the comparison over the rows of all parts."""
        moments = [part.moments for part in parts if part.moments is not None]
        return cls(
            parts[0].is_slice,
            Moments.merge(moments) if moments else None,
            _merge_groups([part.groups for part in parts]),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as `from_json` takes it."""
        listed = pairs = None
        if self.groups is not None:
            ordered = sorted(self.groups.items(), key=lambda item: (str(type(item[0])), item[0]))
            listed = [[value, *counts] for value, counts in ordered]
        if self.moments is not None:
            found = self.moments
            pairs = [found.count, found.mean.tolist(), found.scatter.tolist()]
        return {"is_slice": self.is_slice, "moments": pairs, "groups": listed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Builds a comparison from what `to_json` returned."""
        pairs, groups = data["moments"], data["groups"]
        return cls(
            data["is_slice"],
            None if pairs is None else Moments(pairs[0], np.array(pairs[1]), np.array(pairs[2])),
            None if groups is None else {v: (n, s, q) for v, n, s, q in groups},
        )

    def summarize(self) -> dict[str, Any]:
        """Returns what people read: rows compared, correlations (None where unknown), slices.

        `slices` are value, rows and mean label, most rows first; None of too many values.
        """
        moments, groups = self.moments, self.groups
        rows = moments.count if moments else 0
        summary: dict[str, Any] = {
            "rows": sum(n for n, _, _ in groups.values()) if groups else rows,
            "correlation": moments.correlation if moments else None,
            "correlation_ratio": correlation_ratio(groups) if groups else None,
        }
        if self.is_slice:
            summary["slices"] = None if groups is None else _list_slices(groups)
        return summary


def correlation_ratio(groups: Groups) -> float | None:
    """Returns how far the group determines the label: the root of Kelley's epsilon squared.

    None where the label does not vary, or there are too few rows for that many groups.
    """
    rows, totals, squares = np.array(list(groups.values()), np.float64).T
    count, spare = rows.sum(), rows.sum() - len(groups)
    if spare < _MIN_SPARE_ROWS:
        return None
    whole = squares.sum() - totals.sum() ** 2 / count
    if whole <= 1e-12 * max(squares.sum(), 1e-300):
        return None
    within = (squares - totals * totals / rows).sum()
    explained = 1 - (max(within, 0.0) / spare) / (whole / (count - 1))
    return math.sqrt(min(max(explained, 0.0), 1.0))


def _group(column: pa.Array, label: np.ndarray, known: np.ndarray) -> Groups | None:
    if len(column[: 4 * MAX_GROUPS].unique()) > MAX_GROUPS:
        return None
    encoded = column.dictionary_encode(null_encoding="encode")
    size = len(encoded.dictionary)
    if size > MAX_GROUPS:
        return None
    codes, values = encoded.indices.to_numpy(zero_copy_only=False)[known], label[known]
    sums = [np.bincount(codes, by, size).tolist() for by in (None, values, values * values)]
    names = [_plain(value) for value in encoded.dictionary.to_pylist()]
    return _add_groups(zip(names, *sums, strict=True))


def _add_groups(entries: Iterable[tuple[Any, int, float, float]]) -> Groups:
    groups: Groups = {}
    for value, rows, total, squares in entries:
        if rows:
            n, s, q = groups.get(value, (0, 0.0, 0.0))
            groups[value] = (n + rows, s + total, q + squares)
    return groups


def _merge_groups(parts: Sequence[Groups | None]) -> Groups | None:
    known = [part for part in parts if part is not None]
    merged = _add_groups((v, *counts) for part in known for v, counts in part.items())
    return merged if len(known) == len(parts) and len(merged) <= MAX_GROUPS else None


def _list_slices(groups: Groups) -> list[list[Any]]:
    ordered = sorted(groups.items(), key=lambda item: (-item[1][0], str(item[0])))
    return [[value, n, s / n] for value, (n, s, _) in ordered[:LISTED_SLICES]]


def sum_weighted(column: pa.Array, weights: np.ndarray) -> tuple[float, float]:
    """Sums weights, and weights times values, of rows that have both numbers."""
    values = to_floats(column)
    known = np.isfinite(values) & np.isfinite(weights)
    return float(weights.sum(where=known)), float((weights * values).sum(where=known))


def is_numeric(data_type: pa.DataType) -> bool:
    """Whether a type is of numbers or truth values."""
    return bool(pt.is_integer(data_type) or pt.is_floating(data_type) or pt.is_boolean(data_type))


def to_floats(column: pa.Array) -> np.ndarray:
    """Returns the numbers as float64, NaN for null."""
    # From a truth value Arrow knows no way to float64 but through an integer.
    plain = column.cast(pa.int8()) if pt.is_boolean(column.type) else column
    return np.asarray(
        plain.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64
    )


def readable(text: bytes) -> str:
    """Returns the text itself, or where it is long its start and its hash, which tell it apart."""
    shown = text.decode("utf-8", "backslashreplace")
    if len(shown) <= _TEXT_CHARS:
        return shown
    key = int(fingerprint_values(pa.array([text], pa.large_binary()))[0])
    return f"{shown[: _TEXT_CHARS - 17]}\u2026{key:016x}"


def _plain(value: Any) -> int | float | str | bool | None:
    """A value that strict JSON can hold."""
    if isinstance(value, str | bytes):
        return readable(value.encode() if isinstance(value, str) else value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float) or value is None else str(value)
