"""Lists: multi-hot vectors, merged index spaces, weights, lengths, vectors' bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from conf.encoders.declaration import NUMBERS, TEXT, Encoding, Operation, OperationOutput, key
from conf.encoders.tokens import TokensConfig
from conf.schema import FIRST_TOKEN_ID

if TYPE_CHECKING:
    from pydantic import Field

    from conf.config_base import Name

VectorType = Literal["float64", "float32"]

_MAX_VECTOR = 65_536


class MultiHot(Operation):
    """1.0 at each id of a small vocabulary that the row holds, 0.0 elsewhere.

    Attributes:
        vocabulary: Name of the vocabulary.
        size: Its size: the length of the vector.
        is_weighted: Whether a second column, aligned with the first, holds a weight for each
            value: it stands in the place of 1.0, and those of a repeated value are added. A
            missing weight is 0.
    """

    kind = "multi_hot"
    accepts = (*NUMBERS, *TEXT)
    raw_values = "compared"
    written_where_set = ("is_weighted",)
    vocabulary: str
    size: int
    is_weighted: bool = False

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32", shape=(self.size,))


class MultiHotConfig(TokensConfig):
    """A vector with 1.0 at each token that the row holds; for small vocabularies."""

    kind: Literal["multi_hot"] = "multi_hot"
    operation = MultiHot
    further_columns_key = "weights"
    loses_values = True
    sets_length = True
    weights: str | None = key(
        None, description="Column of a weight for each value, in the place of 1.0; None: none."
    )


class SparseIndices(Operation):
    """Indices of several index spaces merged into one: column after column.

    Index `i` of column `k` becomes `2 + sizes[0] + … + sizes[k-1] + i`; an index outside its
    space is 1. With the weights of the same columns this is a `SparseTensor` row of the dense
    length `2 + sum(sizes)`.

    Attributes:
        sizes: Size of the index space of each column.
    """

    kind = "sparse_indices"
    accepts = ("int64",)
    sizes: tuple[int, ...]

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + sum(self.sizes), (None,))


class SparseIndicesConfig(Encoding):
    """libfm indices, of one list column or of several with index spaces of their own."""

    kind: Literal["sparse_indices"] = "sparse_indices"
    operation = SparseIndices
    further_columns_key = "merged_with"
    takes = "lists"
    merged_with: tuple[str, ...] = key(
        (), description="Further list columns, each an index space behind the one before it."
    )
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = key(
        None, description="Size of each index space; null: the highest of the train split, plus 1."
    )

    def check(self) -> None:
        """Refuses sizes that do not fit the columns."""
        if self.sizes is not None and len(self.sizes) != 1 + len(self.merged_with):
            raise ValueError("`sizes` needs one entry per column: this one, then `merged_with`")

    @property
    def fits_numbers(self) -> bool:
        """Whether the sizes are fitted."""
        return self.sizes is None


class Weights(Operation):
    """Weights beside lists of ids, one for one; a missing weight is 0.

    Reads the columns of weights, then as many columns of ids, whose lengths they must have.

    Attributes:
        scaled: Whether the weights of a row are divided by their sum (where it is not 0).
    """

    kind = "weights"
    accepts = (*NUMBERS, *TEXT)
    output = OperationOutput("float32", shape=(None,))
    scaled: bool = False


class BagWeightsConfig(Encoding):
    """Weights beside the ids of another feature, one for one."""

    kind: Literal["weights"] = "weights"
    operation = Weights
    is_stated = True
    further_columns_key = "merged_with"
    takes = "lists"
    of: Name = key(description="Feature whose ids are weighted.")
    merged_with: tuple[str, ...] = key((), description="Weights of its further columns.")
    scaled: bool = key(False, description="Divide by the sum of the row's weights.")

    @property
    def accepts(self) -> tuple[str, ...]:
        """Numbers; the operation reads the ids that are weighted too, of any type."""
        return NUMBERS


class Length(Operation):
    """Number of values of a list, missing ones included; 0 of a missing list.

    Attributes:
        max_len: Values that are counted at most; None counts all.
    """

    kind = "length"
    accepts = (*NUMBERS, *TEXT)
    output = OperationOutput("int64", shape=())
    max_len: int | None = None


class LengthConfig(Encoding):
    """Number of values of a list."""

    kind: Literal["length"] = "length"
    operation = Length
    takes = "lists"
    of: str = key(description="List feature, whose `max_len` then holds too, or list column.")


class VectorBytes(Operation):
    """A list of numbers as the bytes of their values, little-endian; none of a missing list.

    Numbers nearer to 0 than `LEAST_NUMBER` are 0.

    Attributes:
        dtype: Type of the values.
        length: Numbers of each list.
    """

    kind = "vector_bytes"
    accepts = NUMBERS
    output = OperationOutput("bytes", shape=())
    dtype: VectorType
    length: int


class VectorBytesConfig(Encoding):
    """A list of numbers as the bytes of their values, as numpy's `tobytes` writes them."""

    kind: Literal["vector_bytes"] = "vector_bytes"
    operation = VectorBytes
    is_stated = True
    takes = "lists"
    sets_length = True
    length: int = key(ge=1, le=_MAX_VECTOR, description="Numbers that each list has.")
    dtype: VectorType = key("float64", description="Type of the values, little-endian.")
