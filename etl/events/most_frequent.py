"""Lists of what stands most often beside each item in the events of the train split.

They are a dictionary that a version makes of its own log: `encoders/<name>.most_frequent.parquet`,
a row per item. Days that are built later take it over, as they do vocabularies.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import MostFrequentConfig
from conf.splits import TRAIN
from conf.storage.atomic_output import atomic_file
from etl.events.columns import SPLIT_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_VALUE, _COUNT, _RANK = "__value", "__count", "__rank"


def fit_most_frequent(events: DataFrame, config: BuildConfig, directory: Path) -> None:
    """Counts the lists on the kept events of the train split, and writes them to `encoders`."""
    train = events.where(F.col(SPLIT_COLUMN) == TRAIN)
    for counted in config.most_frequent:
        lists = _rank_values(train, config.events.item or "", counted)
        # Only one row per item comes to the driver, as Arrow, like a vocabulary.
        table = lists.toArrow().sort_by(config.events.item or "")
        with atomic_file(_path(directory, counted)) as unfinished:
            pq.write_table(table, unfinished)


def _rank_values(events: DataFrame, item: str, config: MostFrequentConfig) -> DataFrame:
    """One row per item that has a value: the item, and its list in column `name`."""
    pairs = events.select(F.col(item), F.col(config.column).alias(_VALUE)).dropna()
    counts = pairs.groupBy(item, _VALUE).agg(F.count("*").alias(_COUNT))
    order = Window.partitionBy(item).orderBy(F.desc(_COUNT), F.asc(_VALUE))
    ranked = counts.withColumn(_RANK, F.row_number().over(order))
    entries = F.sort_array(F.collect_list(F.struct(_RANK, _VALUE)))
    return ranked.where(F.col(_RANK) <= config.max_len).groupBy(item).agg(
        entries[_VALUE].alias(config.name)
    )  # fmt: skip


def add_most_frequent(records: DataFrame, config: BuildConfig, directory: Path) -> DataFrame:
    """Adds the list of each record's item, empty where it has none, from a version's `encoders`."""
    item = config.events.item or ""
    for counted in config.most_frequent:
        lists = records.sparkSession.read.parquet(str(_path(directory, counted)))
        records = records.join(lists, item, "left")
    names = [counted.name for counted in config.most_frequent]
    none = {name: F.array().cast(records.schema[name].dataType) for name in names}
    return records.withColumns({name: F.coalesce(name, none[name]) for name in names})


def _path(directory: Path, counted: MostFrequentConfig) -> Path:
    return directory / f"{counted.name}.most_frequent.parquet"
