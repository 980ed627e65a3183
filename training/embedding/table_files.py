"""Files of embedding tables: a row for each key, in the order of the keys' creation.

    <name>.parquet   key int64, vector list<float32>; exact
    <name>.npz       keys int64 [n], rows float32 [n, dim], for `numpy.load`; exact
    any other name   key<TAB>v1,v2,…   one line per key, eight decimals, no header

Files are read by what they hold, whatever their names. Each is written whole or not at all.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from conf.errors import ConfigError, InputDataError
from conf.schema import PAD_ID
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import open_parquet

PARQUET, NPZ, TEXT = ".parquet", ".npz", ".txt"
_PARQUET_MAGIC, _ZIP_MAGIC = b"PAR1", b"PK\x03\x04"
TableRows = tuple[np.ndarray, np.ndarray]
"""Keys, int64 `[n]`, and their rows, float32 `[n, dim]`."""
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32()), nullable=False),
    ]
)
_SHOWN = 60
_PART_ROWS = 1 << 16


def write_table(path: Path, parts: Iterable[TableRows]) -> None:
    """Writes the rows of a table; an earlier file is replaced at the end.

    Args:
        path: A file, whose name says the format; its directory must exist.
        parts: Rows, a part after the other.

    Raises:
        ConfigError: No such directory, or the path is one.
    """
    write = {PARQUET: _write_parquet, NPZ: _write_npz}.get(path.suffix, _write_text)
    if path.is_dir():
        raise ConfigError("a table is written to a file", received=f"{path}, a directory")
    if not path.parent.is_dir():
        raise ConfigError("no such directory to write a table to", received=path.parent)
    with atomic_file(path) as unfinished:
        write(unfinished, parts)


def write_tables(directory: Path, tables: Mapping[str, TableRows]) -> None:
    """Writes tables by name in each format, in a directory that it makes."""
    directory.mkdir()
    for name, (keys, rows) in tables.items():
        starts = range(0, len(keys), _PART_ROWS)
        for ending in (PARQUET, NPZ, TEXT):
            file = directory / f"{quote(name, safe='')}{ending}"
            parts = (slice(start, start + _PART_ROWS) for start in starts)
            write_table(file, ((keys[part], rows[part]) for part in parts))


def read_table(path: Path, dim: int) -> Iterator[TableRows]:
    """Reads the rows of a table, a part after the other.

    Args:
        path: A file that `write_table` wrote, under any name.
        dim: Length of a row.

    Raises:
        ConfigError: No such file.
        InputDataError: The file is damaged, a row has another length, or a number is not finite.
    """
    if not path.is_file():
        raise ConfigError("no such file of a table", received=path)
    try:
        yield from _find_reader(path)(path, dim)
    except (pa.ArrowException, OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise InputDataError(f"{path} cannot be read", received=str(error)) from error


def _find_reader(path: Path) -> Callable[[Path, int], Iterator[TableRows]]:
    with path.open("rb") as file:
        magic = file.read(len(_ZIP_MAGIC))
    return {_PARQUET_MAGIC: _read_parquet, _ZIP_MAGIC: _read_npz}.get(magic, _read_text)


def load_table(path: Path, dim: int) -> TableRows:
    """Reads all rows of a table.

    Args:
        path: A file, as for `read_table`.
        dim: Length of a row.

    Raises:
        ConfigError: No such file.
        InputDataError: As for `read_table`, or a key occurs twice or is 0.
    """
    parts = [(np.empty(0, np.int64), np.empty((0, dim), np.float32)), *read_table(path, dim)]
    keys, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    distinct = np.unique(keys[keys != PAD_ID])
    if len(distinct) != len(keys):
        raise InputDataError(
            f"{path} holds a key twice, or key 0, which is padding",
            received=f"{len(keys):,} rows of {len(distinct):,} keys",
            fix="leave one row of each key",
        )
    return keys, rows


def _write_parquet(path: Path, parts: Iterable[TableRows]) -> None:
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for keys, rows in parts:
            offsets = np.arange(len(keys) + 1, dtype=np.int32) * rows.shape[1]
            vectors = pa.ListArray.from_arrays(offsets, rows.astype(np.float32).ravel())
            writer.write_batch(pa.record_batch([pa.array(keys), vectors], schema=_SCHEMA))


def _write_text(path: Path, parts: Iterable[TableRows]) -> None:
    with path.open("w", encoding="ascii", newline="\n") as out:
        for keys, rows in parts:
            line = "%d\t" + ",".join(["%.8f"] * rows.shape[1]) + "\n"
            out.writelines(line % (key, *row) for key, row in zip(keys, rows.tolist(), strict=True))


def _write_npz(path: Path, parts: Iterable[TableRows]) -> None:
    keys, rows = zip(*parts, strict=True)
    with path.open("wb") as file:
        np.savez(file, keys=np.concatenate(keys), rows=np.concatenate(rows).astype(np.float32))


def _read_npz(path: Path, dim: int) -> Iterator[TableRows]:
    with np.load(path, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in ("keys", "rows") if name in arrays}
    described = {name: f"{array.dtype} {list(array.shape)}" for name, array in found.items()}
    count = found["keys"].size if "keys" in found else 0
    if described != {"keys": f"int64 {[count]}", "rows": f"float32 {[count, dim]}"}:
        raise InputDataError(
            f"{path} is no file of this table",
            received=", ".join(f"{name} {shape}" for name, shape in described.items()),
            allowed=f"keys int64 [n], rows float32 [n, {dim}]",
        )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(found["rows"].ravel()), dim)
    batch = pa.record_batch([pa.array(found["keys"]), vectors], names=_SCHEMA.names)
    yield _check_rows(path, "row", 0, batch, dim)


def _read_parquet(path: Path, dim: int) -> Iterator[TableRows]:
    with open_parquet(path) as file:
        if any(file.schema_arrow.names.count(name) != 1 for name in _SCHEMA.names):
            raise InputDataError(
                f"{path} is no file of a table",
                received=f"columns {', '.join(file.schema_arrow.names)}",
                allowed=", ".join(f"{field.name} {field.type}" for field in _SCHEMA),
            )
        key_type = file.schema_arrow.field("key").type
        if pa.types.is_floating(key_type) or pa.types.is_boolean(key_type):
            raise InputDataError(
                f"{path} has keys that are no whole numbers",
                received=f"key {key_type}",
                allowed="key int64; a float64 has rounded keys above 2^53 already",
                fix="write the keys as int64; pandas makes float64 of a column that lacks a value",
            )
        first = 0
        for batch in file.iter_batches(columns=_SCHEMA.names):
            is_null = pc.or_(pc.is_null(batch["key"]), pc.is_null(batch["vector"]))
            if pc.any(is_null).as_py():
                bad = pc.index(is_null, True).as_py()
                shown = f"key {batch['key'][bad]}: {batch['vector'][bad].as_py()}"
                raise _bad_row(path, "row", first + bad + 1, shown, dim)
            yield _check_rows(path, "row", first, batch.cast(_SCHEMA), dim)
            first += batch.num_rows


def _read_text(path: Path, dim: int) -> Iterator[TableRows]:
    if path.stat().st_size == 0:
        return
    first = 0
    for batch in _open_text(path):
        yield _parse_lines(path, first, batch, dim)
        first += batch.num_rows


def _open_text(path: Path) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=["key", "vector"]),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={"key": pa.string(), "vector": pa.string()}, strings_can_be_null=False
        ),
    )


def _parse_lines(path: Path, first: int, batch: pa.RecordBatch, dim: int) -> TableRows:
    try:
        parsed = _parse(batch)
    except pa.ArrowInvalid:
        bad = _find_bad_line(batch)
        line = f"{batch['key'][bad]}\t{batch['vector'][bad]}"
        raise _bad_row(path, "line", first + bad + 1, line, dim) from None
    return _check_rows(path, "line", first, parsed, dim)


def _parse(batch: pa.RecordBatch) -> pa.RecordBatch:
    keys = batch["key"].cast(pa.int64())
    vectors = pc.split_pattern(batch["vector"], ",").cast(pa.list_(pa.float32()))
    return pa.record_batch([keys, vectors], schema=_SCHEMA)


def _find_bad_line(batch: pa.RecordBatch) -> int:
    """Number of the first line of a batch that cannot be parsed, where there is one."""
    first, count = 0, batch.num_rows
    while count > 1:
        half = count // 2
        try:
            _parse(batch.slice(first, half))
            first, count = first + half, count - half
        except pa.ArrowInvalid:
            count = half
    return first


def _check_rows(path: Path, unit: str, first: int, batch: pa.RecordBatch, dim: int) -> TableRows:
    """Returns the keys and rows of a batch, of which each must hold `dim` finite numbers."""
    vectors = batch["vector"]
    lengths = pc.fill_null(pc.list_value_length(vectors), -1).to_numpy(zero_copy_only=False)
    is_wrong = lengths != dim
    numbers = np.empty((0, dim), np.float32)
    if not is_wrong.any():
        numbers = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
        is_wrong = ~np.isfinite(numbers).all(axis=1)
    if is_wrong.any():
        bad = int(np.argmax(is_wrong))
        shown = f"key {batch['key'][bad]}: {batch['vector'][bad].as_py()}"
        raise _bad_row(path, unit, first + bad + 1, shown, dim)
    return batch["key"].to_numpy(zero_copy_only=False), numbers


def _bad_row(path: Path, unit: str, number: int, shown: str, dim: int) -> InputDataError:
    return InputDataError(
        f"{path}, {unit} {number:,}: no row of this table",
        received=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…",
        allowed=f"a whole number of 64 bits, and {dim} finite numbers",
        fix="correct the file, or give the table the row length of the file",
    )
