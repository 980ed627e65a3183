"""Target and count encoding: a fitted statistic per token, out of fold for train rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from etl.encoders.base import Encoder
from etl.encoders.buffers import to_arrow
from etl.encoders.casting import cast_values


class StatisticEncoder:
    """Looks a token's statistic up, of all train rows but those of the row's own fold.

    Args:
        encoder: Tokens to ids.
        table: `all`, `fold_0`, `fold_1`, …: float32 `[vocabulary_size]` each.
    """

    output_type = pa.float32()

    def __init__(self, encoder: Encoder, table: pa.Table) -> None:
        self._encoder = encoder
        self._values = np.stack([column.to_numpy() for column in table.columns], axis=1)

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes tokens `[rows]`.

        Args:
            columns: The tokens, and, where the statistic is out of fold, the folds: null outside
                of the train split.
        """
        ids = self._encoder.encode(columns[0]).to_numpy()
        if len(columns) == 1:
            return to_arrow(self._values[ids, 0])
        folds = cast_values(columns[1], pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        known = self._values.shape[1] - 1
        if len(folds) and not (folds.min() >= -1 and folds.max() < known):
            raise pa.ArrowInvalid(f"folds from {folds.min()} to {folds.max()}; {known} were fitted")
        return to_arrow(self._values[ids, folds + 1])
