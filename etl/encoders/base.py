"""What every encoder is, and the encoder that keeps values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from etl.encoders.arrow_columns import cast_values


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


class RowEncoder(Protocol):
    """Turns whole raw columns into one feature: fields that meet, lists that change in length."""

    @property
    def output_type(self) -> pa.DataType:
        """Type of the feature's column."""

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes rows.

        Args:
            columns: The raw columns that the feature reads, in the plan's order, `[rows]` each.

        Returns:
            The feature, `output_type` `[rows]`.

        Raises:
            pa.ArrowInvalid: A value that the encoder cannot take; the caller names the column.
        """


@dataclass(frozen=True)
class IdentityEncoder:
    """Casts values to the feature's type; null stays null.

    Attributes:
        raw_type: Type that the raw column was declared with; values pass through it, as they do
            when a model is served.
        output_type: Type of the feature.
    """

    raw_type: pa.DataType
    output_type: pa.DataType

    def encode(self, values: pa.Array) -> pa.Array:
        """Casts values.

        Args:
            values: Raw values `[values]`.

        Returns:
            The same values, `output_type` `[values]`.

        Raises:
            pa.ArrowInvalid: The cast would lose a value.
        """
        return cast_values(cast_values(values, self.raw_type), self.output_type)
