"""What runs on an executor: the rows of a partition through a SavedModel, into one file.

`score_partition` and all that it calls are shipped by value, as an executor has TensorFlow, NumPy
and PyArrow alone: nothing here, or in what is called, may import a module of Sluice when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from conf.artefacts.export import FEATURE_PREFIX, ID, KEY, SEEN, VECTOR
from conf.errors import InternalError
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import open_parquet, read_parquet
from training.evaluation.item_index import ItemIds, ItemIndex, TopK, check_finite, rank_top_k
from training.evaluation.metrics import MISSING, Pairs
from training.loading.loaded_model import LoadedModel
from training.prediction.predict import build_lists
from training.prediction.rankers import (
    PAIRS_AT_ONCE,
    NamedRows,
    check_order,
    finish_scores,
    rank_all,
)
from training.prediction.result_files import ResultWriter, to_arrow
from training.prediction.scores import check_numbers
from training.raw_inputs.converter import Columns, RawColumns
from training.raw_inputs.files import decode_columns, parse_line, regroup
from training.raw_inputs.inputs import InputColumn

PART, ROW, LINE = "__sluice_part", "__sluice_row", "value"
"""Columns that Spark adds: number of the partition and of the row, from 0; of JSON the line."""
LISTS, SCORES, EMBEDDINGS = "lists", "scores", "embeddings"
JOB_FILE = "_score.json"
"""Record of a job; readers of a folder of Parquet skip what begins with `_`."""
_CACHE = "_sluice_scoring"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RowSource:
    """Where rows come from.

    Attributes:
        place: What messages call it.
        columns: Names of the columns that there are.
        users_file: File of the export with encoded rows, of which partitions are slices; None: rows
            of raw values come from Spark.
        id_column: Column that names the rows; None: their numbers do.
        list_separator: Separates the values of lists that come as text; None: as the build read
            them.
        is_delimited: Whether rows are of CSV.
        is_json: Whether rows are lines of JSON.
    """

    place: str
    columns: tuple[str, ...] = ()
    users_file: str | None = None
    id_column: str | None = None
    list_separator: str | None = None
    is_delimited: bool = False
    is_json: bool = False


@dataclass(frozen=True)
class ListOptions:
    """What lists are made of.

    Attributes:
        k: Their length.
        items_file: File of the export that holds the items.
        items_input: Input of the signature that takes the items to order; None: vectors are
            compared.
        is_binary: Whether what orders them is log-odds.
        candidates: Keys of the items to rank; None: all.
        mask_seen: Whether what a user has met is left out.
    """

    k: int
    items_file: str
    items_input: str | None = None
    is_binary: bool = False
    candidates: tuple[Any, ...] | None = None
    mask_seen: bool = False


@dataclass(frozen=True)
class ScoringTask:
    """What an executor does.

    Attributes:
        output: Directory of the files.
        suffix: That of their names: the format.
        gives: `lists`, `scores` or `embeddings`.
        signature: Signature that is called.
        inputs: What `export.json` says of its inputs that are features.
        outputs: Names of the outputs that are used.
        source: The rows.
        lists: Of lists alone.
        batch_size: Rows of a call.
        part_rows: Rows of a partition, a multiple of `batch_size`.
        rows: Rows of all partitions.
        threads: Threads of TensorFlow.
    """

    output: str
    suffix: str
    gives: str
    signature: str
    inputs: tuple[Mapping[str, Any], ...]
    outputs: tuple[str, ...]
    source: RowSource
    lists: ListOptions | None = None
    batch_size: int = 1024
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

    def count_rows(self, part: int) -> int:
        """Returns the number of rows of a partition."""
        return min(self.part_rows, self.rows - part * self.part_rows)


@dataclass(frozen=True)
class InputRows:
    """Some rows.

    Attributes:
        first: Number of the first one, from 1.
        key: `user`, `row` or `id`: what names them in lists.
        ids: Their names.
        inputs: What the signature takes, by name.
        seen: Ids of the items that each has met; None: not known.
    """

    first: int
    key: str
    ids: pa.Array
    inputs: Arrays
    seen: pa.Array | None = None


def score_partition(
    task: ScoringTask, directory: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Scores the rows of one partition and publishes its file.

    Args:
        task: What to do.
        directory: The SavedModel on this host.
        batches: The rows in order, with `PART` and `ROW`; of a file of the export `PART` alone.

    Yields:
        One row: the partition, its rows, and the bytes of the file.

    Raises:
        InputDataError: A row is refused, or its score is no number.
        InternalError: The output is not on this host, or Spark did not bring the partition.
    """
    batches = iter(batches)
    first = next(batches)
    part = first.column(PART)[0].as_py()
    target = Path(task.output) / task.name_part(part)
    if not (target.parent / JOB_FILE).is_file():
        raise InternalError(
            "an executor does not see the output directory",
            received=task.output,
            allowed="a directory that is mounted on all hosts under the same path",
        )
    served = _keep_one((directory, task), lambda: Served(task, Path(directory)))
    count = 0
    with atomic_file(target) as unfinished, ResultWriter(unfinished, target.name) as writer:
        for rows in read_rows(task, Path(directory), part, chain([first], batches)):
            writer.write(_compute(task, served, rows))
            count += len(rows.ids)
        _check_count(task, part, count)
    yield pa.RecordBatch.from_pydict(
        {"part": pa.array([part], pa.int64()), "rows": pa.array([count], pa.int64())}
    )


def _check_count(task: ScoringTask, part: int, count: int) -> None:
    if count != task.count_rows(part):
        raise InternalError(
            f"partition {part} does not have the rows that were counted",
            received=f"{count:,} rows",
            allowed=f"{task.count_rows(part):,} rows",
            fix="the input has changed while it was read: remove the output, and start again",
        )


def _keep_one(key: object, build: Callable[[], Any]) -> Any:
    """Returns what was built for a key, once in a process: what is shipped anew keeps nothing."""
    kept = sys.modules.setdefault(_CACHE, ModuleType(_CACHE))
    if getattr(kept, "key", None) != repr(key):
        kept.value, kept.key = build(), repr(key)  # type: ignore[attr-defined]
    return kept.value


class Served:
    """A loaded SavedModel, and what it ranks.

    Args:
        task: What is asked of it.
        directory: The SavedModel.
    """

    def __init__(self, task: ScoringTask, directory: Path) -> None:
        self.task = task
        self._model = LoadedModel(directory, threads=task.threads)
        self._items = None if task.lists is None else _read_items(directory, task.lists)

    def call(self, inputs: Arrays) -> Arrays:
        """Returns the outputs of the signature."""
        return self._model.call(self.task.signature, inputs)

    def rank(self, rows: InputRows) -> dict[str, pa.Array]:
        """Returns the lists of rows, with what names them first.

        Raises:
            InputDataError: A score or vector is no number.
        """
        options, items = self.task.lists, self._items
        if options is None or items is None:
            raise TypeError(f"{self.task.gives} are no lists")
        seen = _find_cells(rows.seen, items.ids) if options.mask_seen else None
        named = NamedRows(rows.key, rows.ids, seen)
        if options.items_input is None:
            [output] = self.call(rows.inputs).values()
            check_finite("user", np.arange(1, len(rows.ids) + 1), output)
            found = rank_top_k(output, items.ids, options.k, seen)
        else:
            found = self._rank_pairs(rows, named, options, items)
        return build_lists(named, found, items.ids, items.tokens)

    def _rank_pairs(
        self, rows: InputRows, named: NamedRows, options: ListOptions, items: Items
    ) -> TopK:
        [task] = self.task.outputs

        def score(wanted: slice) -> NDArray[np.float32]:
            inputs = {name: values[wanted] for name, values in rows.inputs.items()}
            parts = []
            for start in range(0, len(items.keys), PAIRS_AT_ONCE):
                keys = items.keys[start : start + PAIRS_AT_ONCE]
                pairs = np.broadcast_to(keys, (wanted.stop - wanted.start, len(keys)))
                parts.append(self.call({**inputs, str(options.items_input): pairs}))
            logits = np.concatenate([part[task] for part in parts], axis=1).ravel()
            check_order(task, logits)
            return logits

        ranked = rank_all(score, items.ids, named, options.k)
        return finish_scores(ranked) if options.is_binary else ranked


@dataclass(frozen=True)
class Items:
    """What is ranked.

    Attributes:
        keys: Raw keys, `[items]`.
        tokens: The same, as Arrow has them.
        ids: Their ids, ascending; with vectors where these are compared.
    """

    keys: np.ndarray
    tokens: pa.Array
    ids: Any


def _read_items(directory: Path, options: ListOptions) -> Items:
    table = read_parquet(directory / options.items_file).combine_chunks()
    if options.candidates is not None:
        wanted = pa.array(options.candidates, table[KEY].type)
        table = table.filter(pc.is_in(table[KEY], wanted)).combine_chunks()
    ids = table[ID].to_numpy()
    keys = table[KEY].to_numpy()
    tokens = table[KEY].chunk(0)
    if options.items_input is not None:
        return Items(keys, tokens, ItemIds(ids))
    flat = table[VECTOR].chunk(0).flatten().to_numpy()
    return Items(keys, tokens, ItemIndex(ids, flat.reshape(len(ids), -1)))


def _find_cells(seen: pa.Array | None, items: ItemIds) -> Pairs:
    """Returns what rows have met as cells; items outside of what is ranked are dropped."""
    if seen is None:
        return Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))
    lengths = pc.list_value_length(seen).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(seen)), lengths)
    columns = items.columns_of(seen.flatten().to_numpy(zero_copy_only=False))
    known = columns != MISSING
    return Pairs(rows[known], columns[known])


def _compute(task: ScoringTask, served: Served, rows: InputRows) -> dict[str, pa.Array]:
    """Returns the results of rows, with what names them first."""
    if task.gives == LISTS:
        return served.rank(rows)
    outputs = served.call(rows.inputs)
    chosen = {name: np.asarray(outputs[name], np.float32) for name in task.outputs}
    check_numbers(chosen, rows.first)
    columns = {name: to_arrow(values) for name, values in chosen.items()}
    return {task.source.id_column or "row": rows.ids, **columns}


def read_rows(
    task: ScoringTask, directory: Path, part: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[InputRows]:
    """Yields the rows of a partition, `batch_size` at a time.

    Raises:
        InputDataError: A value is not what the model reads.
    """
    first = part * task.part_rows + 1
    if task.source.users_file is not None:
        yield from _read_users(task, directory / task.source.users_file, first)
        return
    columns, names = choose_columns(task)
    name, kind = task.source.id_column, None
    for batch in regroup(batches, task.batch_size):
        values = _read_columns(task.source, batch, names, first)
        given = columns.build(values, first)
        ids = pa.array(np.arange(first, first + batch.num_rows))
        if name is not None:
            ids = columns.build_ids(name, values[name], first, kind)
            kind = ids.type
        yield InputRows(first, "row" if name is None else "id", ids, given)
        first += batch.num_rows


def choose_columns(task: ScoringTask) -> tuple[RawColumns, list[str]]:
    """Returns what reads raw values, and the names of the columns that it takes.

    Raises:
        InputDataError: A column is missing.
    """
    inputs, source = [InputColumn.from_json(item) for item in task.inputs], task.source
    separator = source.list_separator
    columns = RawColumns(inputs, source.place, separator, is_delimited=source.is_delimited)
    return columns, columns.choose(source.columns, source.id_column)


def _read_columns(
    source: RowSource, batch: pa.RecordBatch, names: list[str], first: int
) -> Columns:
    if not source.is_json:
        return decode_columns(batch, names)
    lines = enumerate(batch.column(LINE).to_pylist(), first)
    rows = [parse_line(source.place, number, line) for number, line in lines]
    return {name: [row.get(name) for row in rows] for name in names}


def _read_users(task: ScoringTask, file: Path, first: int) -> Iterator[InputRows]:
    for batch in regroup(_slice_file(file, first - 1, task.part_rows), task.batch_size):
        inputs = {
            item["name"]: _to_dense(batch.column(f"{FEATURE_PREFIX}{item['feature']}"))
            for item in task.inputs
        }
        seen = batch.column(SEEN) if SEEN in batch.schema.names else None
        yield InputRows(first, "user", batch.column(KEY), inputs, seen)
        first += batch.num_rows


def _slice_file(path: Path, start: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Yields some rows of a Parquet file; only row groups that hold them are read."""
    with open_parquet(path) as file:
        begin = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            low, high = max(start, begin), min(start + rows, begin + count)
            if low < high:
                yield from file.read_row_group(group).slice(low - begin, high - low).to_batches()
            begin += count


def _to_dense(values: pa.Array) -> np.ndarray:
    """Returns encoded values `[rows]` or `[rows, length]`, lists padded with 0."""
    if pa.types.is_fixed_size_list(values.type):
        return np.asarray(values.flatten()).reshape(len(values), values.type.list_size)
    if not pa.types.is_list(values.type):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    width = max(1, int(lengths.max(initial=0)))
    dense = np.zeros((len(values), width), flat.dtype)
    dense[np.arange(width) < lengths[:, np.newaxis]] = flat
    return dense
