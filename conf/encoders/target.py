"""Statistics of the train split per token: target and count encoding."""

from __future__ import annotations

from typing import Literal

from conf.encoders.declaration import TEXT, Operation, OperationOutput, key
from conf.encoders.tokens import TokensConfig


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


class StatisticConfig(TokensConfig):
    """A statistic per token."""

    operation = Statistic
    takes = "values"
    sets_length = True
    fits_numbers = True


class TargetConfig(StatisticConfig):
    """Smoothed mean of the label per token, out of fold for train rows."""

    kind: Literal["target"] = "target"
    folds: int = key(
        5,
        ge=2,
        le=100,
        description="Parts of the train split; a row's mean comes from the other parts.",
    )
    prior_weight: float = key(20.0, gt=0, description="Rows that the overall mean counts for.")
    label: str | None = key(None, description="Numeric column; null: the build's label.")


class CountConfig(StatisticConfig):
    """Occurrences of a token in the train split."""

    kind: Literal["count"] = "count"
    log1p: bool = key(False, description="log(1 + count) in place of the count.")
