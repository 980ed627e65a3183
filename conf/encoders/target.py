"""Statistics of the train split per token: target and count encoding."""

from __future__ import annotations

from conf.encoders.declaration import TEXT, Operation, OperationOutput

FOLDS = 5
"""Parts of the train split; a train row's mean comes from the other parts."""
FOLD_COLUMN = f"__fold_{FOLDS}"
"""Column that holds a train row's fold, and null in every other row."""


class Statistic(Operation):
    """A statistic of the train split per token: target or count encoding.

    A train row has the statistic of the other folds, so never its own label; every other row, and
    serving, has that of the whole train split.

    Attributes:
        vocabulary: Vocabulary of the tokens.
        table: Table of the values, `[vocabulary_size, 1 + folds]`.
    """

    kind = "statistic"
    accepts = ("int64", *TEXT)
    raw_values = "compared"
    output = OperationOutput("float32", shape=())
    vocabulary: str
    table: str
