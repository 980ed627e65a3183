"""The files of rows to score: Parquet parts in order, a record of them, and lists of a version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.artefacts.run import write_json
from conf.dates import DateRange
from conf.encoders import ENCODERS_DIR
from conf.errors import InternalError, UpstreamNotReadyError, read_code_version
from conf.etl.build import BuildConfig
from conf.schema import fingerprint
from conf.storage.atomic_output import PRIVATE
from conf.storage.table_files import open_parquet
from etl.sources.bad_rows import SourceCounts
from etl.versions.publish import read_current
from etl.versions.stored import find_dataset, hold_dataset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMAT_VERSION = 1
ROWS_SUFFIX = ".parquet"
RECORD_FILE = "_rows.json"
"""Record of the rows; readers of a folder of Parquet skip what begins with `_`."""


def write_row_files(
    frame: DataFrame, columns: Mapping[str, str], staging: Path, record: Mapping[str, Any]
) -> None:
    """Writes rows as Parquet files, and the record of them.

    Args:
        frame: The rows, in order.
        columns: By name of a row's column, that of the frame.
        staging: Directory to write, which all executors see.
        record: What the rows are of.

    Raises:
        InternalError: There are more or fewer rows than the record says.
    """
    chosen = frame.select(*[F.col(column).alias(name) for name, column in columns.items()])
    chosen.write.mode("overwrite").parquet(staging.as_uri())
    parts = sorted(staging.glob("part-*.parquet"))
    _check_count(parts, record["rows"])
    for number, part in enumerate(parts):  # Spark's names are drawn anew in each run.
        part.chmod(part.stat().st_mode & PRIVATE)
        part.rename(staging / f"part-{number:05d}{ROWS_SUFFIX}")
    for path in [staging / "_SUCCESS", *staging.glob(".*.crc")]:
        path.unlink(missing_ok=True)
    write_json(staging / RECORD_FILE, dict(record))


def _check_count(parts: Sequence[Path], expected: int) -> None:
    written = sum(open_parquet(part).metadata.num_rows for part in parts)
    if written != expected:
        raise InternalError(
            "the number of rows written is not the number of events chosen",
            received=f"{written:,}",
            allowed=f"{expected:,}",
            fix="nothing was replaced; run again: on a cluster the directory must be one that all "
            "hosts see under the same path",
        )


def describe_rows(
    config: BuildConfig,
    dates: DateRange | None,
    rows: int,
    dropped: Mapping[str, int],
    counts: Mapping[str, SourceCounts],
    columns: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the record of rows.

    Args:
        config: The config of the dataset that the model was trained on.
        dates: Days of the rows; None: all.
        rows: How many there are.
        dropped: Events that are no rows, by reason.
        counts: Rows that were read of each source.
        columns: By name of a row's column, that of the events.
    """
    return {
        "format_version": _FORMAT_VERSION,
        "dataset": config.name,
        "dates": None if dates is None else [str(dates.first), str(dates.last)],
        "rows": rows,
        "read": {name: count.read for name, count in counts.items()},
        "bad": {name: dict(count.bad) for name, count in counts.items() if count.bad},
        "dropped": dict(dropped),
        "columns": dict(columns),
        "config_sha256": fingerprint(config.resolved()),
        "code_version": read_code_version(),
    }


@contextmanager
def hold_item_lists(config: BuildConfig) -> Iterator[Path | None]:
    """Yields the folder of the lists that the dataset's current version has counted for items."""
    if not config.most_frequent:
        yield None
        return
    with hold_dataset(find_dataset(config.output.root, config.name)) as paths:
        current = read_current(paths)
        if current is None:
            raise UpstreamNotReadyError(
                f"dataset {config.name!r} has no version yet, and most_frequent is counted by one",
                received=str(paths.base),
                fix="build the dataset first",
            )
        yield paths.version(current) / ENCODERS_DIR
