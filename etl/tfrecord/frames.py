"""TFRecord files for pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from conf.errors import ConfigError
from conf.manifest import ShardInfo
from etl.tfrecord.policies import LoweringOptions
from etl.tfrecord.record_types import RecordType
from etl.tfrecord.table import PathLike, read_table, write_table
from etl.tfrecord.writer import ShardOptions

if TYPE_CHECKING:
    import pandas as pd


def write_frame(
    frame: pd.DataFrame,
    path: PathLike,
    *,
    options: ShardOptions | None = None,
    lowering: LoweringOptions | None = None,
) -> ShardInfo:
    """Writes a frame as one TFRecord file; its index is left out.

    Args:
        frame: Columns of numbers, text, bytes, dates, or lists and arrays of these. A NaN in a
            float column is a null, as everywhere in pandas, and so a feature left out.
        path: File to create or replace.
        options: Record type and compression; the defaults if None.
        lowering: Policies of types and values; the defaults if None.

    Returns:
        Name, rows, bytes and checksum of the file.

    Raises:
        ConfigError: Columns that do not fit, all of them named; a column of mixed types; two of one
            name.
        InputDataError: A value that does not fit.
    """
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except (TypeError, ValueError, NotImplementedError) as error:  # Arrow's among them
        raise ConfigError(
            "a column of the frame has no one type, none that Arrow has, or no name of its own",
            received=str(error),
            fix="convert it with `astype`, rename it, or drop it",
        ) from error
    return write_table(table, path, options=options, lowering=lowering)


def read_frame(
    paths: PathLike | Sequence[PathLike],
    *,
    schema: pa.Schema | None = None,
    record_type: RecordType = "Example",
    lowering: LoweringOptions | None = None,
) -> pd.DataFrame:
    """Reads whole files as a frame; arguments and errors as for `read_table`.

    Returns:
        One column per feature. An int64 column with nulls becomes pandas' nullable `Int64`, so
        that no id passes through a float.
    """
    table = read_table(paths, schema=schema, record_type=record_type, lowering=lowering)
    import pandas as pd

    nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
    with_nulls = {
        field.type
        for field, column in zip(table.schema, table.columns, strict=True)
        if column.null_count
    }
    chosen = {kind: dtype for kind, dtype in nullable.items() if kind in with_nulls}
    return table.to_pandas(types_mapper=chosen.get)
