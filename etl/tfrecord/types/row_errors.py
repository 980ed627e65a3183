"""Errors that say where their cause is: the row's number and values, or the unknown column."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError, did_you_mean

_ROW = re.compile(r"row ([0-9]+) of the batch")
_SHOWN_COLUMNS, _SHOWN_CHARACTERS = 6, 40


@contextlib.contextmanager
def locate_rows(
    batch: pa.RecordBatch | None, first_row: int | np.ndarray | None, origin: str
) -> Iterator[None]:
    """Numbers a row in the errors of the block, which know its number in the batch alone.

    `first_row` is the number in `origin` of the batch's first row, or of each, int64 `[rows]`; None
    where it is not known. Of a batch that is given the row's values are shown.
    """
    try:
        yield
    except InputDataError as error:
        match = _ROW.search(str(error.received))
        if match is None:
            raise
        number = int(match[1])
        counted = "a row" if first_row is None else f"row {_count(first_row, number)} (from 0)"
        shown = "" if batch is None else _show(batch, number)
        received = _ROW.sub(lambda _: f"{counted} of {origin}{shown}", str(error.received))
        raise type(error)(
            error.what, received=received, allowed=error.allowed, fix=error.fix
        ) from error


def _count(first_row: int | np.ndarray, number: int) -> int:
    return first_row + number if isinstance(first_row, int) else int(first_row[number])


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
