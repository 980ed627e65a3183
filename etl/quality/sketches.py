"""Sketches of values in bounded memory, made to be merged: moments, distinct, frequent, quantiles.

Distinct values: HyperLogLog (Flajolet, Fusy, Gandouet and Meunier 2007, figure 3) with 64-bit
hashes; standard error 1.04 / sqrt(1024) = 3.25 %. Frequent values: the most frequent of each part,
with the error of each entry (mergeable summaries: Agarwal et al., PODS 2012). Quantiles: an
equi-depth summary of weighted values; of `JSON_ENTRIES` points, ranks are off by about 0.2 %.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ENTRIES = 1 << 12
"""Values that a sketch holds in memory; `JSON_ENTRIES` as text."""
JSON_ENTRIES = 1 << 8
TOP_VALUES = 20
PROBABILITIES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class Moments:
    """First and second moments of columns of numbers.

    Attributes:
        count: Rows.
        mean: Mean of each column, float64 `[columns]`.
        scatter: Sums of the products of their distances from it, float64 `[columns, columns]`.
    """

    count: int
    mean: np.ndarray
    scatter: np.ndarray

    @classmethod
    def of(cls, columns: np.ndarray, weights: np.ndarray) -> Moments:
        """Returns the moments of float64 `[columns, rows]`, each row `weights` times."""
        count = int(weights.sum())
        # Not by BLAS, whose threads would fight over the cores with those of other tasks.
        mean = (columns * weights).sum(axis=1) / max(count, 1)
        distances = columns - mean[:, None]
        scatter = (distances[:, None] * distances * weights).sum(axis=2)
        return cls(count, mean, scatter)

    @classmethod
    def merge(cls, parts: Sequence[Moments]) -> Moments:
        """Returns the moments of all rows: Chan, Golub and LeVeque (1979), equation 2.1."""
        count = sum(part.count for part in parts)
        mean = sum(part.mean * (part.count / max(count, 1)) for part in parts)
        scatter = sum(
            part.scatter + part.count * np.outer(part.mean - mean, part.mean - mean)
            for part in parts
        )
        return cls(count, np.asarray(mean), np.asarray(scatter))

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation of two columns, in [-1, 1]; None where either does not vary."""
        spread = math.sqrt(self.scatter[0, 0]) * math.sqrt(self.scatter[1, 1])
        return max(-1.0, min(1.0, float(self.scatter[0, 1]) / spread)) if spread else None


REGISTER_BITS = 10
REGISTERS = 1 << REGISTER_BITS
_ALPHA = 0.7213 / (1 + 1.079 / REGISTERS)


def hash_numbers(values: np.ndarray) -> np.ndarray:
    """Hashes 64-bit numbers: the mixing of SplitMix64, uint64 `[values]`."""
    mixed = values.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def sketch_distinct(hashes: np.ndarray) -> np.ndarray:
    """Returns the distinct-count sketch of values by their hashes, uint8 `[REGISTERS]`."""
    registers = np.zeros(REGISTERS, np.uint8)
    # 53 bits, whose number of digits a float64 tells.
    rest = (hashes << np.uint64(REGISTER_BITS)) >> np.uint64(11)
    ranks = (54 - np.frexp(rest.astype(np.float64))[1]).astype(np.uint8)
    np.maximum.at(registers, hashes >> np.uint64(64 - REGISTER_BITS), ranks)
    return registers


def estimate_distinct(registers: np.ndarray) -> int:
    """Estimates how many distinct values a sketch has seen."""
    estimate = _ALPHA * REGISTERS**2 / np.exp2(-registers.astype(np.float64)).sum()
    empty = int((registers == 0).sum())
    if estimate <= 2.5 * REGISTERS and empty:
        estimate = REGISTERS * math.log(REGISTERS / empty)  # linear counting
    return round(float(estimate))


@dataclass(frozen=True)
class FrequencySketch:
    """Frequencies of values.

    Attributes:
        entries: `value`, `count` and `missed` (occurrences that may not be counted), most
            frequent first, ties by value; `ENTRIES` at most.
        bound: The most occurrences that a value outside `entries` may have.
        registers: Distinct-count sketch of all values.
    """

    entries: pa.Table
    bound: int
    registers: np.ndarray

    @classmethod
    def of(cls, values: pa.Array, counts: np.ndarray, hashes: np.ndarray) -> FrequencySketch:
        """Returns the sketch of distinct values `[values]` that were counted."""
        chosen, bound = np.arange(len(counts)), 0
        if len(counts) > ENTRIES:
            least = np.partition(counts, -ENTRIES)[-ENTRIES]
            above, ties = np.flatnonzero(counts > least), np.flatnonzero(counts == least)
            chosen = np.concatenate((above, ties[: ENTRIES - len(above)]))
            bound = int(np.delete(counts, chosen).max())
        columns = (values.take(pa.array(chosen)), counts[chosen], np.zeros(len(chosen), np.int64))
        entries = pa.table(list(map(pa.array, columns)), names=["value", "count", "missed"])
        return cls(_sort(entries), bound, sketch_distinct(hashes))

    @classmethod
    def merge(cls, parts: Sequence[FrequencySketch]) -> FrequencySketch:
        """Returns the sketch of all parts' values together."""
        bound = sum(part.bound for part in parts)
        registers = np.maximum.reduce([part.registers for part in parts])
        # Where a part does not list a value, it may have had up to that part's bound of it.
        tables = [
            part.entries.set_column(2, "missed", pc.subtract(part.entries["missed"], part.bound))
            for part in parts
        ]
        together = pa.concat_tables(tables, promote_options="permissive")
        summed = together.group_by("value", use_threads=False).aggregate(
            [("count", "sum"), ("missed", "sum")]
        )
        columns = [summed["value"], summed["count_sum"], pc.add(summed["missed_sum"], bound)]
        entries = _sort(pa.table(columns, names=["value", "count", "missed"]))
        return cls(entries, bound, registers)._cut(ENTRIES)

    def _cut(self, size: int) -> FrequencySketch:
        rest = self.entries[size:]
        if not len(rest):
            return self
        most = pc.max(pc.add(rest["count"], rest["missed"])).as_py()
        return FrequencySketch(self.entries[:size], max(self.bound, most), self.registers)

    @property
    def listed(self) -> list[tuple[int | float | str, int, int]]:
        """The entries: value, occurrences, and those perhaps missed."""
        return list(zip(*(column.to_pylist() for column in self.entries.columns), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Returns `distinct`, `top` and, for merging, the whole as the opaque `sketch`."""
        cut = self._cut(JSON_ENTRIES)
        listed, complete = cut.listed, cut.bound == 0
        registers = base64.b64encode(self.registers.tobytes()).decode()
        return {
            "distinct": {
                "count": len(listed) if complete else estimate_distinct(self.registers),
                "exact": complete,
                "method": "counted" if complete else "HyperLogLog, 3.25 % standard error",
            },
            "top": {
                "values": [[value, count] for value, count, _ in listed[:TOP_VALUES]],
                "exact": complete or cut._top_is_exact(listed),
            },
            "sketch": _pack([listed, cut.bound, registers]),
        }

    def _top_is_exact(self, listed: Sequence[tuple[Any, int, int]]) -> bool:
        """Whether the top values' counts are final and no other value can belong among them."""
        top, below = listed[:TOP_VALUES], listed[TOP_VALUES:]
        return (
            len(top) == TOP_VALUES
            and not any(missed for _, _, missed in top)
            and self.bound < top[-1][1]
            and all(missed == 0 or count + missed < top[-1][1] for _, count, missed in below)
        )

    @classmethod
    def loads(cls, text: str) -> FrequencySketch:
        """Builds a sketch from the `sketch` of its JSON form."""
        listed, bound, registers = _unpack(text)
        columns = list(zip(*listed, strict=True)) or [(), (), ()]
        arrays = [pa.array(columns[0]), *(pa.array(c, pa.int64()) for c in columns[1:])]
        entries = pa.table(arrays, names=["value", "count", "missed"])
        return cls(entries, bound, np.frombuffer(base64.b64decode(registers), np.uint8))


def _sort(entries: pa.Table) -> pa.Table:
    if pa.types.is_null(entries["value"].type):
        return entries
    return entries.sort_by([("count", "descending"), ("value", "ascending")])


@dataclass(frozen=True)
class QuantileSummary:
    """A distribution of finite numbers as weighted points.

    Attributes:
        values: Distinct numbers, rising, float64 `[points]`.
        weights: How many values each stands for, float64 `[points]`.
        exact: Whether these are the values themselves.
    """

    values: np.ndarray
    weights: np.ndarray
    exact: bool = True

    @classmethod
    def merge(cls, parts: Sequence[QuantileSummary]) -> QuantileSummary:
        """Returns the summary of all parts' values together, of `ENTRIES` points at most."""
        values, groups = np.unique(np.concatenate([p.values for p in parts]), return_inverse=True)
        weights = np.concatenate([part.weights for part in parts])
        summed = np.bincount(groups, weights=weights, minlength=len(values)).astype(np.float64)
        return cls(values, summed, all(part.exact for part in parts)).cut(ENTRIES)

    def cut(self, points: int) -> QuantileSummary:
        """Returns the summary by so many points at most, each of the same weight."""
        if len(self.values) <= points:
            return self
        cumulated = np.cumsum(self.weights)
        ranks = (np.arange(points) + 0.5) / points * cumulated[-1]
        chosen = self.values[np.searchsorted(cumulated, ranks)]
        values, times = np.unique(chosen, return_counts=True)
        return QuantileSummary(values, times * (cumulated[-1] / points), exact=False)

    def quantile(self, probability: float) -> float | None:
        """Returns the least value that this share of the values does not exceed; None if empty."""
        if not len(self.values):
            return None
        cumulated = np.cumsum(self.weights)
        # A weight is a sum of equal fractions: its rounding must not move a rank.
        wanted = probability * cumulated[-1] * (1 - 1e-12)
        return float(self.values[min(np.searchsorted(cumulated, wanted), len(cumulated) - 1)])

    def to_json(self) -> dict[str, Any]:
        """Returns `quantiles` and, for merging, the whole as the opaque `summary`."""
        cut = self.cut(JSON_ENTRIES)
        points = [[p, cut.quantile(p)] for p in PROBABILITIES] if len(cut.values) else []
        return {
            "quantiles": {"values": points, "exact": cut.exact},
            "summary": _pack([cut.values.tolist(), cut.weights.tolist(), cut.exact]),
        }

    @classmethod
    def loads(cls, text: str) -> QuantileSummary:
        """Builds a summary from the `summary` of its JSON form."""
        values, weights, exact = _unpack(text)
        return cls(np.array(values, np.float64), np.array(weights, np.float64), exact)


def _pack(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
