"""Target and count encoding: a statistic per token, by exact sums, out of fold in training.

A train row's fold follows from a hash of its key, the same in the fit and in the records; its
value is the statistic of the other folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.encoder_files import EncoderFiles
from conf.encoders import TableSpec, fold_column
from conf.encoders.target import CountConfig, Statistic, TargetConfig
from conf.errors import ConfigError
from conf.schema import OOV_ID
from conf.storage.atomic_output import write_bytes_atomic
from etl.encoders.arrow_columns import cast_values, to_arrow
from etl.encoders.base import Encoder, fits, row_encoders
from etl.encoders.vocabulary import (
    checksum,
    first_token_id,
    live_tokens,
    load_vocabulary,
    to_parquet,
)
from etl.tfrecord.codec.crc32c import crc32c

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conf.etl.encodings import FeatureConfig
    from etl.encoders.fit import EarlierEncoders, OperationFit


_SEED = 41


def add_folds(rows: DataFrame, folds: Sequence[int], key: Sequence[str]) -> DataFrame:
    """Adds a row's fold for each number of folds.

    Args:
        rows: Rows with the columns of the key.
        folds: Numbers of folds.
        key: Columns that tell rows apart.

    Returns:
        The rows with `fold_column(n)` for each number, bigint in [0, n).
    """
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    row_key = F.xxhash64(F.lit(_SEED), *[F.col(quote_name(name)) for name in key])
    return rows.withColumns(
        {fold_column(n): F.pmod(row_key, F.lit(n)).cast("bigint") for n in folds}
    )


def build_statistic_table(values: np.ndarray) -> pa.Table:
    """Builds a table.

    Args:
        values: float `[vocabulary_size, 1 + folds]`: of all train samples, then without each
            fold.
    """
    names = ["all", *(f"fold_{fold}" for fold in range(values.shape[1] - 1))]
    columns = [pa.array(column.astype(np.float32)) for column in values.T]
    return pa.Table.from_arrays(columns, schema=_schema(names))


def write_statistic_table(table: pa.Table, path: Path) -> TableSpec:
    """Writes a table; the same values give the same bytes.

    Args:
        table: As from `build_statistic_table`.
        path: `<name>.table.parquet`.
    """
    data = to_parquet(table, _schema(table.schema.names))
    write_bytes_atomic(path, memoryview(data))
    name = path.name.removesuffix(".table.parquet")
    return TableSpec(name, path.name, len(table), checksum(data))


def load_statistic_table(directory: Path, spec: TableSpec) -> pa.Table:
    """Reads a table that a plan names.

    Raises:
        InputDataError: It is missing, damaged, or not the one that the plan was written for.
    """
    return EncoderFiles(directory, crc32c).read_table(spec)


def _schema(names: list[str]) -> pa.Schema:
    return pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names])


class TargetEncoder:
    """Looks a token's statistic up, of all train rows but those of the row's own fold.

    Args:
        encoder: Tokens to ids.
        table: `all`, `fold_0`, `fold_1`, …: float32 `[vocabulary_size]` each.
    """

    output_type = pa.float32()

    def __init__(self, encoder: Encoder, table: pa.Table) -> None:
        self._encoder = encoder
        self._values = np.stack([column.to_numpy() for column in table.columns], axis=1)

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes tokens `[rows]`.

        Args:
            columns: The tokens, and, where the statistic is out of fold, the folds: null outside
                of the train split.
        """
        ids = self._encoder.encode(columns[0]).to_numpy()
        if len(columns) == 1:
            return to_arrow(self._values[ids, 0])
        folds = cast_values(columns[1], pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        known = self._values.shape[1] - 1
        if len(folds) and not (folds.min() >= -1 and folds.max() < known):
            raise pa.ArrowInvalid(f"folds from {folds.min()} to {folds.max()}; {known} were fitted")
        return to_arrow(self._values[ids, folds + 1])


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
        df: The samples of the train split.
        vocabulary: The fitted vocabulary of the tokens.
        fit: Columns, folds and smoothing.

    Returns:
        float64 `[vocabulary_size, 1 + folds]`; tokens that no sample has, or that are
        retired, have the prior.
    """
    from pyspark.sql import functions as F

    from etl.tfrecord.spark.schema import quote_name

    rows = df.select(
        F.col(quote_name(fit.token)).alias("token"),
        F.col(quote_name(fit.label)).cast(_LABEL_TYPE).alias("label"),
        F.col(quote_name(fit.fold)).cast("int").alias("fold"),
    ).where(F.col("label").isNotNull())
    measures = (F.count("*").alias("n"), F.sum("label").cast("double").alias("total"))
    overall = rows.groupBy("fold").agg(*measures).toArrow()
    tokens = df.sparkSession.createDataFrame(live_tokens(vocabulary))
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


def _matrices(grouped: pa.Table, vocabulary: pa.Table, folds: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and sums per token of the vocabulary and fold, float64 `[tokens, folds]`."""
    found = pc.index_in(grouped["token"], value_set=vocabulary["token"].combine_chunks())
    rows, columns = found.to_numpy(), grouped["fold"].to_numpy()
    counts, sums = np.zeros((len(vocabulary), folds)), np.zeros((len(vocabulary), folds))
    counts[rows, columns] = grouped["n"].to_numpy()
    sums[rows, columns] = grouped["total"].to_numpy()
    return counts, sums


def _leave_out(by_fold: np.ndarray) -> np.ndarray:
    """Totals of all folds, then of all but each one: `[tokens, 1 + folds]`."""
    total = by_fold.sum(axis=1, keepdims=True)
    return np.concatenate([total, total - by_fold], axis=1)


row_encoders.declare(Statistic)(
    lambda operation, _, __, fitted: TargetEncoder(
        fitted.tokens[operation.vocabulary], fitted.tables[operation.table]
    )
)


@fits.declare(TargetConfig, CountConfig)
def _fit_statistic(
    feature: FeatureConfig, config: TargetConfig | CountConfig, fit: OperationFit
) -> Statistic:
    """Fits a statistic per token; tokens of an earlier version may keep theirs."""
    name, vocabulary = fit.find_vocabulary(feature)
    known = None if fit.earlier is None else _find_known(fit.earlier, feature.name, vocabulary)
    if known is not None and not np.isnan(known).any():
        values = known
    else:
        if isinstance(config, CountConfig):
            values = fit_counts(vocabulary, config.log1p)
        else:
            values = _fit_target(feature, config, fit, vocabulary)
        values = values if known is None else np.where(np.isnan(known), values, known)
    path = fit.directory / f"{feature.name}.table.parquet"
    fit.tables.append(write_statistic_table(build_statistic_table(values), path))
    return Statistic(name, feature.name)


def _fit_target(
    feature: FeatureConfig, config: TargetConfig, fit: OperationFit, vocabulary: pa.Table
) -> np.ndarray:
    label = config.label or fit.train.label
    if label is None:
        raise ConfigError(
            f"feature {feature.name!r} encodes a target, but the build has no label",
            fix="declare `label`, or set the encoding's `label` to a numeric column",
        )
    asked = TargetFit(
        feature.column, label, fold_column(config.folds), config.folds, config.prior_weight
    )
    rows = add_folds(fit.train.samples, (config.folds,), fit.train.key)
    return fit_target(rows, vocabulary, asked)


def _find_known(earlier: EarlierEncoders, feature: str, vocabulary: pa.Table) -> np.ndarray | None:
    """Returns what is known of the tokens of a vocabulary; None: the feature is fitted anew.

    Args:
        earlier: Encoders of an earlier version.
        feature: A feature with a statistic per token.
        vocabulary: The new vocabulary.

    Returns:
        float64 `[vocabulary_size, columns]`, NaN where the earlier version lacks the token.

    Raises:
        InputDataError: Files of the earlier version are damaged.
    """
    operation = earlier.find_kept(feature)
    if not isinstance(operation, Statistic):
        return None
    known = load_vocabulary(earlier.directory, earlier.plan.vocabulary(operation.vocabulary))
    [spec] = [table for table in earlier.plan.tables if table.name == operation.table]
    table = load_statistic_table(earlier.directory, spec)
    values = np.stack([column.to_numpy() for column in table.columns], axis=1)
    first, known_first = first_token_id(vocabulary), first_token_id(known)
    places = pc.index_in(vocabulary["token"], value_set=known["token"].combine_chunks())
    rows = places.fill_null(-1).to_numpy().astype(np.int64)
    # What is no token (padding, unknown and its buckets) has the same value in each row.
    rows = np.concatenate([np.full(first, OOV_ID), np.where(rows < 0, -1, rows + known_first)])
    return np.where((rows < 0)[:, None], np.nan, values[rows].astype(np.float64))
