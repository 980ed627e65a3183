"""The encoder that keeps values as they are."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from etl.encoders.casting import cast_values


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
