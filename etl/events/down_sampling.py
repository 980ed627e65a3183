"""Down-sampling: kept events that are no samples; they stay in histories, but have no record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.labels import DownSamplingConfig, NegativesConfig
from conf.splits import TRAIN
from etl.events.identity import DROP_COLUMN, POSITION_COLUMN, event_columns, hash_fraction
from etl.events.sample_filter import NOT_SAMPLED_COLUMN, leave_out_samples
from etl.events.splits import SPLIT_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DOWN_SAMPLED = "down_sampled"
EXPOSURE_NOT_SAMPLED = "exposure_not_sampled"
INSIDE_SEQUENCE = "inside_sequence"


def before_sampling(events: DataFrame) -> DataFrame:
    """Returns the events that are samples, and those that only a sampling has left out.

    What is fitted on them has the distribution of the log, as sums with weights 1/rate have, and
    sees no event that could be no sample.

    Args:
        events: Events with `__skip`.
    """
    reason = F.col(NOT_SAMPLED_COLUMN)
    drawn = reason.isin(DOWN_SAMPLED, EXPOSURE_NOT_SAMPLED, INSIDE_SEQUENCE)
    return events.where(reason.isNull() | drawn)


def mark_not_sampled(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Notes in `__skip` which samples are left out, and why.

    Args:
        events: Event rows with `__split`, `__drop`, `__skip` and the label.
        config: The build's config; `train_samples`, `negatives` and `down_sampling` decide.
    """
    label, negatives = config.label_name, config.negatives
    if config.train_samples != "all":
        return _keep_ends(events, config)
    if config.down_sampling is not None and label is not None:
        return _down_sample(events, config, config.down_sampling, label)
    if negatives is not None and not negatives.draws and label is not None:
        return _sample_exposures(events, config, negatives, label)
    return events


def _keep_ends(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Keeps each user's last train sample and, if asked for, every n-th event before it."""
    is_train = (F.col(SPLIT_COLUMN) == TRAIN) & F.col(DROP_COLUMN).isNull()
    is_sample = is_train & F.col(NOT_SAMPLED_COLUMN).isNull()
    whole = Window.partitionBy(config.events.user or "")
    last = F.max(F.when(is_sample, F.col(POSITION_COLUMN))).over(whole)
    later, every = last - F.col(POSITION_COLUMN), config.train_samples
    if isinstance(every, str):
        is_end = later == 0
    else:
        # The last sample of each piece: the event at its very end may be none, without a label.
        piece = Window.partitionBy(config.events.user or "", F.floor(later / every))
        is_end = later == F.min(F.when(is_sample, later)).over(piece)
    reason = F.when(is_train & ~F.coalesce(is_end, F.lit(False)), F.lit(INSIDE_SEQUENCE))
    return leave_out_samples(events, reason)


def _down_sample(
    events: DataFrame, config: BuildConfig, sampling: DownSamplingConfig, label: str
) -> DataFrame:
    sampled = (F.col(label) == 0) & F.col(SPLIT_COLUMN).isin(list(sampling.splits))
    lost = sampled & (_draw(config, sampling.seed, "down_sampling") >= sampling.rate)
    rate = F.when(sampled, F.lit(sampling.rate)).otherwise(F.lit(1.0))
    rated = events.withColumn(sampling.name, rate.cast("float"))
    return leave_out_samples(rated, F.when(lost, F.lit(DOWN_SAMPLED)))


def _sample_exposures(
    events: DataFrame, config: BuildConfig, negatives: NegativesConfig, label: str
) -> DataFrame:
    """Keeps, of each group's rows with label 0, those of the smallest hashes."""
    group = [SPLIT_COLUMN, negatives.within or config.events.user or ""]
    is_sample = F.col(DROP_COLUMN).isNull() & F.col(NOT_SAMPLED_COLUMN).isNull()
    alive = is_sample & F.col(SPLIT_COLUMN).isin(list(negatives.splits))
    exposed, positive = alive & (F.col(label) == 0), alive & (F.col(label) > 0)
    whole = Window.partitionBy(*group)
    # Rows of the same content have the same hash and are the same record: any order will do.
    ranked = whole.orderBy(F.col("__draw_fraction"), *event_columns(config)).rowsBetween(
        Window.unboundedPreceding, Window.currentRow
    )
    quota = F.lit(negatives.per_positive) * F.col("__positives")
    probability = F.least(F.lit(1.0), quota / F.col("__exposures"))
    lost = F.when(F.col("__exposed") & (F.col("__rank") > quota), F.lit(EXPOSURE_NOT_SAMPLED))
    ranked_events = (
        events.withColumn("__exposed", exposed)
        .withColumn("__draw_fraction", _draw(config, negatives.seed, "exposure"))
        .withColumn("__rank", F.sum(F.col("__exposed").cast("long")).over(ranked))
        .withColumn("__positives", F.sum(positive.cast("long")).over(whole))
        .withColumn("__exposures", F.sum(F.col("__exposed").cast("long")).over(whole))
        .withColumn(
            negatives.probability,
            F.when(F.col("__exposed"), probability).otherwise(F.lit(1.0)).cast("float"),
        )
    )
    made = ("__exposed", "__draw_fraction", "__rank", "__positives", "__exposures")
    return leave_out_samples(ranked_events, lost).drop(*made)


def _draw(config: BuildConfig, seed: int | None, purpose: str) -> Column:
    salt = config.output.seed if seed is None else seed
    return hash_fraction(F.lit(salt), F.lit(purpose), *map(F.col, event_columns(config)))
