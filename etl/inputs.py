"""What a run reads, as it stands: taken down when the run begins, looked at again when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl import BuildConfig
from conf.etl.references import used_sources
from conf.provenance import InputFile, InputTable
from etl.sources import Source, read_source, read_states
from etl.sources.files import find_changes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHOWN_CHANGES = 10


@dataclass(frozen=True)
class Inputs:
    """What the sources of a run read, as it stands.

    Attributes:
        files: Every input file.
        tables: Every table and query.
    """

    files: tuple[InputFile, ...]
    tables: tuple[InputTable, ...] = ()


def read_inputs(
    spark: SparkSession, config: BuildConfig, dates: DateRange | None
) -> tuple[dict[str, Source], Inputs]:
    """Opens every source that a build uses, and takes down what it reads.

    Raises:
        ConfigError: The session cannot read a source.
        InputDataError: A source is missing, or does not fit its declaration.
        UpstreamNotReadyError: A database does not answer.
    """
    used = used_sources(config)
    declared = {name: source for name, source in config.sources.items() if name in used}
    # Before any is opened: a change in between then shows as one, and is never taken for read.
    tables = read_states(spark, declared.items(), dates)
    sources = {
        name: read_source(spark, name, source, config.data_dir, dates)
        for name, source in declared.items()
    }
    files = tuple(file for source in sources.values() for file in source.files)
    return sources, Inputs(files, tables)


def check_inputs_unchanged(
    spark: SparkSession, config: BuildConfig, inputs: Inputs, dates: DateRange | None
) -> None:
    """Refuses what was made of inputs that are no longer what they were when the run began.

    Spark reads an input more than once: a version of inputs that changed meanwhile would be of
    neither state, and say of itself that it is of the first.

    Args:
        spark: Session.
        config: The build's config.
        inputs: What was read, as it stood when the run began.
        dates: The run's days, or None.

    Raises:
        InputDataError: A file was written, added or removed, or a table or query has changed.
    """
    known = {table.source: config.sources[table.source] for table in inputs.tables if table.state}
    before, now = (
        {table.source: table for table in tables}
        for tables in (inputs.tables, read_states(spark, known.items(), dates))
    )
    changes = [
        f"{name}: {now[name].place} has changed" for name in now if now[name] != before[name]
    ]
    for name in used_sources(config):
        before_files = [file for file in inputs.files if file.source == name]
        changes += [
            f"{name}: {change}"
            for change in find_changes(
                name, config.sources[name], config.data_dir, before_files, dates
            )
        ]
    if changes:
        shown = [*changes[:_SHOWN_CHANGES], *(["…"] if len(changes) > _SHOWN_CHANGES else [])]
        raise InputDataError(
            "the input has changed while it was read; nothing was published",
            received="\n            ".join(shown),
            allowed="inputs that stay as they are until the build has ended",
            fix="run the build again once the input is complete; of a query whose rows differ from "
            "one reading to the next, set change_check: null",
        )


def find_unwatched(inputs: Inputs) -> list[str]:
    """Returns the sources of which nothing tells whether they have changed since an earlier run."""
    blind = {file.source for file in inputs.files if file.modified_ms <= 0}
    return sorted(blind | {table.source for table in inputs.tables if table.state is None})
