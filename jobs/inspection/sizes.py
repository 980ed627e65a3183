"""How long records are: a histogram by powers of two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

_BINS = 33  # record lengths are below 2**31


@dataclass
class RecordSizes:
    """Lengths of records without their framing, as they are met.

    Attributes:
        counts: Records by bit length: bin k holds lengths in [2**(k - 1), 2**k), bin 0 holds 0.
        shortest: Shortest length, None before the first record.
        longest: Longest length.
        total: Sum of the lengths.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    shortest: int | None = None
    longest: int = 0
    total: int = 0

    def update(self, lengths: np.ndarray) -> None:
        """Adds records.

        Args:
            lengths: Bytes per record, int64 `[records]`, 0 or more.
        """
        if not len(lengths):
            return
        # frexp gives the exponent of the next power of two: the bit length, exact below 2**53.
        bits = np.frexp(lengths.astype(np.float64))[1]
        self.counts += np.bincount(bits, minlength=_BINS)
        low, high = int(lengths.min()), int(lengths.max())
        self.shortest = low if self.shortest is None else min(self.shortest, low)
        self.longest = max(self.longest, high)
        self.total += int(lengths.sum())

    @property
    def records(self) -> int:
        """Records added."""
        return int(self.counts.sum())

    def to_json(self) -> dict[str, Any]:
        """Returns the histogram: each bin's bounds, both inclusive, and its count."""
        used = np.flatnonzero(self.counts)
        bins = [
            {
                "from": 1 << (int(k) - 1) if k else 0,
                "to": (1 << int(k)) - 1,
                "records": int(self.counts[k]),
            }
            for k in (range(int(used[0]), int(used[-1]) + 1) if len(used) else ())
        ]
        return {
            "shortest": self.shortest,
            "longest": self.longest if self.records else None,
            "mean": self.total / self.records if self.records else None,
            "bins": bins,
        }
