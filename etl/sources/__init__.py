"""Sources: every row of a file, table or query is a row of the declared schema or a bad row."""

from etl.sources.counts import SourceCounts, check_bad_rows, count_rows
from etl.sources.drift import check_columns
from etl.sources.files import find_files
from etl.sources.read import read_source
from etl.sources.source import ORDER_COLUMN, Source
from etl.sources.state import read_states

__all__ = [
    "ORDER_COLUMN",
    "Source",
    "SourceCounts",
    "check_bad_rows",
    "check_columns",
    "count_rows",
    "find_files",
    "read_source",
    "read_states",
]
