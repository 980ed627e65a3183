"""Doubles and decimals to float32, which is all that the wire has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.tfrecord.lowering.values import Converted, nulls, numbers, refuse_first

FLOAT32_MAX = float(np.finfo(np.float32).max)
# Whole numbers up to here are exact in float32; larger ones that change are ids or times.
_EXACT_INTEGERS = 2.0**24

_FIX = "policy float64=cast or clip, or cast the column before the write"


@dataclass(frozen=True)
class NarrowDoubles:
    """float64 to the nearest float32.

    Attributes:
        mode: Policy `float64`, see `ColumnPolicy`.
    """

    mode: Literal["error", "exact", "cast", "clip"]
    target: pa.DataType = field(default_factory=pa.float32)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        wide = numbers(values)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = wide.astype(np.float32)
            refusal = None
            if self.mode == "clip":
                beyond = np.isinf(narrow) & np.isfinite(wide)
                if beyond.any():
                    narrow[beyond] = np.copysign(np.float32(FLOAT32_MAX), narrow[beyond])
            elif self.mode != "cast":
                changed = (narrow != wide) & ~np.isnan(wide)
                if self.mode == "error":
                    changed = changed & _is_gross(wide, narrow)
                refusal = refuse_first(
                    changed,
                    values,
                    "a double that float32 cannot hold",
                    _ALLOWED[self.mode],
                    _FIX,
                )
        return pa.array(narrow, mask=nulls(values)), refusal


_ALLOWED = {
    "error": "up to 3.4028235e38 in magnitude, no whole number that would become another",
    "exact": "values that float32 holds exactly",
}


def _is_gross(wide: np.ndarray, narrow: np.ndarray) -> np.ndarray:
    """Which of the changed values change by more than rounding, bool `[values]`."""
    beyond = np.isinf(narrow) | (narrow == 0)
    return beyond | ((np.abs(wide) > _EXACT_INTEGERS) & (np.trunc(wide) == wide))


@dataclass(frozen=True)
class NarrowDecimals:
    """Decimals to float32 where it holds them exactly, which 0.5 is and 0.1 is not."""

    target: pa.DataType = field(default_factory=pa.float32)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        wide = numbers(values.cast(pa.float64()))
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        bad = narrow != wide
        # A double may itself be a rounded decimal, so what it stands for is compared too.
        back = pa.array(np.where(bad, 0, narrow).astype(np.float64)).cast(values.type, safe=False)
        same = numbers(pc.equal(back, values.fill_null(0) if values.null_count else values))
        refusal = refuse_first(
            bad | ~same, values, "a decimal that float32 cannot hold", _ALLOWED["exact"], _FIX
        )
        return pa.array(narrow, mask=nulls(values)), refusal
