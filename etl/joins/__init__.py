"""Joins of the event log with its dictionaries, each key checked, each loss counted."""

from etl.joins.as_of import join_as_of, select_latest
from etl.joins.dictionaries import join_dictionaries, join_one
from etl.joins.dictionary import join_dictionary
from etl.joins.keys import check_unique_key
from etl.joins.plan import DictionaryJoin, plan_joins
from etl.joins.unmatched import DROP_COLUMN, count_unmatched, read_unmatched

__all__ = [
    "DROP_COLUMN",
    "DictionaryJoin",
    "check_unique_key",
    "count_unmatched",
    "join_as_of",
    "join_dictionaries",
    "join_dictionary",
    "join_one",
    "plan_joins",
    "read_unmatched",
    "select_latest",
]
