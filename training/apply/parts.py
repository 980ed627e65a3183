"""A job of batch prediction in parts: a file for each partition of rows, and a record beside them.

What a killed job has left is finished by the same command: parts that are there stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.artefacts.export import LINE, PART, TIMES, Give
from conf.artefacts.run import read_json, write_json
from conf.errors import ConfigError, InternalError
from conf.storage.atomic_output import remove_unfinished
from training.apply.answers import Answers, Asked, Rows, Source, find_row_inputs, plan_answers
from training.apply.export import Export, Items
from training.apply.predict import write_answers
from training.apply.ranker import Ranker
from training.apply.rows import (
    choose_items,
    encode_rows,
    find_users_inputs,
    name_file_rows,
    read_users,
)
from training.raw_inputs.converter import Columns, RawColumns, separate_lists
from training.raw_inputs.files import RawFile, parse_line, regroup, take_columns
from training.raw_inputs.inputs import InputColumn
from training.reader.training_data import TrainingData

JOB_FILE = "_predict.json"
"""Record of a job; readers of a folder of Parquet skip what begins with `_`."""


@dataclass(frozen=True)
class RowSource:
    """Files, folders or globs of raw values that Spark reads: `tsv`, `jsonl` or its own format."""

    paths: tuple[str, ...]
    kind: str
    id_column: str | None = None
    list_separator: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return ", ".join(self.paths)

    @property
    def is_delimited(self) -> bool:
        return self.kind in ("csv", "tsv")

    def complete(self, columns: Sequence[str], lines: Sequence[str]) -> RowSource:
        """Returns the source with its columns; those of JSON are found in its first lines."""
        if self.kind == "jsonl":
            rows = [parse_line(self.place, number, line) for number, line in enumerate(lines, 1)]
            columns = list(dict.fromkeys(name for row in rows for name in row))
        return replace(self, columns=tuple(columns))

    def choose(self, export: Export, give: Give) -> tuple[RawColumns, list[str]]:
        """Returns what reads raw values, and the names of the columns that it takes."""
        inputs = [InputColumn.from_json(item) for item in find_row_inputs(export, give)]
        if self.is_delimited:
            inputs = separate_lists(inputs, self.list_separator)
        columns = RawColumns(inputs, self.place)
        return columns, columns.choose(self.columns, self.id_column)


@dataclass(frozen=True)
class Job:
    """What is computed, and how it is cut.

    `source` None are the users of the export, `items` None its catalogue; `part_rows` is a multiple
    of the rows of a call.
    """

    output: Path
    suffix: str
    answers: Answers
    source: RowSource | None = None
    items: Items | None = None
    part_rows: int = 1 << 17
    rows: int = 0
    threads: int = 1

    @property
    def parts(self) -> int:
        """Number of partitions."""
        return -(-self.rows // self.part_rows)

    def name_part(self, part: int) -> str:
        """Returns the name of a partition's file."""
        return f"part-{part:05d}.{self.suffix}"

    def find_rows(self, part: int) -> slice:
        """Returns the numbers of the rows of a partition, from 0."""
        return slice(part * self.part_rows, min((part + 1) * self.part_rows, self.rows))

    def open(self, export: Export, files: Sequence[Sequence[Any]]) -> str:
        """Returns the status of the job in its directory: `new`, `running` or `finished`.

        `files` are those that Spark reads. Another job's directory is refused.
        """
        record, file = self._describe(export, files), self.output / JOB_FILE
        if file.is_file():
            content = read_json(file)
            found = content.get("job", {})
            if differing := [name for name in record if found.get(name) != record[name]]:
                raise ConfigError(
                    f"{self.output} holds the output of another job: {', '.join(differing)} differ",
                    received=str(record[differing[0]])[:300],
                    allowed=str(found.get(differing[0]))[:300],
                    fix="name another directory by --to, or remove this one",
                )
            return str(content["status"])
        if self.output.exists() and any(self.output.iterdir()):
            raise ConfigError(
                "the output directory holds other files",
                received=str(self.output),
                allowed="a new or empty directory, or one of this command",
            )
        self.output.mkdir(parents=True, exist_ok=True)
        write_json(file, {"format_version": 1, "status": "running", "job": record})
        return "new"

    def _describe(self, export: Export, files: Sequence[Sequence[Any]]) -> dict[str, Any]:
        return {
            "model": {name: export.card[name] for name in ("name", "version", "fingerprint")},
            "files": list(files),
            "gives": str(self.answers),
            "source": None if self.source is None else str(self.source),
            "candidates": None if self.items is None else self.items.keys.to_pylist(),
            **{name: getattr(self, name) for name in ("suffix", "part_rows", "rows")},
        }

    def find_missing(self) -> list[int]:
        """Returns the partitions that have no file yet."""
        names = {path.name for path in self.output.iterdir()}
        return [part for part in range(self.parts) if self.name_part(part) not in names]

    def compute(
        self, directory: str, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Computes one partition on an executor, publishes its file, and yields its rows' number.

        `directory` is the export on this host; `batches` are the rows in order with `PART`, of
        users of the export `PART` alone.
        """
        filled = (batch for batch in batches if batch.num_rows)
        if (first := next(filled, None)) is None:
            return
        part = first.column(PART)[0].as_py()
        if not (self.output / JOB_FILE).is_file():
            raise InternalError(
                "an executor does not see the output directory",
                received=str(self.output),
                allowed="a directory that is mounted on all hosts under the same path",
            )
        export, items = _open_export(directory, self.threads), self.items
        if self.answers.give is Give.LISTS:
            items = items or export.items
        wanted = self.find_rows(part)
        rows = read_part(self, export, items, part, chain([first], filled))
        checked = _check_count(rows, wanted.stop - wanted.start)
        ranker = Ranker(export, self.answers.task, items)
        count, _ = write_answers(ranker, self.answers, checked, self.output / self.name_part(part))
        yield pa.RecordBatch.from_pydict({"part": [part], "rows": [count]})

    def finish(self) -> None:
        """Removes what killed tasks left, and writes down that all parts are there."""
        files = {}
        for part in range(self.parts):
            path, rows = self.output / self.name_part(part), self.find_rows(part)
            remove_unfinished(path)
            files[path.name] = {"rows": rows.stop - rows.start, "bytes": path.stat().st_size}
        content = read_json(self.output / JOB_FILE)
        write_json(self.output / JOB_FILE, {**content, "status": "finished", "files": files})


def plan_job(
    export: Export,
    asked: Asked,
    source: RowSource | None,
    output: Path,
    suffix: str | None = None,
    part_rows: int = 1 << 17,
    data: TrainingData | None = None,
) -> Job:
    """Returns the job, without its rows; wrong options are refused before Spark starts."""
    items = None
    file = None if source is None else RawFile(Path(source.paths[0]))
    answers = plan_answers(export, asked, Source(file=file))
    Ranker(export, answers.task)
    if source is None:
        find_users_inputs(export, answers)
    if answers.give is Give.LISTS and asked.candidates:  # Executors have the catalogue.
        items = choose_items(export, asked.candidates, data)
    suffix = suffix or ("json.gz" if answers.give is Give.LISTS else "parquet")
    part_rows = -(-part_rows // export.batch_size) * export.batch_size
    return Job(output.absolute(), suffix, answers, source, items, part_rows)


@lru_cache(1)
def _open_export(directory: str, threads: int) -> Export:
    """Keeps the model in a worker for its next tasks."""
    return Export(Path(directory), threads)


def _check_count(rows: Iterator[Rows], wanted: int) -> Iterator[Rows]:
    count = 0
    for batch in rows:
        yield batch
        count += len(batch.names)
    if count != wanted:
        raise InternalError(
            "a partition does not have the rows that were counted",
            received=f"{count:,} rows",
            allowed=f"{wanted:,} rows",
            fix="the input has changed while it was read: remove the output, and start again",
        )


def read_part(
    job: Job, export: Export, items: Items | None, part: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[Rows]:
    """Yields the rows of a partition."""
    source, answers = job.source, job.answers
    if source is None:
        yield from read_users(export, answers, items, job.find_rows(part))
        return
    columns, names = source.choose(export, answers.give)
    key, first = name_file_rows(source.id_column, answers.give), job.find_rows(part).start + 1
    for batch in regroup(batches, export.batch_size):
        rows = columns.build(_read_columns(source, batch, names, first), first)
        yield Rows(key, rows.ids, encode_rows(export, rows.inputs, items), first)
        first += batch.num_rows


def _read_columns(
    source: RowSource, batch: pa.RecordBatch, names: list[str], first: int
) -> Columns:
    if source.kind != "jsonl":
        return take_columns(batch, names)
    lines = enumerate(batch.column(LINE).to_pylist(), first)
    rows = [parse_line(source.place, number, line) for number, line in lines]
    times = batch.column(TIMES).to_pylist() if TIMES in batch.schema.names else [{}] * len(rows)
    rows = [row | {n: t for n, t in own.items() if t is not None}
            for row, own in zip(rows, times, strict=True)]  # fmt: skip
    return {name: [row.get(name) for row in rows] for name in names}
