"""Tables of statistics as files: one row per id of a vocabulary, float32 columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from conf.dataset import write_bytes_atomic
from conf.encoders import TableSpec
from conf.errors import InputDataError
from etl.encoders.vocabulary import checksum, parse_parquet, read_named, to_parquet


def build_table(values: np.ndarray) -> pa.Table:
    """Builds a table.

    Args:
        values: float `[vocabulary_size, 1 + folds]`: of the whole train split, then without each
            fold.
    """
    names = ["all", *(f"fold_{fold}" for fold in range(values.shape[1] - 1))]
    columns = [pa.array(column.astype(np.float32)) for column in values.T]
    return pa.Table.from_arrays(columns, schema=_schema(names))


def write_table(table: pa.Table, path: Path) -> TableSpec:
    """Writes a table; the same values give the same bytes.

    Args:
        table: As from `build_table`.
        path: `<name>.table.parquet`.
    """
    data = to_parquet(table, _schema(table.schema.names))
    write_bytes_atomic(path, memoryview(data))
    name = path.name.removesuffix(".table.parquet")
    return TableSpec(name, path.name, len(table), checksum(data))


def load_table(directory: Path, spec: TableSpec) -> pa.Table:
    """Reads a table that a plan names.

    Raises:
        InputDataError: It is missing, damaged, or not the one that the plan was written for.
    """
    path, data = read_named(directory, spec.name, spec.file, spec.file_crc32c)
    table = parse_parquet(data, str(path)).combine_chunks()
    if len(table) != spec.rows or table.schema.types != [pa.float32()] * table.num_columns:
        raise InputDataError(
            f"{path} is not a table of statistics",
            received=f"{len(table)} rows of {', '.join(map(str, table.schema.types))}",
            allowed=f"{spec.rows} rows of float",
        )
    return table


def _schema(names: list[str]) -> pa.Schema:
    return pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names])
