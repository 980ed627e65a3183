"""Alias tables: a draw from any discrete distribution by one index and one comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class AliasTable:
    """One row per outcome; groups are distributions of their own.

    A draw takes a row of its group uniformly, and a fraction in [0, 1): below the row's threshold
    the outcome is the row's, else that of its alias.

    Attributes:
        thresholds: `[n]` in [0, 1].
        aliases: `[n]` row of the other outcome, of the same group.
        probabilities: `[n]` probability of each row's outcome in its group.
    """

    thresholds: FloatArray
    aliases: IntArray
    probabilities: FloatArray


def build_alias_table(weights: FloatArray, groups: IntArray) -> AliasTable:
    """Builds the tables of all groups in one sweep, without a loop.

    Walker 1977, "An efficient method for generating discrete random variables", with the sweep of
    Hübschle-Schneider & Sanders 2022, "Parallel weighted random sampling", section 4: rows below
    the mean weight are filled up by those above it in turn; one that has given too much is filled
    up by the next. Running sums tell who fills whom.

    Args:
        weights: `[n]`, positive.
        groups: `[n]` group of each row, rising: 0, 0, 1, …
    """
    sizes = np.bincount(groups)
    probabilities = weights / np.bincount(groups, weights)[groups]
    scaled = probabilities * sizes[groups]
    small, large = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    thresholds, aliases = np.ones(len(weights)), np.arange(len(weights), dtype=np.int64)
    if not len(small) or not len(large):
        return AliasTable(thresholds, aliases, probabilities)
    missing = np.concatenate([[0.0], np.cumsum(1 - scaled[small])])
    surplus = np.cumsum(scaled[large] - 1)
    # Rounding must not lend from another group, and a group may be even but for rounding.
    first = np.searchsorted(groups[large], groups[small], "left")
    last = np.searchsorted(groups[large], groups[small], "right") - 1
    giver = np.clip(np.searchsorted(surplus, missing[:-1], "right"), first, np.maximum(first, last))
    uneven = last >= first
    thresholds[small[uneven]] = scaled[small[uneven]]
    aliases[small[uneven]] = large[giver[uneven]]
    filled = np.clip(
        np.searchsorted(missing[:-1], surplus, "left"),
        np.searchsorted(groups[small], groups[large], "left"),
        np.searchsorted(groups[small], groups[large], "right"),
    )
    given = missing[filled]
    has_next = np.append(groups[large[1:]] == groups[large[:-1]], False)
    thresholds[large] = np.where(has_next, np.clip(1 - (given - surplus), 0, 1), 1.0)
    aliases[large] = np.where(has_next, np.append(large[1:], 0), large)
    return AliasTable(thresholds, aliases, probabilities)
