"""What every encoder is."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa


class Encoder(Protocol):
    """Turns raw values of one column into feature values, one for one.

    Lists are taken apart before and put together after, so an encoder only ever sees values.
    """

    @property
    def output_type(self) -> pa.DataType:
        """Type of the encoded values."""

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes values.

        Args:
            values: Raw values `[values]`, possibly sliced, possibly with nulls.

        Returns:
            Encoded values, `output_type` `[values]`.

        Raises:
            pa.ArrowInvalid: A value that the encoder cannot take; the caller names the column.
        """
