"""What every encoder is, how a family declares what executes and what fits its operations.

An operation is executed, and an encoding fitted, in the file named like the file of
`conf/encoders/` that declares it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from conf.encoders import ColumnEncoding
from conf.encoders.declaration import Executions, Operation
from conf.schema import FeatureSpec
from etl.encoders.arrow_columns import cast_values, flatten_lists

if TYPE_CHECKING:
    from conf.etl.encodings import FeatureConfig
    from etl.encoders.fit import OperationFit
    from etl.encoders.number_fit import NumberRequest
    from etl.features.plan import FeaturePlan

RAW_TYPES: Mapping[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}


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
class Fitted:
    """What encoders were fitted to.

    Attributes:
        tokens: Encoder by vocabulary.
        list_tokens: Encoder of the values of lists by vocabulary.
        tables: Table of statistics by name.
    """

    tokens: Mapping[str, Encoder]
    list_tokens: Mapping[str, Encoder]
    tables: Mapping[str, pa.Table]


@dataclass(frozen=True)
class ValueEncoder:
    """An encoder of single values, applied to scalars or inside of lists.

    A null list stays null, an empty one empty; a longer one keeps its first `max_len` values.
    """

    spec: FeatureSpec
    encoder: Encoder

    @property
    def output_type(self) -> pa.DataType:
        """Type of the feature's column."""
        values = self.encoder.output_type
        return pa.list_(values) if self.spec.is_list else values

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one column `[rows]`."""
        (column,) = columns
        if not self.spec.is_list:
            return self.encoder.encode(column)
        exact_len = None if self.spec.is_ragged else self.spec.shape[0]
        lists = flatten_lists(column, self.spec.max_len, exact_len)
        # The field's own name for list elements, whatever the batch calls them.
        return lists.rebuild(self.encoder.encode(lists.values)).cast(self.output_type)


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


FAMILIES = "etl.encoders.{family}"
value_encoders: Executions[Callable[[pa.DataType, Any], Encoder]] = Executions(FAMILIES)
"""By operation on single values: what makes its encoder of the raw type and the operation."""
row_encoders: Executions[Callable[[Any, FeatureSpec, ColumnEncoding, Fitted], RowEncoder]] = (
    Executions(FAMILIES)
)
"""By operation on whole columns: what makes its encoder."""
fits: Executions[Callable[[FeatureConfig, Any, OperationFit], Operation]] = Executions(FAMILIES)
"""By encoding: what makes the operation of a feature where the config does not state it."""
number_requests: Executions[
    Callable[[FeatureConfig, Any, FeaturePlan], Mapping[str, NumberRequest]]
] = Executions(FAMILIES)
"""By encoding: the numbers of the train split that it needs for that, by name."""
