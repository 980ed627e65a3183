"""libsvm text (`label index:value …`) to Arrow and back, a block of lines at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError, InputDataError
from etl.conversion.formats import LibsvmColumns

_BLOCK_BYTES = 4 << 20
_NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[iI][nN][fF]|[nN][aA][nN])$"
# Up to 9219999999999999999, so that every one fits int64.
_INDEX = r"^(\d{1,18}|[0-8]\d{18}|9[01]\d{17}|92[01]\d{16})$"


def libsvm_schema(columns: LibsvmColumns) -> pa.Schema:
    """Schema of a libsvm file: label, indices, values."""
    return pa.schema(
        [
            (columns.label, pa.float32()),
            (columns.indices, pa.list_(pa.int64())),
            (columns.values, pa.list_(pa.float32())),
        ]
    )


def read_libsvm(
    path: Path, columns: LibsvmColumns, block_bytes: int = _BLOCK_BYTES
) -> Iterator[pa.RecordBatch]:
    """Reads a file block by block; empty lines and `#` comments are passed over.

    Args:
        path: Text file, plain or gzip.
        columns: Names of the columns.
        block_bytes: Bytes read at a time; a longer line is read whole.

    Yields:
        Batches of label, indices as they stand in the file, and values.

    Raises:
        InputDataError: A line is malformed; names the file and the line.
    """
    first_line, rest = 1, b""
    with pa.input_stream(str(path), compression="detect") as stream:
        while data := stream.read(block_bytes):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                yield _parse_block(whole, path, first_line, columns)
                first_line += whole.count(b"\n") + 1
    if rest:
        yield _parse_block(rest, path, first_line, columns)


def _parse_block(data: bytes, path: Path, first_line: int, columns: LibsvmColumns) -> Any:
    try:
        text = pa.array([data.replace(b"\r", b"").decode("ascii")])
    except UnicodeDecodeError as error:
        line = first_line + data[: error.start].count(b"\n")
        raise _malformed(path, line, "bytes beyond ASCII") from error
    lines = pc.split_pattern(text, "\n").flatten()
    lines = pc.ascii_trim_whitespace(pc.replace_substring_regex(lines, "#.*", ""))
    numbers = np.flatnonzero(np.asarray(pc.greater(pc.binary_length(lines), 0))) + first_line
    tokens = pc.ascii_split_whitespace(lines.filter(pc.greater(pc.binary_length(lines), 0)))
    offsets = np.asarray(tokens.offsets).astype(np.int64)
    flat = tokens.flatten()
    is_label = np.zeros(len(flat), bool)
    is_label[offsets[:-1]] = True
    owners = np.repeat(numbers, np.diff(offsets))[~is_label]
    labels, pairs = flat.filter(pa.array(is_label)), flat.filter(pa.array(~is_label))
    _require(labels, _NUMBER, path, numbers, "a label that is no number")
    _require(pairs, "^[^:]*:[^:]*$", path, owners, "a pair that is not index:value")
    parts = pc.split_pattern(pairs, ":").flatten()
    indices, values = parts[::2], parts[1::2]
    _require(indices, _INDEX, path, owners, "an index that is no whole number of 0 or more")
    _require(values, _NUMBER, path, owners, "a value that is no number")
    bounds = pa.array((offsets - np.arange(len(offsets))).astype(np.int32))
    return pa.RecordBatch.from_arrays(
        [
            _parse_floats(labels),
            pa.ListArray.from_arrays(bounds, indices.cast(pa.int64())),
            pa.ListArray.from_arrays(bounds, _parse_floats(values)),
        ],
        schema=libsvm_schema(columns),
    )


def _parse_floats(texts: pa.Array) -> pa.Array:
    return pc.ascii_ltrim(texts, "+").cast(pa.float32())


def _require(texts: pa.Array, pattern: str, path: Path, lines: np.ndarray, what: str) -> None:
    fits = np.asarray(pc.match_substring_regex(texts, pattern))
    if not fits.all():
        bad = int(np.argmin(fits))
        raise _malformed(path, int(lines[bad]), f"{what}: {texts[bad].as_py()!r}")


def _malformed(path: Path, line: int, received: str) -> InputDataError:
    return InputDataError(
        f"{path}: line {line} is not libsvm",
        received=received,
        allowed="label index:value index:value …",
        fix="correct the line or take it out",
    )


def format_libsvm(batch: pa.RecordBatch, columns: LibsvmColumns) -> bytes:
    """Formats a batch as libsvm lines; a null or missing list is a line with a label alone.

    Args:
        batch: Rows with the three columns.
        columns: Their names.

    Raises:
        InputDataError: A label is null, or the two lists of a row differ in length.
    """
    label, indices, values = (
        batch.column(name) for name in (columns.label, columns.indices, columns.values)
    )
    if label.null_count:
        raise InputDataError(
            f"column {columns.label!r} has a null, which libsvm cannot express",
            fix="filter those rows, or give them a label",
        )
    lengths = [pc.fill_null(pc.list_value_length(lists), 0) for lists in (indices, values)]
    if not lengths[0].equals(lengths[1]):
        raise InputDataError(
            f"columns {columns.indices!r} and {columns.values!r} differ in length in some row",
            fix="write equally long lists",
        )
    pairs = pc.binary_join_element_wise(
        indices.flatten().cast(pa.string()), values.flatten().cast(pa.string()), ":"
    )
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths[0]))]).astype(np.int32)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), pairs), " ")
    lines = pc.binary_join_element_wise(label.cast(pa.string()), joined, " ")
    text = "\n".join(pc.ascii_rtrim_whitespace(lines).to_pylist())
    return f"{text}\n".encode() if len(lines) else b""


def check_libsvm_schema(schema: pa.Schema, columns: LibsvmColumns) -> None:
    """Refuses, before anything is read, columns that libsvm has no place for.

    Raises:
        ConfigError: One of the three columns is missing or of another kind, or there are more.
    """
    wanted = {columns.label: False, columns.indices: True, columns.values: True}
    kinds = {field.name: pa.types.is_list(field.type) for field in schema}
    if kinds != wanted:
        raise ConfigError(
            "these columns cannot be written as libsvm",
            received=", ".join(f"{field.name} ({field.type})" for field in schema),
            allowed=f"{columns.label} (a number), {columns.indices} and {columns.values} (lists)",
            fix="name the columns with --label, --indices and --values",
        )
