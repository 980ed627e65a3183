"""Keys of users or items in a column of a file: one a row, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from conf.errors import ConfigError, InputDataError
from conf.key_lists import refuse_twice
from training.raw_inputs.input_columns import InputColumn
from training.raw_inputs.raw_rows import RawFile, RawReader, RawRows


def find_key_input(inputs: Sequence[InputColumn], key: str) -> InputColumn:
    """Returns the only input that a key is made of.

    Args:
        inputs: Those of the model.
        key: Feature of the key.

    Raises:
        ConfigError: It is made of several.
    """
    found = [item for item in inputs if item.feature == key]
    if len(found) > 1:
        raise ConfigError(
            "keys of a file stand in one column, and the id is made of several",
            received=", ".join(item.name for item in found),
        )
    return found[0]


def read_key_rows(
    file: RawFile, inputs: Sequence[InputColumn], key: InputColumn, batch_size: int
) -> Iterator[tuple[list[Any], RawRows]]:
    """Yields the keys of a file's rows, and the rows.

    Args:
        file: The file.
        inputs: What is read of it, the key among them.
        key: Input of the key.
        batch_size: Rows at a time, at most.

    Raises:
        ConfigError: The file's format is not known by its name.
        InputDataError: The file is missing, damaged or empty, lacks a column or a key, or holds a
            key twice.
    """
    read: list[Any] = []
    for rows in RawReader(file, inputs, key).read(batch_size):
        keys = _read_keys(rows.inputs[key.name], key, rows.first, file)
        read += keys
        yield keys, rows
    refuse_twice(file.path, enumerate(read, 1), "row")


def _read_keys(values: np.ndarray, key: InputColumn, first: int, file: RawFile) -> list[Any]:
    raw = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values.tolist()]
    if key.null_token in raw:
        raise InputDataError(
            f"{file.path}, row {first + raw.index(key.null_token)}: there is no key",
            received="no value",
            fix=f"fill column {key.name!r}, or leave the row out",
        )
    return raw
