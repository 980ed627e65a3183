"""Fitting target and count encoding: per token and fold, by exact sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.encoders.vocabulary import RETIRED_COLUMN, first_token_id

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Labels are summed as decimals: sums of floats depend on the order of the rows.
_LABEL_TYPE = "decimal(28,9)"


@dataclass(frozen=True)
class TargetFit:
    """What a target encoding is fitted to.

    Attributes:
        token: Column of tokens.
        label: Numeric column.
        fold: Column of folds.
        folds: Number of folds.
        prior_weight: Rows that the overall mean counts for.
    """

    token: str
    label: str
    fold: str
    folds: int
    prior_weight: float


def fit_target(df: DataFrame, vocabulary: pa.Table, fit: TargetFit) -> np.ndarray:
    """Fits the smoothed mean of the label per token: `(sum + w * prior) / (count + w)`.

    The prior of a fold is the mean of the other folds, as its counts and sums are: nothing in a
    train row's value comes from the row's own fold (Micci-Barreca 2001, smoothed; folds as in
    Prokhorenkova et al. 2018, section 3.2, "holdout").

    Args:
        df: The train split.
        vocabulary: The fitted vocabulary of the tokens.
        fit: Columns, folds and smoothing.

    Returns:
        float64 `[vocabulary_size, 1 + folds]`; tokens that the train split lacks, or that are
        retired, have the prior.
    """
    from pyspark.sql import functions as F

    rows = df.select(
        F.col(f"`{fit.token}`").alias("token"),
        F.col(f"`{fit.label}`").cast(_LABEL_TYPE).alias("label"),
        F.col(f"`{fit.fold}`").cast("int").alias("fold"),
    ).where(F.col("label").isNotNull())
    measures = (F.count("*").alias("n"), F.sum("label").cast("double").alias("total"))
    overall = rows.groupBy("fold").agg(*measures).toArrow()
    tokens = df.sparkSession.createDataFrame(_live_tokens(vocabulary))
    by_token = rows.join(tokens, "token", "left_semi").groupBy("token", "fold").agg(*measures)
    counts, sums = _matrices(by_token.toArrow(), vocabulary, fit.folds)
    all_counts, all_sums = np.zeros(fit.folds), np.zeros(fit.folds)
    fold = overall["fold"].to_numpy()
    all_counts[fold], all_sums[fold] = overall["n"].to_numpy(), overall["total"].to_numpy()
    prior = _leave_out(all_sums[None]) / np.maximum(_leave_out(all_counts[None]), 1.0)
    weight = fit.prior_weight
    smoothed = (_leave_out(sums) + weight * prior) / (_leave_out(counts) + weight)
    first = first_token_id(vocabulary)
    return np.concatenate([np.repeat(prior, first, axis=0), smoothed])


def fit_counts(vocabulary: pa.Table, log1p: bool) -> np.ndarray:
    """Returns how often each id's token occurs in the train split, `[vocabulary_size, 1]`.

    Args:
        vocabulary: The fitted vocabulary; it has counted already.
        log1p: Whether to take `log(1 + count)`.
    """
    first = first_token_id(vocabulary)
    counts = np.concatenate([np.zeros(first), vocabulary["count"].to_numpy()])
    return (np.log1p(counts) if log1p else counts)[:, None]


def _live_tokens(vocabulary: pa.Table) -> pa.Table:
    if RETIRED_COLUMN in vocabulary.schema.names:
        vocabulary = vocabulary.filter(pc.invert(vocabulary[RETIRED_COLUMN]))
    return vocabulary.select(["token"])


def _matrices(grouped: pa.Table, vocabulary: pa.Table, folds: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and sums per token of the vocabulary and fold, float64 `[tokens, folds]`."""
    place = pc.index_in(grouped["token"], value_set=vocabulary["token"].combine_chunks())
    rows, columns = place.to_numpy(), grouped["fold"].to_numpy()
    counts, sums = np.zeros((len(vocabulary), folds)), np.zeros((len(vocabulary), folds))
    counts[rows, columns] = grouped["n"].to_numpy()
    sums[rows, columns] = grouped["total"].to_numpy()
    return counts, sums


def _leave_out(by_fold: np.ndarray) -> np.ndarray:
    """Totals of all folds, then of all but each one: `[tokens, 1 + folds]`."""
    total = by_fold.sum(axis=1, keepdims=True)
    return np.concatenate([total, total - by_fold], axis=1)
