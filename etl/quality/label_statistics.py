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
from itertools import chain
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

Groups = list[list[Any]]
"""Value of the feature, rows, sum and sum of squares of the label: by type and value, rising."""


@dataclass(frozen=True)
class LabelFocus:
    """What is compared with what: the label with all features, and its rate by value of slices.

    Of the `weighted` features, the labels, the mean by the rows' `weight` is kept.
    """

    label: str
    slices: tuple[str, ...] = ()
    weight: str | None = None
    weighted: tuple[str, ...] = ()


def compare_label(column: pa.Array, label: np.ndarray, is_slice: bool) -> dict[str, Any]:
    """Compares a column of scalars with the label, float64 `[rows]`, NaN for null.

    Returns:
        JSON that merges: `moments` of the feature's numbers and the label, None of a feature
        without numbers; `groups`, None where there are too many values; `is_slice`.
    """
    known, moments = np.isfinite(label), None
    if is_numeric(column.type):
        numbers = to_floats(column)
        both = known & np.isfinite(numbers)
        moments = Moments.of(np.stack((numbers[both], label[both]))).to_json()
    return {"is_slice": is_slice, "moments": moments, "groups": _group(column, label, known)}


def merge_comparisons(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    moments = [Moments.from_json(part["moments"]) for part in parts if part["moments"] is not None]
    groups = [part["groups"] for part in parts if part["groups"] is not None]
    return {
        "is_slice": parts[0]["is_slice"],
        "moments": Moments.merge(moments).to_json() if moments else None,
        "groups": _add_groups(chain(*groups)) if len(groups) == len(parts) else None,
    }


def summarize_comparison(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what people read: rows compared, correlations (None where unknown), slices.

    `slices` are value, rows and mean label, most rows first; None of too many values.
    """
    groups: Groups | None = comparison["groups"]
    moments = None if comparison["moments"] is None else Moments.from_json(comparison["moments"])
    summary: dict[str, Any] = {
        "rows": sum(n for _, n, _, _ in groups) if groups else moments.count if moments else 0,
        "correlation": moments.correlation if moments else None,
        "correlation_ratio": correlation_ratio(groups) if groups else None,
    }
    if comparison["is_slice"]:
        ordered = sorted(groups or (), key=lambda group: (-group[1], str(group[0])))
        listed = [[value, n, s / n] for value, n, s, _ in ordered[:LISTED_SLICES]]
        summary["slices"] = None if groups is None else listed
    return summary


def correlation_ratio(groups: Groups) -> float | None:
    """Returns how far the group determines the label: the root of Kelley's epsilon squared.

    None where the label does not vary, or there are too few rows for that many groups.
    """
    rows, totals, squares = np.array([counts for _, *counts in groups], np.float64).T
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


def _add_groups(entries: Iterable[Sequence[Any]]) -> Groups | None:
    groups: dict[Any, tuple[int, float, float]] = {}
    for value, rows, total, squares in entries:
        if rows:
            n, s, q = groups.get(value, (0, 0.0, 0.0))
            groups[value] = (n + rows, s + total, q + squares)
    ordered = sorted(groups.items(), key=lambda item: (str(type(item[0])), item[0]))
    return [[value, *counts] for value, counts in ordered] if len(groups) <= MAX_GROUPS else None


def sum_weighted(column: pa.Array, weights: np.ndarray) -> tuple[float, float]:
    """Sums weights, and weights times values, of rows that have both numbers."""
    values = to_floats(column)
    known = np.isfinite(values) & np.isfinite(weights)
    return float(weights.sum(where=known)), float((weights * values).sum(where=known))


def is_numeric(data_type: pa.DataType) -> bool:
    return bool(pt.is_integer(data_type) or pt.is_floating(data_type))


def to_floats(column: pa.Array) -> np.ndarray:
    """Returns the numbers as float64, NaN for null."""
    numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(numbers, np.float64)


def readable(text: bytes) -> str:
    """Returns the text itself, or where it is long its start and its hash, which tell it apart."""
    shown = text.decode("utf-8", "backslashreplace")
    if len(shown) <= _TEXT_CHARS:
        return shown
    key = int(fingerprint_values(pa.array([text], pa.large_binary()))[0])
    return f"{shown[: _TEXT_CHARS - 17]}\u2026{key:016x}"


def _plain(value: int | float | str | bytes | None) -> int | float | str | None:
    """A value that strict JSON can hold."""
    if isinstance(value, str | bytes):
        return readable(value.encode() if isinstance(value, str) else value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
