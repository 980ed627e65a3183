"""Sketches: quantiles, distinct values and frequent values in bounded memory, made to be merged.

Distinct values: HyperLogLog (Flajolet, Fusy, Gandouet and Meunier 2007, figure 3) with 64-bit
hashes; standard error 1.04 / sqrt(1024) = 3.25 %. Frequent values: once more than `MAX_DISTINCT`
keys have appeared, the most frequent so far are counted exactly, all others share counters by
hash (one row of a count-min sketch: Cormode and Muthukrishnan 2005); a sketch that travels knows
the error of each entry (mergeable summaries: Agarwal et al., PODS 2012). Quantiles: a
stratified sample of each shard, one of `stride` values, handed over as an equi-depth summary of
`SUMMARY_POINTS` weighted values; ranks are off by about 0.5 % for one shard, less for more.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from etl.encoders.hashing import mix64
from etl.tfrecord.codec.kernels import inlined, kernel, leading_zeros

REGISTER_BITS = 10
REGISTERS = 1 << REGISTER_BITS
_ALPHA = 0.7213 / (1 + 1.079 / REGISTERS)


def build_registers() -> np.ndarray:
    """Returns the sketch of no values, uint8 `[REGISTERS]`."""
    return np.zeros(REGISTERS, np.uint8)


def merge_registers(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the sketch of both sets of values together."""
    return np.maximum(left, right)


@inlined
def add_hash(mixed: np.uint64, registers: np.ndarray) -> None:
    """Adds the value of a 64-bit hash (`mix64` of its key) to a sketch."""
    register = mixed >> np.uint64(64 - REGISTER_BITS)
    # The set bit bounds the rank where all bits that are left are zero.
    rest = (mixed << np.uint64(REGISTER_BITS)) | np.uint64(1 << (REGISTER_BITS - 1))
    rank = np.uint8(leading_zeros(rest) + np.uint64(1))
    if rank > registers[register]:
        registers[register] = rank


@kernel
def add_keys(keys, registers):  # type: ignore[no-untyped-def]
    """Adds values to a sketch.

    Args:
        keys: One 64-bit key per value, equal for equal values, int64 `[values]`.
        registers: The sketch, updated.
    """
    for i in range(keys.size):
        add_hash(mix64(np.uint64(keys[i])), registers)


def estimate_distinct(registers: np.ndarray) -> int:
    """Estimates how many distinct values a sketch has seen."""
    estimate = _ALPHA * REGISTERS**2 / np.exp2(-registers.astype(np.float64)).sum()
    empty = int((registers == 0).sum())
    if estimate <= 2.5 * REGISTERS and empty:
        estimate = REGISTERS * math.log(REGISTERS / empty)  # linear counting
    return round(float(estimate))


MAX_DISTINCT = 1 << 12
KEPT = 1 << 8
"""Keys still counted one by one when there are too many; few, so that a look-up costs little."""
_FIRST_SLOTS = 1 << 8
_MAX_SLOTS = 2 * MAX_DISTINCT
_SHARED = 1 << 10


class KeyCounter:
    """Counts 64-bit keys.

    Attributes:
        registers: Distinct-count sketch of the keys that are not counted one by one.
    """

    def __init__(self) -> None:
        self.registers = build_registers()
        self._shared = np.zeros(_SHARED, np.int64)
        self._slots = np.zeros((_FIRST_SLOTS, 2), np.int64)  # key, count; count 0: empty
        self._used = 0
        self._frozen = False

    @property
    def bound(self) -> int:
        """The most occurrences that a key can have which is not counted one by one."""
        return int(self._shared.max())

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Counts keys.

        Args:
            keys: int64 `[values]`.

        Returns:
            Positions of the keys that are counted one by one from now on, int64, rising; where
            there are too many keys, some of them may be given up at once.
        """
        fresh = np.empty(0 if self._frozen else min(len(keys), MAX_DISTINCT), np.int64)
        added = done = 0
        while not self._frozen:
            done, new = _count(keys, done, self._slots, self._used, fresh[added:])
            self._used += new
            added += new
            if done == len(keys):
                return fresh[:added]
            if len(self._slots) < _MAX_SLOTS:
                self._grow()
            else:
                self._freeze()
        _count_known(keys[done:], self._slots, self._shared, self.registers)
        return fresh[:added]

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys counted one by one, and their counts, int64 `[keys]` each."""
        filled = self._slots[self._slots[:, 1] > 0]
        return filled[:, 0].copy(), filled[:, 1].copy()

    def _grow(self) -> None:
        larger = np.zeros((min(4 * len(self._slots), _MAX_SLOTS), 2), np.int64)
        _move(self._slots, 0, larger, self._shared, self.registers)
        self._slots = larger

    def _freeze(self) -> None:
        counts = self._slots[:, 1]
        least = int(np.partition(counts, len(counts) - KEPT)[len(counts) - KEPT])
        kept = np.zeros((4 * KEPT, 2), np.int64)
        _move(self._slots, least, kept, self._shared, self.registers)
        self._slots, self._frozen = kept, True


@kernel
def _count(keys, start, slots, used, fresh):  # type: ignore[no-untyped-def]
    """Counts keys until the table is half full and a new one appears.

    Returns:
        Position of the first key not counted, and how many keys were new.
    """
    mask = np.uint64(slots.shape[0] - 1)
    limit = slots.shape[0] // 2 - used
    added = 0
    for i in range(start, keys.size):
        slot = mix64(np.uint64(keys[i])) & mask
        while slots[slot, 1] != 0 and slots[slot, 0] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot, 1] == 0:
            if added == limit:
                return i, added
            slots[slot, 0] = keys[i]
            fresh[added] = i
            added += 1
        slots[slot, 1] += 1
    return keys.size, added


@inlined
def _share(mixed, count, shared, registers):  # type: ignore[no-untyped-def]
    # Other bits of the hash than those that choose a slot or a register.
    shared[(mixed >> np.uint64(32)) & np.uint64(_SHARED - 1)] += count
    add_hash(mixed, registers)


@kernel
def _count_known(keys, slots, shared, registers):  # type: ignore[no-untyped-def]
    """Counts the keys that the table holds one by one, the others together."""
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(keys.size):
        mixed = mix64(np.uint64(keys[i]))
        slot = mixed & mask
        while slots[slot, 1] != 0 and slots[slot, 0] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot, 1] == 0:
            _share(mixed, 1, shared, registers)
        else:
            slots[slot, 1] += 1


@kernel
def _move(source, least, target, shared, registers):  # type: ignore[no-untyped-def]
    """Moves the keys counted more than `least` times to another table, the rest to the shared."""
    mask = np.uint64(target.shape[0] - 1)
    for i in range(source.shape[0]):
        count = source[i, 1]
        mixed = mix64(np.uint64(source[i, 0]))
        if count > least:
            slot = mixed & mask
            while target[slot, 1] != 0:
                slot = (slot + np.uint64(1)) & mask
            target[slot, 0] = source[i, 0]
            target[slot, 1] = count
        elif count > 0:
            _share(mixed, count, shared, registers)


MAX_ENTRIES = 256
TOP_VALUES = 20

Value = int | float | str


@dataclass(frozen=True)
class FrequencySketch:
    """Frequencies of values.

    Attributes:
        entries: (value, occurrences counted, occurrences perhaps missed), most frequent first,
            ties by value.
        bound: The most occurrences that a value outside `entries` may have.
        registers: Distinct-count sketch of all values.
    """

    entries: tuple[tuple[Value, int, int], ...]
    bound: int
    registers: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Returns `distinct`, `top` and, for merging, the whole as the opaque `sketch`."""
        complete = self.bound == 0
        top = self.entries[:TOP_VALUES]
        return {
            "distinct": {
                "count": len(self.entries) if complete else estimate_distinct(self.registers),
                "exact": complete,
                "method": "counted" if complete else "HyperLogLog, 3.25 % standard error",
            },
            "top": {
                "values": [[value, count] for value, count, _ in top],
                "exact": complete or self._top_is_exact(),
            },
            "sketch": self._dumps(),
        }

    def _top_is_exact(self) -> bool:
        """Whether the top values' counts are final and no other value can belong among them."""
        top, below = self.entries[:TOP_VALUES], self.entries[TOP_VALUES:]
        return (
            len(top) == TOP_VALUES
            and not any(missed for _, _, missed in top)
            and self.bound < top[-1][1]
            and all(missed == 0 or count + missed < top[-1][1] for _, count, missed in below)
        )

    def _dumps(self) -> str:
        registers = base64.b64encode(self.registers.tobytes()).decode()
        text = json.dumps([self.entries, self.bound, registers], separators=(",", ":"))
        return base64.b64encode(zlib.compress(text.encode(), 6)).decode()

    @classmethod
    def loads(cls, text: str) -> FrequencySketch:
        """Builds a sketch from the `sketch` of its JSON form."""
        entries, bound, registers = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls(
            entries=tuple((value, count, missed) for value, count, missed in entries),
            bound=bound,
            registers=np.frombuffer(base64.b64decode(registers), np.uint8),
        )


def build_sketch(
    counted: Iterable[tuple[Value, int, int]], bound: int, registers: np.ndarray
) -> FrequencySketch:
    """Builds a sketch from values that were counted.

    Args:
        counted: (value, occurrences, occurrences perhaps missed), values distinct.
        bound: The most occurrences that a value outside `counted` may have.
        registers: Distinct-count sketch of all values, uint8 `[REGISTERS]`.
    """
    ordered = sorted(counted, key=lambda entry: (-entry[1], entry[0]))
    cut = (count + missed for _, count, missed in ordered[MAX_ENTRIES:])
    return FrequencySketch(tuple(ordered[:MAX_ENTRIES]), max([bound, *cut]), registers)


def most_frequent(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Finds the `MAX_ENTRIES` most frequent values, ties by value, without sorting all.

    Args:
        values: Distinct numbers `[values]`.
        counts: Occurrences of each, int64 `[values]`.

    Returns:
        Positions of the values found, and the most occurrences of any other.
    """
    if len(counts) <= MAX_ENTRIES:
        return np.arange(len(counts)), 0
    least = np.partition(counts, len(counts) - MAX_ENTRIES)[len(counts) - MAX_ENTRIES]
    above, ties = np.flatnonzero(counts > least), np.flatnonzero(counts == least)
    room = MAX_ENTRIES - len(above)
    chosen = ties[np.argsort(values[ties])[:room]]
    others = counts[counts < least]
    left_out = least if len(ties) > room else others.max(initial=0)
    return np.concatenate((above, chosen)), int(left_out)


def merge_sketches(parts: Sequence[FrequencySketch]) -> FrequencySketch:
    """Returns the sketch of all parts' values together."""
    bound = sum(part.bound for part in parts)
    counts: dict[Value, int] = {}
    # Where a part does not list a value, it may have had up to that part's bound of it.
    missed: dict[Value, int] = {}
    registers = build_registers()
    for part in parts:
        registers = merge_registers(registers, part.registers)
        for value, count, lacking in part.entries:
            counts[value] = counts.get(value, 0) + count
            missed[value] = missed.get(value, bound) + lacking - part.bound
    entries = [(value, count, missed[value]) for value, count in counts.items()]
    return build_sketch(entries, bound, registers)


SAMPLED_VALUES = 1 << 14
SUMMARY_POINTS = 256
_WINDOW_BITS = 10
PROBABILITIES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class StratifiedSample:
    """One of each `2**level` successive values, `SAMPLED_VALUES` at most.

    Which one of them is drawn from its place by a hash: a fixed one would see but one element of
    each vector whose length is a power of two.
    """

    def __init__(self) -> None:
        self._level = self._seen = self._size = 0
        self._kept: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Adds values.

        Args:
            values: Numbers `[values]`; NaN and infinities take part in the counting only.
        """
        first, self._seen = self._seen, self._seen + len(values)
        taken = values if self._level == 0 else values[_positions(first, self._seen, self._level)]
        if not len(taken):
            return
        self._kept.append(taken.astype(np.float64))
        self._size += len(taken)
        while self._size > SAMPLED_VALUES:
            self._halve()

    def _halve(self) -> None:
        """Keeps one of each two blocks."""
        self._level += 1
        kept = np.concatenate(self._kept)
        pairs = np.arange((len(kept) + 1) // 2, dtype=np.int64)
        chosen = 2 * pairs + _coins(pairs, self._level)
        self._kept = [kept[chosen[chosen < len(kept)]]]  # the last may be yet to come
        self._size = len(self._kept[0])

    def summarize(self, count: int) -> QuantileSummary:
        """Returns the summary of the finite values.

        Args:
            count: How many finite values the sample stands for.
        """
        values = np.concatenate(self._kept) if self._kept else np.empty(0)
        values = values[np.isfinite(values)]
        weights = np.full(len(values), count / max(len(values), 1))
        return build_summary(values, weights, self._level == 0)


def _coins(blocks: np.ndarray, level: int) -> np.ndarray:
    """Draws 0 or 1 for each block of a level, always the same (the mixing of SplitMix64)."""
    mixed = blocks.astype(np.uint64) + np.uint64(level << 56)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(31)) & np.uint64(1)).astype(np.int64)


def _positions(first: int, last: int, level: int) -> np.ndarray:
    """The positions drawn from `first` up to `last`, counted from `first`."""
    bits = level + _WINDOW_BITS
    parts = []
    for window in range(first >> bits, (last - 1 >> bits) + 1):
        drawn = _drawn(window, level)
        low, high = np.searchsorted(drawn, (first, last))
        parts.append(drawn[low:high])
    return np.concatenate(parts) - first if parts else np.empty(0, np.int64)


@lru_cache(maxsize=64)
def _drawn(window: int, level: int) -> np.ndarray:
    """The position drawn from each block of a window; the same for all features of a shard."""
    positions = np.arange(window << _WINDOW_BITS, (window + 1) << _WINDOW_BITS, dtype=np.int64)
    for below in range(level, 0, -1):
        positions = 2 * positions + _coins(positions, below)
    return positions


@dataclass(frozen=True)
class QuantileSummary:
    """A distribution as weighted points.

    Attributes:
        values: Distinct numbers, rising, float64 `[points]`.
        weights: How many values each stands for, float64 `[points]`.
        exact: Whether these are the values themselves.
    """

    values: np.ndarray
    weights: np.ndarray
    exact: bool = True

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
        points = [[p, self.quantile(p)] for p in PROBABILITIES] if len(self.values) else []
        return {
            "quantiles": {"values": points, "exact": self.exact},
            "summary": self._dumps(),
        }

    def _dumps(self) -> str:
        text = json.dumps([self.values.tolist(), self.weights.tolist(), self.exact])
        return base64.b64encode(zlib.compress(text.encode(), 6)).decode()

    @classmethod
    def loads(cls, text: str) -> QuantileSummary:
        """Builds a summary from the `summary` of its JSON form."""
        values, weights, exact = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls(np.array(values, np.float64), np.array(weights, np.float64), exact)


def build_summary(values: np.ndarray, weights: np.ndarray, exact: bool) -> QuantileSummary:
    """Builds a summary of `SUMMARY_POINTS` points at most.

    Args:
        values: Finite numbers in any order, float64 `[values]`.
        weights: How many values each stands for, `[values]`.
        exact: Whether they are all the values.
    """
    distinct, groups = np.unique(values, return_inverse=True)
    summed = np.bincount(groups, weights=weights, minlength=len(distinct)).astype(np.float64)
    if len(distinct) <= SUMMARY_POINTS:
        return QuantileSummary(distinct, summed, exact)
    cumulated = np.cumsum(summed)
    ranks = (np.arange(SUMMARY_POINTS) + 0.5) / SUMMARY_POINTS * cumulated[-1]
    chosen = distinct[np.searchsorted(cumulated, ranks)]
    points, times = np.unique(chosen, return_counts=True)
    return QuantileSummary(points, times * (cumulated[-1] / SUMMARY_POINTS), exact=False)


def merge_summaries(parts: Sequence[QuantileSummary]) -> QuantileSummary:
    """Returns the summary of all parts' values together."""
    return build_summary(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.weights for part in parts]),
        all(part.exact for part in parts),
    )


def summarize_counted(sketch: FrequencySketch) -> QuantileSummary | None:
    """Returns the exact summary of numbers that a sketch has all counted, or None."""
    if sketch.bound:
        return None
    values = np.array([value for value, _, _ in sketch.entries], np.float64)
    counts = np.array([count for _, count, _ in sketch.entries], np.float64)
    return build_summary(values, counts, exact=True)
