"""The inputs of a run, noted when it begins and compared when it ends.

A file counts by path, size and time; a table by the version that its catalogue gives, or by a
checksum of its rows that does not depend on their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import TokensConfig
from conf.local_paths import local_path
from conf.manifest import InputFile, InputTable
from etl.sources.files import describe_files, describe_input, list_files
from etl.sources.read import read_source
from etl.sources.source import Source
from etl.sources.tables import read_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class RunInputs:
    """The files and tables that a run reads, as they stand."""

    files: tuple[InputFile, ...]
    tables: tuple[InputTable, ...] = ()

    @property
    def bytes(self) -> int | None:
        """Bytes of the files; None where tables are read too, whose size nothing tells."""
        return None if self.tables else sum(file.bytes for file in self.files)


def read_inputs(
    spark: SparkSession,
    config: BuildConfig,
    dates: DateRange | None,
    optional: Collection[str] = (),
) -> tuple[dict[str, Source], RunInputs]:
    """Opens every source that a build uses, and takes down what it reads."""
    # Before any is opened: a change in between then shows as one, and is never taken for read.
    inputs = _note_inputs(spark, config, dates)
    lackable = {config.events.source: optional}
    sources = {
        name: read_source(spark, name, source, config.data_dir, dates, lackable.get(name, ()))
        for name, source in config.sources.items()
        if name in config.used_sources
    }
    return sources, inputs


def _note_inputs(spark: SparkSession, config: BuildConfig, dates: DateRange | None) -> RunInputs:
    used = [(name, own) for name, own in config.sources.items() if name in config.used_sources]
    listings = [list_files(name, own, config.data_dir, dates) for name, own in used]
    files = [file for listing in listings for file in describe_files(listing)]
    tables = [read_state(spark, name, own, dates) for name, own in used if own.path is None]
    return RunInputs((*files, *find_token_files(config)), tuple(tables))


def find_token_files(config: BuildConfig) -> Iterator[InputFile]:
    """Finds the files of vocabularies that are not fitted: inputs like those of sources."""
    given = {
        feature.vocabulary: feature.encoding.path
        for feature in config.features
        if isinstance(feature.encoding, TokensConfig) and feature.encoding.path is not None
    }
    for name, path in given.items():
        file = (local_path(config.data_dir) / local_path(path)).resolve()
        if not file.is_file():
            raise InputDataError(
                f"vocabulary {name!r} has no file",
                received=file,
                fix="correct the `path` of its encoding, or give the folder by --data",
            )
        yield describe_input(f"vocabulary {name}", file)


def check_inputs_unchanged(
    spark: SparkSession, config: BuildConfig, inputs: RunInputs, dates: DateRange | None
) -> None:
    """Refuses what was made of inputs that changed meanwhile: Spark reads them more than once."""
    now = _note_inputs(spark, config, dates)
    changes = {f"{table.source}: {table.place}" for table in {*now.tables} ^ {*inputs.tables}}
    changes |= {f"{file.source}: {file.path}" for file in {*now.files} ^ {*inputs.files}}
    if changes:
        raise InputDataError(
            "the input has changed while it was read; nothing was published",
            received=f"{len(changes)} changes: {'; '.join(sorted(changes)[:5])}",
            fix="run the build again once the input is complete; of a query whose rows differ from "
            "one reading to the next, set change_check: null",
        )


def find_unwatched(inputs: RunInputs) -> list[str]:
    """Returns the sources of which nothing tells whether they have changed since an earlier run."""
    blind = {file.source for file in inputs.files if file.modified_ms <= 0}
    return sorted(blind | {table.source for table in inputs.tables if table.state is None})
