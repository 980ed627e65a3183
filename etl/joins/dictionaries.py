"""All dictionary joins of a build, in the declared order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conf.etl import BuildConfig
from etl.joins.as_of import join_as_of
from etl.joins.dictionary import join_dictionary
from etl.joins.keys import check_unique_key
from etl.joins.plan import DictionaryJoin, plan_joins
from etl.joins.unmatched import refuse_unmatched
from etl.sources import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def join_one(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins one dictionary, by its key or as it stood at each event's time, as declared."""
    if join.config.as_of is None:
        return join_dictionary(events, dictionary, join)
    return join_as_of(events, dictionary, join)


def join_dictionaries(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> DataFrame:
    """Joins every dictionary to the events: one row per event before and after.

    Args:
        events: Events with `__drop`, `__order` and `__event_ts_ms`.
        config: The build's config.
        sources: The sources as read.

    Raises:
        InputDataError: A dictionary's key is not unique, or an event that must match does not.
    """
    for join in plan_joins(config, sources):
        dictionary = sources[join.name].good
        check_unique_key(join.name, dictionary, join.unique_columns)
        events = join_one(events, dictionary, join)
        if join.config.unmatched == "fail":
            refuse_unmatched(events, join.name, join.on)
    return events
