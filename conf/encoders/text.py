"""Text: hashed n-grams of words or characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from conf.encoders.declaration import MAX_BUCKETS, Encoding, Operation, OperationOutput, key
from conf.schema import FIRST_TOKEN_ID

if TYPE_CHECKING:
    from pydantic import Field

TextUnit = Literal["word", "char"]


class Ngrams(Operation):
    """Hashes of runs of words or characters.

    ASCII characters that are neither letters nor digits separate words; a run of them becomes one
    space between words. Only ASCII letters are lower-cased, so that every engine agrees.

    Attributes:
        unit: Words, or characters (Unicode code points) of the words and the spaces between them.
        sizes: Lengths of the runs, in the order in which they are listed.
        buckets: Ids are 2 + fingerprint mod buckets.
        lower: Whether ASCII letters are lower-cased.
    """

    kind = "ngrams"
    accepts = ("string",)
    unit: TextUnit
    sizes: tuple[int, ...]
    buckets: int
    lower: bool = True

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + self.buckets, (None,))


class NgramsConfig(Encoding):
    """Text to hashed runs of words or characters."""

    kind: Literal["ngrams"] = "ngrams"
    operation = Ngrams
    is_stated = True
    takes = "values"
    buckets: int = key(ge=1, le=MAX_BUCKETS, description="Ids that runs are hashed to.")
    unit: TextUnit = key("word", description="What a run is made of.")
    sizes: tuple[Annotated[int, Field(ge=1, le=20)], ...] = key(
        (1,), min_length=1, description="Lengths of the runs."
    )
    lower: bool = key(True, description="Lower-case ASCII letters.")
