"""The rule for float64 values on a wire that has float32 alone, as its error tells it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError

_ALLOWED = (
    "fractions (stored as the nearest float32), whole numbers that float32 holds exactly, "
    "infinities and NaN"
)


def find_refused(values: np.ndarray) -> np.ndarray:
    """Which float64 values the encoder refuses.

    Refused are finite values beyond the float32 range, values other than zero that would become
    zero, and whole numbers that would become others: those are ids or times, not measurements.

    Args:
        values: float64 `[values]`.

    Returns:
        bool `[values]`.
    """
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float32)
    changed = (narrow.astype(np.float64) != values) & np.isfinite(values)
    return changed & ((np.floor(values) == values) | (narrow == 0))


def describe_refusal(name: str, column: pa.Array, row: int) -> InputDataError:
    """Builds the error for a row with a refused value.

    Args:
        name: Column name.
        column: Its data: float64 or decimal, or lists of these, nested or not.
        row: Row of the batch.
    """
    values = column.slice(row, 1)
    while hasattr(values.type, "value_field"):
        values = values.flatten()
    plain = values.drop_null().cast(pa.float64()).to_numpy(zero_copy_only=False)
    value = float(plain[find_refused(plain)][0])
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.float32(value)
    if np.isinf(narrow):
        problem = "has a value beyond the float32 range"
    elif narrow == 0:
        problem = "has a value so small that it would become zero as float32"
    else:
        problem = f"has a whole number that would become {int(narrow)} as float32"
    return InputDataError(
        f"column {name!r} {problem}",
        received=f"{value!r} in row {row} of the batch",
        allowed=_ALLOWED,
        fix="cast ids and times to int64, rescale the column, or choose another float64 policy "
        "for it (cast, clip)",
    )
