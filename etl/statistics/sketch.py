"""What a shard tells of its values' frequencies, small enough to travel, made to be merged.

A sketch keeps the `MAX_ENTRIES` most frequent values. Each entry has the occurrences counted and
how many more it may have had in shards that did not keep it; `bound` is what any value that is not
in the sketch may have had. So a merged sketch knows which of its counts are exact (the idea of
mergeable summaries: Agarwal et al., PODS 2012).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etl.statistics.distinct import build_registers, estimate_distinct, merge_registers

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
