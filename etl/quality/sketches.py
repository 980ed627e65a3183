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

from etl.encoders.hashing import fingerprint_values
from etl.tfrecord.codec.kernels import kernel, leading_zeros

ENTRIES = 1 << 12
"""Values that a sketch holds in memory; `JSON_ENTRIES` as text."""
JSON_ENTRIES = 1 << 8
TOP_VALUES = 20
_BLOCK = 1 << 15  # rows whose temporary arrays stay in the cache
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
    def of(cls, columns: np.ndarray, counts: np.ndarray | None = None) -> Moments:
        """Returns the moments of float64 `[columns, rows]`, each row so many times."""
        parts = []
        for start in range(0, max(columns.shape[1], 1), _BLOCK):
            block = columns[:, start : start + _BLOCK]
            times: Any = 1 if counts is None else counts[start : start + _BLOCK]
            count = block.shape[1] if counts is None else int(times.sum())
            # Not by BLAS, whose threads would fight over the cores with those of other tasks.
            mean = (block * times).sum(axis=1) / max(count, 1)
            distances = block - mean[:, None]
            scatter = [[(a * b).sum() for b in distances] for a in distances * times]
            parts.append(cls(count, mean, np.array(scatter)))
        return cls.merge(parts)

    @classmethod
    def merge(cls, parts: Sequence[Moments]) -> Moments:
        """Returns the moments of all rows: Chan, Golub and LeVeque (1979), equation 2.1."""
        if len(parts) == 1:
            return parts[0]
        count = sum(part.count for part in parts)
        mean = sum(part.mean * (part.count / max(count, 1)) for part in parts)
        scatter = sum(
            part.scatter + part.count * np.outer(part.mean - mean, part.mean - mean)
            for part in parts
        )
        return cls(count, np.asarray(mean), np.asarray(scatter))

    def to_json(self) -> list[Any]:
        return [self.count, self.mean.tolist(), self.scatter.tolist()]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Moments:
        return cls(data[0], np.array(data[1]), np.array(data[2]))

    @property
    def mean_and_deviation(self) -> tuple[float | None, float | None]:
        """Of the first column; None of nothing."""
        if not self.count:
            return None, None
        return float(self.mean[0]), math.sqrt(self.scatter[0, 0] / self.count)

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation of two columns, in [-1, 1]; None where either does not vary."""
        spread = math.sqrt(self.scatter[0, 0]) * math.sqrt(self.scatter[1, 1])
        return max(-1.0, min(1.0, float(self.scatter[0, 1]) / spread)) if spread else None


@kernel
def _count_runs(ordered, counts):  # type: ignore[no-untyped-def]
    """Moves the distinct ones of numbers that rise to the front; returns how many there are."""
    found, start = 0, 0
    for i in range(1, ordered.size + 1):
        ordered[found] = ordered[i - 1]
        counts[found] = i - start
        if i == ordered.size or ordered[i] != ordered[i - 1]:
            found += 1
            start = i
    return found


def count_ordered(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct ones of numbers that rise, in their place, and how often each occurs."""
    counts = np.empty(len(ordered), np.int64)
    found = _count_runs(ordered, counts)
    return ordered[:found], counts[:found]


REGISTER_BITS = 10
REGISTERS = 1 << REGISTER_BITS
_ALPHA = 0.7213 / (1 + 1.079 / REGISTERS)


@kernel
def _add_keys(keys, are_hashes, registers):  # type: ignore[no-untyped-def]
    """Adds keys of 64 bits; those that are no hashes are mixed as by SplitMix64."""
    for i in range(keys.size):
        hashed = keys[i]
        if not are_hashes:
            hashed = hashed + np.uint64(0x9E3779B97F4A7C15)
            hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            hashed = hashed ^ (hashed >> np.uint64(31))
        register = hashed >> np.uint64(64 - REGISTER_BITS)
        # Of the other bits the last one is set: it bounds the rank.
        rest = (hashed << np.uint64(REGISTER_BITS)) | np.uint64(1 << REGISTER_BITS)
        rank = np.uint8(leading_zeros(rest) + np.uint64(1))
        if rank > registers[register]:
            registers[register] = rank


def sketch_distinct(values: pa.Array) -> np.ndarray:
    """Returns the distinct-count sketch of numbers of 64 bits or texts, uint8 `[REGISTERS]`."""
    registers = np.zeros(REGISTERS, np.uint8)
    if pa.types.is_primitive(values.type):
        _add_keys(values.to_numpy().view(np.uint64), False, registers)
    else:
        _add_keys(fingerprint_values(values), True, registers)
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
        values: Distinct values, rising; of one that was loaded, the most frequent first.
        counts: Occurrences of each, int64 `[values]`.
        missed: Those that may not be counted, int64 `[values]`.
        bound: The most occurrences that any other value may have.
        registers: Distinct-count sketch of all values.
    """

    values: pa.Array
    counts: np.ndarray
    missed: np.ndarray
    bound: int
    registers: np.ndarray

    @classmethod
    def of(cls, values: pa.Array, counts: np.ndarray) -> FrequencySketch:
        """Returns the sketch of distinct values, rising, that were counted."""
        registers = sketch_distinct(values)
        missed = np.broadcast_to(np.int64(0), len(counts))
        return cls(values, counts, missed, 0, registers).cut(ENTRIES)

    @classmethod
    def merge(cls, parts: Sequence[FrequencySketch]) -> FrequencySketch:
        """Returns the sketch of all parts' values together."""
        bound = sum(part.bound for part in parts)
        values, groups = _group_values([part.values for part in parts])

        def add(numbers: list[np.ndarray]) -> np.ndarray:
            return np.bincount(groups, np.concatenate(numbers), len(values)).astype(np.int64)

        # Where a part does not list a value, it may have had up to that part's bound of it.
        missed = add([part.missed - part.bound for part in parts]) + bound
        registers = np.maximum.reduce([part.registers for part in parts])
        counts = add([part.counts for part in parts])
        return cls(values, counts, missed, bound, registers).cut(ENTRIES)

    def cut(self, size: int) -> FrequencySketch:
        """Returns the sketch with so many values at most: the most frequent, ties by value."""
        if len(self.counts) <= size:
            return self
        chosen = _find_most_frequent(self.counts, size)
        most = self.counts + self.missed
        most[chosen] = 0
        values, bound = self.values.filter(pa.array(chosen)), max(self.bound, int(most.max()))
        counts, missed = self.counts[chosen], self.missed[chosen]
        return FrequencySketch(values, counts, missed, bound, self.registers)

    @property
    def listed(self) -> list[tuple[int | float | str, int, int]]:
        """Value, occurrences, and those perhaps missed: the most frequent first."""
        order = np.argsort(-self.counts, kind="stable")
        values = self.values.take(pa.array(order)).to_pylist()
        counts, missed = self.counts[order].tolist(), self.missed[order].tolist()
        return list(zip(values, counts, missed, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Returns `distinct`, `top` and, for merging, the whole as the opaque `sketch`."""
        cut = self.cut(JSON_ENTRIES)
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
                "exact": complete or _is_exact(listed, cut.bound),
            },
            "sketch": _pack([listed, cut.bound, registers]),
        }

    @classmethod
    def loads(cls, text: str) -> FrequencySketch:
        listed, bound, registers = _unpack(text)
        values, counts, missed = zip(*listed, strict=True) if listed else ((), (), ())
        numbers = np.array(counts, np.int64), np.array(missed, np.int64)
        decoded = np.frombuffer(base64.b64decode(registers), np.uint8)
        return cls(pa.array(values), *numbers, bound, decoded)


def _is_exact(listed: Sequence[tuple[Any, int, int]], bound: int) -> bool:
    """Whether the top values' counts are final and no other value can belong among them."""
    top, below = listed[:TOP_VALUES], listed[TOP_VALUES:]
    return (
        len(top) == TOP_VALUES
        and not any(missed for _, _, missed in top)
        and bound < top[-1][1]
        and all(missed == 0 or count + missed < top[-1][1] for _, count, missed in below)
    )


def _find_most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """Returns which are the greatest counts; of equal ones the first."""
    repeated = counts[counts > 1]
    least = np.partition(repeated, -size)[-size] if len(repeated) >= size else 1
    chosen = counts > least
    ties = np.flatnonzero(counts == least)
    chosen[ties[: size - np.count_nonzero(chosen)]] = True
    return chosen


def _group_values(parts: Sequence[pa.Array]) -> tuple[pa.Array, np.ndarray]:
    """Returns the distinct values of all parts, rising, and which of them each value is."""
    values = pa.concat_arrays([part for part in parts if len(part)] or parts[:1])
    if pa.types.is_primitive(values.type):
        found, groups = np.unique(values.to_numpy(), return_inverse=True)
        return pa.array(found), groups
    encoded = values.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary)
    places = np.argsort(order.to_numpy())
    return encoded.dictionary.take(order), places[encoded.indices.to_numpy()]


@dataclass(frozen=True)
class QuantileSummary:
    """A distribution of finite numbers as weighted points.

    Attributes:
        values: Distinct numbers, rising, float64 `[points]`.
        weights: How many values each stands for, float64 or int64 `[points]`.
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
        cumulated = np.cumsum(self.weights, dtype=np.float64)
        ranks = (np.arange(points) + 0.5) / points * cumulated[-1]
        values, times = count_ordered(self.values[np.searchsorted(cumulated, ranks)])
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
        whole = [cut.values.tolist(), cut.weights.astype(np.float64).tolist(), cut.exact]
        return {"quantiles": {"values": points, "exact": cut.exact}, "summary": _pack(whole)}

    @classmethod
    def loads(cls, text: str) -> QuantileSummary:
        values, weights, exact = _unpack(text)
        return cls(np.array(values, np.float64), np.array(weights, np.float64), exact)


def _pack(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
