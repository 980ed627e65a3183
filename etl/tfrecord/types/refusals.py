"""What does not fit the wire, told with its place and with what to write instead."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.tfrecord.types.features import innermost, is_list

SPARK_TYPE_KEY = b"sluice.spark_type"
"""Under which a field's metadata names its Spark type."""


class UnfitError(ValueError):
    """A type that the wire cannot carry; the message names an option that would help, if any."""


@dataclass
class RefusedError(ValueError):
    """A value that cannot be converted, `index` among its like.

    `what` stands after the words "column x has".
    """

    index: int
    what: str
    received: str
    allowed: str
    fix: str


def shown_type(column: pa.Field) -> str:
    """The type of a column as its user knows it."""
    spark_type = (column.metadata or {}).get(SPARK_TYPE_KEY)
    return spark_type.decode() if spark_type else str(column.type)


def describe_unfit(column: pa.Field, error: UnfitError) -> str:
    """One sentence on a column, named by its path, that does not fit, and what to write instead."""
    option = f", or give {error}" if str(error) else ""
    return f"{column.name} ({shown_type(column)}): write {_suggest_cast(column)}{option}"


def _suggest_cast(column: pa.Field) -> str:
    """What to write for a column: in Spark's SQL where it comes from Spark."""
    path, kind, values = column.name, column.type, innermost(column.type)
    listed, nested = is_list(kind), is_list(kind) and is_list(kind.value_type)
    if pa.types.is_struct(values):
        return f"{path}.<field> for each field" if listed else f"{path} with fields, or drop it"
    if SPARK_TYPE_KEY not in (column.metadata or {}):
        if pa.types.is_nested(values):
            return f"arrays of {path}'s keys and values"
        target = f"pa.list_({_arrow_target(values)})" if listed else _arrow_target(values)
        return f"{path} as lists of plain values" if nested else f"{path}.cast({target})"
    if pa.types.is_map(kind):
        return f"map_keys({path}) and map_values({path})"
    if nested:
        return f"flatten({path})"
    sql = next((sql for matches, sql in _SQL if matches(values)), "cast({} as string)")
    return f"transform({path}, x -> {sql.format('x')})" if listed else sql.format(path)


_SQL = (
    (pa.types.is_date, "unix_date({})"),
    (pa.types.is_timestamp, "unix_millis(timestamp({}))"),
    (pa.types.is_nested, "to_json({})"),
)


def _arrow_target(values: pa.DataType) -> str:
    t = pa.types
    if t.is_null(values) or t.is_interval(values):
        return "pa.string()"
    return "pa.int32()" if t.is_date32(values) or t.is_time32(values) else "pa.int64()"


def restate(error: InputDataError, **parts: str) -> InputDataError:
    """The same error with some parts told otherwise."""
    given = {name: getattr(error, name) for name in ("what", "received", "allowed", "fix")}
    return type(error)(**{**given, **parts})


_ROW = re.compile(r"row ([0-9]+) of the batch")
_SHOWN_COLUMNS, _SHOWN_CHARACTERS = 6, 40


@contextlib.contextmanager
def locate_rows(
    batch: pa.RecordBatch, first_row: int | np.ndarray | None, origin: str
) -> Iterator[None]:
    """Numbers a row in the errors of the block, which know its number in the batch alone.

    `first_row` is the number in `origin` of the batch's first row, or of each, int64 `[rows]`; None
    where it is not known. The row's values are shown.
    """
    try:
        yield
    except InputDataError as error:
        match = _ROW.search(str(error.received))
        if match is None:
            raise
        number, counted = int(match[1]), "a row"
        if first_row is not None:
            at = first_row + number if isinstance(first_row, int) else first_row[number]
            counted = f"row {at} (from 0)"
        located = f"{counted} of {origin}{_show(batch, number)}"
        received = _ROW.sub(lambda _: located, str(error.received))
        raise restate(error, received=received) from error


def _show(batch: pa.RecordBatch, row: int) -> str:
    """The first plain values of a row, by which it may be found again."""
    shown = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_nested(column.type) or row >= len(column):
            continue
        with contextlib.suppress(ValueError, OverflowError):  # beyond Python's dates
            text = repr(column[row].as_py())
            cut = len(text) > _SHOWN_CHARACTERS
            shown.append(f"{name}={text[:_SHOWN_CHARACTERS]}{'…' if cut else ''}")
        if len(shown) == _SHOWN_COLUMNS:
            break
    return f": {', '.join(shown)}" if shown else ""


def refuse_unknown(what: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Refuses names that are not there, if any, with the nearest one that is."""
    names, known = list(unknown), list(known)
    if names:
        raise ConfigError(
            what,
            received=", ".join(names),
            allowed=", ".join(known),
            fix=did_you_mean(names[0], known),
        )
