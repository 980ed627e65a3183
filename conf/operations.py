"""The operations of encoders, as data: the same operation is executed by Arrow and by TensorFlow.

Ids follow the rule of the vocabularies: 0 pads, 1 stands for a missing value, real values start
at 2. Missing is null, and NaN where values are floats. `encoders.json` holds operations as JSON
objects.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from conf.dates import PART_SIZES, Part, Period, TimeUnit
from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID, DType

TextUnit = Literal["word", "char"]
VectorType = Literal["float64", "float32"]

LEAST_NUMBER = 2.0**-126
"""The least normal float32: numbers nearer to 0 count as 0, as it does on most accelerators."""

CROSS_SEPARATOR = "\x1f"
"""Stands between the fields of a cross: ASCII's unit separator, which text does not hold."""

_TEXT = ("string", "bytes")
NUMBERS = ("int64", "float32", "float64")
"""Raw types that are numbers."""


@dataclass(frozen=True)
class OperationOutput:
    """Type and shape of the result of an operation.

    Attributes:
        dtype: Type on the wire.
        vocabulary_size: Number of ids, or None for plain values.
        shape: Shape of the feature; None: that of the raw column.
    """

    dtype: DType
    vocabulary_size: int | None = None
    shape: tuple[int | None, ...] | None = None

    @property
    def pad_value(self) -> int | float | str:
        """Value in place of a missing one, and of a missing position."""
        if self.dtype == "bytes":
            return ""
        return 0 if self.dtype == "int64" else 0.0


@dataclass(frozen=True)
class Hash:
    """FarmHash Fingerprint64 of a value's text, as `tf.strings.to_hash_bucket_fast` computes it.

    Attributes:
        buckets: Ids are 2 + fingerprint mod buckets; None keeps all 64 bits as a key.
    """

    kind: ClassVar[str] = "hash"
    accepts: ClassVar[tuple[str, ...]] = ("int64", *_TEXT)
    buckets: int | None

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput(
            "int64", None if self.buckets is None else FIRST_TOKEN_ID + self.buckets
        )


@dataclass(frozen=True)
class Bucketize:
    """2 + the number of boundaries that are not above the value.

    Attributes:
        boundaries: Rising, float64.
    """

    kind: ClassVar[str] = "bucketize"
    accepts: ClassVar[tuple[str, ...]] = NUMBERS
    boundaries: tuple[float, ...]

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + len(self.boundaries) + 1)


@dataclass(frozen=True)
class Normalize:
    """Fill, clip, logarithm, then `(x - center) * factor`, in float64; the result is float32.

    Attributes:
        fill: Value of a missing one; None: the result is 0.
        minimum: Lower bound of the raw value, or None.
        maximum: Upper bound of the raw value, or None.
        log1p: Whether to take `sign(x) * log(1 + |x|)`.
        center: Subtracted.
        factor: Multiplied with the difference.
    """

    kind: ClassVar[str] = "normalize"
    accepts: ClassVar[tuple[str, ...]] = NUMBERS
    fill: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    log1p: bool = False
    center: float = 0.0
    factor: float = 1.0

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32")


@dataclass(frozen=True)
class DatePart:
    """A part of the date, from the time since the epoch: 2 + its value, from 0.

    Attributes:
        part: Monday is weekday 0; the first day of a month, the first month, and the first day
            of a year are 0 as well.
        unit: Unit of the raw value.
        utc_offset_minutes: Fixed offset of the local time from UTC.
    """

    kind: ClassVar[str] = "date_part"
    accepts: ClassVar[tuple[str, ...]] = ("int64",)
    part: Part
    unit: TimeUnit = "ms"
    utc_offset_minutes: int = 0

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + PART_SIZES[self.part])


@dataclass(frozen=True)
class Cross:
    """Hash of several fields joined by `CROSS_SEPARATOR`; missing where one of them is.

    Where fields are lists, every combination of their values is crossed, the last list's varying
    fastest; the feature keeps its first `max_len`.

    Attributes:
        buckets: Ids are 2 + fingerprint mod buckets.
        prepared: By field, what is done to it before: the field is then the id that comes out, a
            missing one where that is 1; None where the field is the value itself. Empty: no field
            is prepared.
    """

    kind: ClassVar[str] = "cross"
    accepts: ClassVar[tuple[str, ...]] = (*NUMBERS, *_TEXT)
    buckets: int
    prepared: tuple[Bucketize | DatePart | None, ...] = ()

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + self.buckets)

    def preparation(self, field: int) -> Bucketize | DatePart | None:
        """Operation on a field before it is hashed, or None."""
        return self.prepared[field] if self.prepared else None


@dataclass(frozen=True)
class Cyclical:
    """Sine and cosine of the position within a period, to the second; a week starts on Monday."""

    kind: ClassVar[str] = "cyclical"
    accepts: ClassVar[tuple[str, ...]] = ("int64",)
    period: Period
    unit: TimeUnit = "ms"
    utc_offset_minutes: int = 0

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32", shape=(2,))


@dataclass(frozen=True)
class Ngrams:
    """Hashes of runs of words or characters.

    ASCII characters that are neither letters nor digits separate words; a run of them becomes one
    space between words. Only ASCII letters are lower-cased, so that every engine agrees.

    Attributes:
        unit: Words, or characters (Unicode code points) of the words and the spaces between them.
        sizes: Lengths of the runs, in the order in which they are listed.
        buckets: Ids are 2 + fingerprint mod buckets.
        lower: Whether ASCII letters are lower-cased.
    """

    kind: ClassVar[str] = "ngrams"
    accepts: ClassVar[tuple[str, ...]] = ("string",)
    unit: TextUnit
    sizes: tuple[int, ...]
    buckets: int
    lower: bool = True

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + self.buckets, (None,))


@dataclass(frozen=True)
class MultiHot:
    """1.0 at each id of a small vocabulary that the row holds, 0.0 elsewhere.

    Attributes:
        vocabulary: Name of the vocabulary.
        size: Its size: the length of the vector.
        is_weighted: Whether a second column, aligned with the first, holds a weight for each
            value: it stands in the place of 1.0, and those of a repeated value are added. A
            missing weight is 0.
    """

    kind: ClassVar[str] = "multi_hot"
    accepts: ClassVar[tuple[str, ...]] = (*NUMBERS, *_TEXT)
    vocabulary: str
    size: int
    is_weighted: bool = False

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32", shape=(self.size,))


@dataclass(frozen=True)
class SparseIndices:
    """Indices of several index spaces merged into one: column after column.

    Index `i` of column `k` becomes `2 + sizes[0] + … + sizes[k-1] + i`; an index outside its
    space is 1. With the weights of the same columns this is a `SparseTensor` row of the dense
    length `2 + sum(sizes)`.

    Attributes:
        sizes: Size of the index space of each column.
    """

    kind: ClassVar[str] = "sparse_indices"
    accepts: ClassVar[tuple[str, ...]] = ("int64",)
    sizes: tuple[int, ...]

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + sum(self.sizes), (None,))


@dataclass(frozen=True)
class Weights:
    """Weights beside lists of ids, one for one; a missing weight is 0.

    Reads the columns of weights, then as many columns of ids, whose lengths they must have.

    Attributes:
        scaled: Whether the weights of a row are divided by their sum (where it is not 0).
    """

    kind: ClassVar[str] = "weights"
    accepts: ClassVar[tuple[str, ...]] = (*NUMBERS, *_TEXT)
    scaled: bool = False

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32", shape=(None,))


@dataclass(frozen=True)
class Length:
    """Number of values of a list, missing ones included; 0 of a missing list.

    Attributes:
        max_len: Values that are counted at most; None counts all.
    """

    kind: ClassVar[str] = "length"
    accepts: ClassVar[tuple[str, ...]] = (*NUMBERS, *_TEXT)
    max_len: int | None = None

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", shape=())


@dataclass(frozen=True)
class IsMissing:
    """1.0 where the value is missing, else 0.0."""

    kind: ClassVar[str] = "is_missing"
    accepts: ClassVar[tuple[str, ...]] = (*NUMBERS, *_TEXT)

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32", shape=())


@dataclass(frozen=True)
class VectorBytes:
    """A list of numbers as the bytes of their values, little-endian; none of a missing list.

    Numbers nearer to 0 than `LEAST_NUMBER` are 0.

    Attributes:
        dtype: Type of the values.
        length: Numbers of each list.
    """

    kind: ClassVar[str] = "vector_bytes"
    accepts: ClassVar[tuple[str, ...]] = NUMBERS
    dtype: VectorType
    length: int

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("bytes", shape=())


@dataclass(frozen=True)
class Statistic:
    """A statistic of the train split per token: target or count encoding.

    A train row has the statistic of the other folds, so never its own label; every other row, and
    serving, has that of the whole train split.

    Attributes:
        vocabulary: Vocabulary of the tokens.
        table: Table of the values, `[vocabulary_size, 1 + folds]`.
    """

    kind: ClassVar[str] = "statistic"
    accepts: ClassVar[tuple[str, ...]] = ("int64", *_TEXT)
    vocabulary: str
    table: str

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("float32", shape=())


Operation = (
    Hash
    | Bucketize
    | Normalize
    | Cross
    | DatePart
    | Cyclical
    | Ngrams
    | MultiHot
    | SparseIndices
    | Weights
    | Length
    | IsMissing
    | VectorBytes
    | Statistic
)
OPERATIONS: Mapping[str, type[Operation]] = {
    operation.kind: operation for operation in typing.get_args(Operation)
}


_WRITTEN_WHERE_SET = ("prepared", "is_weighted")


def operation_to_json(operation: Operation) -> dict[str, Any]:
    """Returns an operation as a JSON object.

    What was added to an operation later stands there only where it is used: what was written
    before keeps its bytes and its fingerprint.
    """
    data = {"kind": operation.kind, **asdict(operation)}
    if isinstance(operation, Cross):
        parts = [None if own is None else operation_to_json(own) for own in operation.prepared]
        data["prepared"] = parts
    return {name: value for name, value in data.items() if name not in _WRITTEN_WHERE_SET or value}


def operation_from_json(data: Mapping[str, Any]) -> Operation:
    """Builds an operation from its JSON object.

    Raises:
        InputDataError: It is of no known kind.
        TypeError: A field is missing or unknown.
    """
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    if "prepared" in fields:
        fields["prepared"] = tuple(
            None if own is None else operation_from_json(own) for own in fields["prepared"]
        )
    kind = fields.pop("kind", None)
    make: Any = OPERATIONS.get(kind)
    if make is None:
        raise InputDataError(
            "an encoder is of an unknown kind",
            received=kind,
            allowed=", ".join(OPERATIONS),
            fix="read the dataset with the version of Sluice that wrote it",
        )
    operation: Operation = make(**fields)
    return operation
