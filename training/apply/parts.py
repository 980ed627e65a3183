"""A job of batch prediction in parts: a file for each partition of rows, and a record beside them.

What a killed job has left is finished by the same command: parts that are there stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.artefacts.export import LINE, PART, TIMES, Give
from conf.artefacts.run import read_json, write_json
from conf.errors import ConfigError, InternalError
from conf.storage.atomic_output import remove_unfinished
from training.apply.answers import Answers, Rows, find_row_inputs
from training.apply.export import Export, Items
from training.apply.predict import write_answers
from training.apply.ranker import Ranker
from training.apply.rows import encode_rows, name_file_rows, read_users
from training.raw_inputs.converter import Columns, RawColumns, separate_lists
from training.raw_inputs.files import decode_columns, parse_line, regroup
from training.raw_inputs.inputs import InputColumn

JOB_FILE = "_predict.json"
"""Record of a job; readers of a folder of Parquet skip what begins with `_`."""


@dataclass(frozen=True)
class RowSource:
    """Rows of raw values that Spark reads: `csv`, `tsv`, `jsonl` or a format of Spark."""

    place: str
    kind: str
    columns: tuple[str, ...] = ()
    id_column: str | None = None
    list_separator: str | None = None

    def choose(self, export: Export, give: Give) -> tuple[RawColumns, list[str]]:
        """Returns what reads raw values, and the names of the columns that it takes."""
        inputs = [InputColumn.from_json(item) for item in find_row_inputs(export, give)]
        if self.kind in ("csv", "tsv"):
            inputs = separate_lists(inputs, self.list_separator)
        columns = RawColumns(inputs, self.place)
        return columns, columns.choose(self.columns, self.id_column)


@dataclass(frozen=True)
class Job:
    """What is computed, and how it is cut.

    `source` None are the users of the export, `items` None its catalogue; `part_rows` is a multiple
    of the rows of a call.
    """

    output: str
    suffix: str
    answers: Answers
    source: RowSource | None = None
    items: Items | None = None
    part_rows: int = 1 << 17
    rows: int = 0
    threads: int = 1

    @property
    def directory(self) -> Path:
        """Directory of the files."""
        return Path(self.output)

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

    def open(self, export: Export, inputs: Mapping[str, Any]) -> str:
        """Returns the status of the job in its directory: `new`, `running` or `finished`.

        `inputs` are files and options of what Spark reads. Another job's directory is refused.
        """
        record, file = self._describe(export, inputs), self.directory / JOB_FILE
        if file.is_file():
            content = read_json(file)
            _refuse_other(self.directory, content.get("job", {}), record)
            return str(content["status"])
        if self.directory.exists() and any(self.directory.iterdir()):
            raise ConfigError(
                "the output directory holds other files",
                received=str(self.directory),
                allowed="a new or empty directory, or one of this command",
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(file, {"format_version": 1, "status": "running", "job": record})
        return "new"

    def _describe(self, export: Export, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": {name: export.card[name] for name in ("name", "version", "fingerprint")},
            "input": dict(inputs),
            "gives": str(self.answers),
            "source": None if self.source is None else str(self.source),
            "candidates": None if self.items is None else self.items.keys.to_pylist(),
            **{name: getattr(self, name) for name in ("suffix", "part_rows", "rows")},
        }

    def find_missing(self) -> list[int]:
        """Returns the partitions that have no file yet."""
        names = {path.name for path in self.directory.iterdir()}
        return [part for part in range(self.parts) if self.name_part(part) not in names]

    def finish(self) -> None:
        """Removes what killed tasks left, and writes down that all parts are there."""
        files = {}
        for part in range(self.parts):
            path, rows = self.directory / self.name_part(part), self.find_rows(part)
            remove_unfinished(path)
            files[path.name] = {"rows": rows.stop - rows.start, "bytes": path.stat().st_size}
        content = read_json(self.directory / JOB_FILE)
        write_json(self.directory / JOB_FILE, {**content, "status": "finished", "files": files})


def _refuse_other(directory: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if differing := [name for name in own if found.get(name) != own[name]]:
        raise ConfigError(
            f"{directory} holds the output of another job: {', '.join(differing)} differ",
            received=str(own[differing[0]])[:300],
            allowed=str(found.get(differing[0]))[:300],
            fix="name another directory by --to, or remove this one",
        )


@lru_cache(1)
def _open_export(directory: str, threads: int) -> Export:
    """Keeps the model in a worker for its next tasks."""
    return Export(Path(directory), threads)


def compute_part(
    job: Job, directory: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Computes one partition on an executor, publishes its file, and yields how many rows it has.

    Args:
        job: What to do.
        directory: The export on this host.
        batches: The rows in order, with `PART` and `ROW`; of users of the export `PART` alone.
    """
    batches = iter(batches)
    first = next(batches)
    part = first.column(PART)[0].as_py()
    target = job.directory / job.name_part(part)
    if not (job.directory / JOB_FILE).is_file():
        raise InternalError(
            "an executor does not see the output directory",
            received=job.output,
            allowed="a directory that is mounted on all hosts under the same path",
        )
    export, items = _open_export(directory, job.threads), job.items
    if job.answers.give is Give.LISTS:
        items = items or export.items
    rows = read_part(job, export, items, part, chain([first], batches))
    wanted = job.find_rows(part)
    checked = _check_count(rows, part, wanted.stop - wanted.start)
    count, _ = write_answers(Ranker(export, job.answers.task, items), job.answers, checked, target)
    yield pa.RecordBatch.from_pydict(
        {"part": pa.array([part], pa.int64()), "rows": pa.array([count], pa.int64())}
    )


def _check_count(rows: Iterator[Rows], part: int, wanted: int) -> Iterator[Rows]:
    count = 0
    for batch in rows:
        yield batch
        count += len(batch.names)
    if count != wanted:
        raise InternalError(
            f"partition {part} does not have the rows that were counted",
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
        return decode_columns(batch, names)
    lines = enumerate(batch.column(LINE).to_pylist(), first)
    rows = [parse_line(source.place, number, line) for number, line in lines]
    times = batch.column(TIMES).to_pylist() if TIMES in batch.schema.names else [{}] * len(rows)
    rows = [row | {n: t for n, t in own.items() if t is not None}
            for row, own in zip(rows, times, strict=True)]  # fmt: skip
    return {name: [row.get(name) for row in rows] for name in names}
