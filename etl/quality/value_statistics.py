"""Statistics of one feature's values: moments, histograms and sketches, by their type.

Moments merge without loss of precision; histogram bins are powers of two, so merging adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from conf.schema import OOV_ID
from etl.encoders.hashing import hash_bytes
from etl.quality.sketches import (
    FrequencySketch,
    KeyCounter,
    StratifiedSample,
    add_keys,
    build_sketch,
    most_frequent,
    summarize_counted,
)
from etl.tfrecord.codec.kernels import kernel, load_i64
from etl.tfrecord.types.features import buffer_address


@dataclass(frozen=True)
class RunningMoments:
    """Moments of finite numbers.

    Attributes:
        count: How many.
        mean: Their mean; 0 where there are none.
        squares: Sum of squared distances from the mean.
        minimum: The least, or None where there are none.
        maximum: The greatest, or None where there are none.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float | None = None
    maximum: float | None = None

    def merge(self, other: RunningMoments) -> RunningMoments:
        """Returns the moments of both sets of numbers together.

        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
        variances" (1979), equation 2.1.
        """
        if not other.count or not self.count:
            return self if self.count else other
        count = self.count + other.count
        distance = other.mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + distance * (other.count / count),
            squares=self.squares
            + other.squares
            + distance * distance * (self.count * (other.count / count)),
            minimum=min(_numbers(self.minimum, other.minimum)),
            maximum=max(_numbers(self.maximum, other.maximum)),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns `min`, `max`, `mean` and `std` (of the population); None where unknown."""
        if not self.count:
            return {"min": None, "max": None, "mean": None, "std": None}
        return {
            "min": self.minimum,
            "max": self.maximum,
            "mean": self.mean,
            "std": math.sqrt(self.squares / self.count),
        }

    @classmethod
    def from_json(cls, count: int, data: Mapping[str, Any]) -> RunningMoments:
        """Builds the moments of `count` numbers from what `to_json` returned."""
        if not count:
            return cls()
        return cls(count, data["mean"], data["std"] ** 2 * count, data["min"], data["max"])


def _numbers(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


FLOAT_BINS = 512
"""Bins of a float32: one per sign and exponent."""
LENGTH_BINS = 33
"""Bins of a list's length: one per number of binary digits."""


def length_bins(lengths: np.ndarray) -> np.ndarray:
    """Counts lengths by their number of binary digits: 0, 1, 2-3, 4-7, ...

    Args:
        lengths: Integers in [0, 2**32), `[rows]`.

    Returns:
        Counts, int64 `[LENGTH_BINS]`.
    """
    return np.bincount(np.frexp(lengths)[1], minlength=LENGTH_BINS)


def length_histogram(bins: np.ndarray) -> list[dict[str, Any]]:
    """Returns the bins that are not empty: least and greatest length, and count."""
    return [
        {"low": (1 << k) >> 1, "high": (1 << k) - 1, "count": int(bins[k])}
        for k in np.flatnonzero(bins).tolist()
    ]


def float_histogram(bins: np.ndarray) -> list[dict[str, Any]]:
    """Returns the bins that are not empty, rising.

    Args:
        bins: Counts by sign and exponent of a float32 (its bits, shifted right by 23), int64
            `[FLOAT_BINS]`; infinity and NaN left out.

    Returns:
        Bins with the bound nearest to zero included and the other excluded: `low`, `high`,
        `count`. Zero is in the bin from 0.
    """
    result = []
    for k in np.flatnonzero(bins).tolist():
        near, far = _magnitudes(k & 255)
        low, high = (-far, -near) if k >= 256 else (near, far)
        result.append({"low": low, "high": high, "count": int(bins[k])})
    return sorted(result, key=lambda item: item["low"])


def _magnitudes(exponent: int) -> tuple[float, float]:
    if exponent == 0:  # zero and the subnormal numbers
        return 0.0, 2.0**-126
    return 2.0 ** (exponent - 127), 2.0 ** (exponent - 126)


def merge_histograms(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the histogram of all parts' values together, rising."""
    merged: dict[tuple[float, float], int] = {}
    for part in parts:
        for item in part:
            key = (item["low"], item["high"])
            merged[key] = merged.get(key, 0) + item["count"]
    return [
        {"low": low, "high": high, "count": count} for (low, high), count in sorted(merged.items())
    ]


DENSE_VALUES = 1 << 16
"""Integers from 0 up to here are counted in an array: ids, as frequency orders them, mostly are."""
_PENDING_VALUES = 1 << 14
_TEXT_CHARS = 64


class ValueAccumulator(Protocol):
    """Statistics of values, lists and nulls taken apart."""

    dtype: str

    def update(self, values: pa.Array) -> None:
        """Adds values, of the type that the accumulator is for, none of them null."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON values."""


class Int64Values:
    """Statistics of integers: exact moments, zeros, OOV ids, frequencies."""

    dtype = "int64"

    def __init__(self) -> None:
        self._dense = np.zeros(DENSE_VALUES, np.int64)
        # The values that have no place in the array; few as a rule, so they are gathered first.
        self._others = KeyCounter()
        self._moments = RunningMoments()
        self._sample = StratifiedSample()
        self._pending: list[np.ndarray] = []
        self._pending_values = 0

    def update(self, values: pa.Array) -> None:
        """Adds values.

        Args:
            values: Integers `[values]`, none null.
        """
        numbers = values.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=True)
        self._sample.add(numbers)
        scratch = np.empty(len(numbers), np.int64)
        others = scratch[: _count_dense(numbers, self._dense, scratch)]
        if len(others):
            self._pending.append(others.copy())
            self._pending_values += len(others)
            if self._pending_values >= _PENDING_VALUES:
                self._flush()

    def _flush(self) -> None:
        if self._pending:
            others = np.concatenate(self._pending)
            self._others.add(others)
            self._moments = self._moments.merge(_moments(others))
            self._pending, self._pending_values = [], 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON values."""
        self._flush()
        dense = np.flatnonzero(self._dense)
        keys, counts = self._others.counts()
        registers = self._others.registers.copy()
        add_keys(np.concatenate((dense, keys)), registers)
        moments = _dense_moments(dense, self._dense[dense]).merge(self._moments)
        sketch = _sketch(
            np.concatenate((dense, keys)),
            np.concatenate((self._dense[dense], counts)),
            self._others.bound,
            registers,
        )
        return {
            "zeros": int(self._dense[0]),
            "oov": int(self._dense[OOV_ID]),
            **moments.to_json(),
            **sketch.to_json(),
            **_quantiles(sketch, self._sample, moments.count),
        }


class Float32Values:
    """Statistics of floats: moments of the finite ones, zeros, NaN, histogram, frequencies."""

    dtype = "float32"

    def __init__(self) -> None:
        self._bins = np.zeros(FLOAT_BINS, np.int64)
        self._counter = KeyCounter()
        self._moments = RunningMoments()
        self._sample = StratifiedSample()
        self._nan = self._infinite = self._zeros = 0

    def update(self, values: pa.Array) -> None:
        """Adds values.

        Args:
            values: Numbers `[values]`, none null; taken as the float32 that the record holds.
        """
        numbers = values.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=True)
        self._sample.add(numbers)
        keys = np.empty(len(numbers), np.int64)
        finite, nan, zeros, total, low, high = _scan_float32(
            numbers.view(np.int32), numbers, self._bins, keys
        )
        self._nan += nan
        self._infinite += len(numbers) - finite - nan
        self._zeros += zeros
        if finite:
            mean = total / finite
            moments = RunningMoments(finite, mean, _squares(numbers, mean), float(low), float(high))
            self._moments = self._moments.merge(moments)
            self._counter.add(keys[:finite])

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON values."""
        keys, counts = self._counter.counts()
        registers = self._counter.registers.copy()
        add_keys(keys, registers)
        numbers = keys.astype(np.int32).view(np.float32)
        sketch = _sketch(numbers, counts, self._counter.bound, registers)
        return {
            "zeros": self._zeros,
            "nan": self._nan,
            "infinite": self._infinite,
            **self._moments.to_json(),
            "histogram": float_histogram(self._bins),
            **sketch.to_json(),
            **_quantiles(sketch, self._sample, self._moments.count),
        }


class BytesValues:
    """Statistics of strings: frequencies, told apart by a 64-bit hash."""

    dtype = "bytes"

    def __init__(self) -> None:
        self._counter = KeyCounter()
        self._texts: dict[int, str] = {}

    def update(self, values: pa.Array) -> None:
        """Adds values.

        Args:
            values: Strings or binaries `[values]`, none null.
        """
        wide = values.cast(pa.large_binary())
        keys = _hash_texts(wide)
        fresh = self._counter.add(keys)
        texts = wide.take(pa.array(fresh)).to_pylist()
        for key, text in zip(keys[fresh].tolist(), texts, strict=True):
            self._texts[key] = readable(text, key)

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON values."""
        keys, counts = self._counter.counts()
        registers = self._counter.registers.copy()
        add_keys(keys, registers)
        counted = zip(keys.tolist(), counts.tolist(), strict=True)
        return build_sketch(
            ((self._texts[key], count, 0) for key, count in counted),
            self._counter.bound,
            registers,
        ).to_json()


def _sketch(
    values: np.ndarray, counts: np.ndarray, bound: int, registers: np.ndarray
) -> FrequencySketch:
    chosen, left_out = most_frequent(values, counts)
    entries = zip(values[chosen].tolist(), counts[chosen].tolist(), strict=True)
    return build_sketch(
        ((value, count, 0) for value, count in entries), max(bound, left_out), registers
    )


def _quantiles(sketch: FrequencySketch, sample: StratifiedSample, count: int) -> dict[str, Any]:
    return (summarize_counted(sketch) or sample.summarize(count)).to_json()


def readable(text: bytes, key: int | None = None) -> str:
    """Returns the text itself, or where it is long its start and its hash, which tell it apart.

    Args:
        text: UTF-8 or any bytes.
        key: Its hash, where that is known.
    """
    shown = text.decode("utf-8", "backslashreplace")
    if len(shown) <= _TEXT_CHARS:
        return shown
    if key is None:
        key = int(_hash_texts(pa.array([text], pa.large_binary()))[0])
    return f"{shown[: _TEXT_CHARS - 17]}\u2026{key & (2**64 - 1):016x}"


def _hash_texts(texts: pa.Array) -> np.ndarray:
    keys = np.empty(len(texts), np.int64)
    _, offsets, data = texts.buffers()
    if len(texts):
        _hash_values(offsets.address + 8 * texts.offset, buffer_address(data), keys)
    return keys


def _moments(numbers: np.ndarray) -> RunningMoments:
    exact = numbers.astype(np.float64)
    mean = float(exact.mean())
    squares = float(np.square(exact - mean).sum())
    return RunningMoments(len(numbers), mean, squares, int(numbers.min()), int(numbers.max()))


def _dense_moments(values: np.ndarray, counts: np.ndarray) -> RunningMoments:
    if not len(values):
        return RunningMoments()
    count = int(counts.sum())
    mean = int((values * counts).sum()) / count
    squares = float((counts * np.square(values - mean)).sum())
    return RunningMoments(count, mean, squares, int(values[0]), int(values[-1]))


@kernel
def _count_dense(values, dense, others):  # type: ignore[no-untyped-def]
    """Counts values that the array has a place for; collects the others, returns their number."""
    count = 0
    size = np.uint64(dense.size)
    for i in range(values.size):
        if np.uint64(values[i]) < size:
            dense[values[i]] += 1
        else:
            others[count] = values[i]
            count += 1
    return count


@kernel
def _scan_float32(bits, values, bins, keys):  # type: ignore[no-untyped-def]
    """Bins the finite values and collects their bits as keys, 0 for both zeros.

    Returns:
        Number of finite values, NaN and zeros; sum, least and greatest of the finite.
    """
    finite, nan, zeros = 0, 0, 0
    total = 0.0
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for i in range(values.size):
        value = values[i]
        if np.isfinite(value):
            pattern = np.int64(bits[i])
            if value == np.float32(0):
                zeros += 1
                pattern = np.int64(0)
            bins[(pattern >> 23) & (FLOAT_BINS - 1)] += 1
            keys[finite] = pattern
            finite += 1
            total += np.float64(value)
            low, high = min(low, value), max(high, value)
        elif np.isnan(value):
            nan += 1
    return finite, nan, zeros, total, low, high


@kernel
def _squares(values, mean):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(values.size):
        if np.isfinite(values[i]):
            distance = np.float64(values[i]) - mean
            total += distance * distance
    return total


@kernel
def _hash_values(offsets, data, keys):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        start = load_i64(offsets + 8 * i)
        keys[i] = np.int64(hash_bytes(data + start, load_i64(offsets + 8 * i + 8) - start))
