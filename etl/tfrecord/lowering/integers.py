"""Unsigned 64-bit integers to int64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from etl.tfrecord.lowering.values import Converted, nulls, numbers, refuse_first

_INT64_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True)
class NarrowUnsigned:
    """uint64 to int64.

    Attributes:
        mode: Policy `integers`, see `ColumnPolicy`.
    """

    mode: Literal["error", "clip"]
    target: pa.DataType = field(default_factory=pa.int64)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        wide, refusal = numbers(values), None
        if self.mode == "clip":
            wide = np.minimum(wide, np.uint64(_INT64_MAX))
        else:
            refusal = refuse_first(
                wide > _INT64_MAX,
                values,
                "an unsigned integer beyond int64",
                f"at most {_INT64_MAX}",
                "policy integers=clip, or cast the column before the write",
            )
        return pa.array(wide.view(np.int64), mask=nulls(values)), refusal
