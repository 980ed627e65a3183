"""First values of rows that keys get: a function of seed, table and key, and of nothing else."""

from __future__ import annotations

import math
import zlib

import numpy as np

from conf.schema import OOV_ID
from etl.tfrecord.kernels import inlined, kernel

_TWO_PI = 2.0 * math.pi


def draw_first_rows(
    keys: np.ndarray, dim: int, *, seed: int, table: str, stddev: float
) -> np.ndarray:
    """Draws the first values of rows from a normal distribution of mean 0.

    The key 1, which encoders give to null, starts at zeros, as the OOV row of a static table does.

    Args:
        keys: int64 `[n]`.
        dim: Length of a row.
        seed: The run's seed.
        table: Name of the table.
        stddev: Standard deviation.

    Returns:
        float32 `[n, dim]`.
    """
    rows = np.empty((len(keys), dim), np.float32)
    stream = np.int64((seed << 32 | zlib.crc32(table.encode())) & (1 << 63) - 1)
    _fill_rows(np.ascontiguousarray(keys, np.int64), stream, stddev, rows)
    return rows


@inlined
def _mix(state):  # type: ignore[no-untyped-def]
    """The output function of SplitMix64 (Steele, Lea & Flood 2014, figure 17)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@inlined
def _uniform(state):  # type: ignore[no-untyped-def]
    """A number in `(0, 1]`, float64."""
    return (np.float64(np.int64(_mix(state) >> np.uint64(11))) + 1.0) * 2.0**-53


@kernel
def _fill_rows(keys, stream, stddev, rows):  # type: ignore[no-untyped-def]
    """Pairs of normal numbers by the transform of Box & Muller 1958."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    dim = rows.shape[1]
    start = _mix(np.uint64(stream) + gamma)
    for i in range(len(keys)):
        if keys[i] == OOV_ID:
            rows[i, :] = 0.0
            continue
        state = _mix(_mix(np.uint64(keys[i]) + gamma) ^ start)
        for j in range(0, dim, 2):
            state += gamma
            radius = stddev * math.sqrt(-2.0 * math.log(_uniform(state)))
            state += gamma
            angle = _TWO_PI * _uniform(state)
            rows[i, j] = radius * math.cos(angle)
            if j + 1 < dim:
                rows[i, j + 1] = radius * math.sin(angle)
