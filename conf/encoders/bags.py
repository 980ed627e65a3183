"""Lists: multi-hot vectors, merged index spaces, weights, lengths, vectors' bytes."""

from __future__ import annotations

from typing import Literal

from conf.encoders.declaration import NUMBERS, TEXT, Operation, OperationOutput
from conf.schema import FIRST_TOKEN_ID

VectorType = Literal["float64", "float32"]


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


class Length(Operation):
    """Number of values of a list, missing ones included; 0 of a missing list.

    Attributes:
        max_len: Values that are counted at most; None counts all.
    """

    kind = "length"
    accepts = (*NUMBERS, *TEXT)
    output = OperationOutput("int64", shape=())
    max_len: int | None = None


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
