"""Text: hashed n-grams of words or characters."""

from __future__ import annotations

from typing import Literal

from conf.encoders.declaration import Operation, OperationOutput
from conf.schema import FIRST_TOKEN_ID

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
