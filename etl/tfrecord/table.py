"""TFRecord files for Arrow and pandas, without Spark: whole tables, or batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from conf.manifest import ShardInfo
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.files.writer import ShardFile, ShardOptions, find_record_starts
from etl.tfrecord.types.features import BYTE_ARRAY_COLUMN, RecordType, TypeOptions
from etl.tfrecord.types.from_example import plan_from_example
from etl.tfrecord.types.refusals import locate_rows
from etl.tfrecord.types.to_example import plan_to_example

if TYPE_CHECKING:
    import pandas as pd

PathLike = str | Path


class TableWriter:
    """Context manager that writes Arrow batches to one TFRecord file, by the policies of types.

    The file appears whole on a clean exit, and not at all otherwise. Equal batches give equal
    bytes.

    `schema` is that of the batches; `options` are record type and compression. Raises ConfigError
    for columns that do not fit, all of them named.

    Example:
        >>> with TableWriter("train.tfrecord", batch.schema) as writer:
        ...     writer.write(batch)
        >>> writer.info.rows
    """

    def __init__(
        self,
        path: PathLike,
        schema: pa.Schema,
        options: ShardOptions | None = None,
        type_options: TypeOptions | None = None,
    ) -> None:
        self._path, self._options = Path(path), options or ShardOptions()
        record_type = self._options.record_type
        self._to_example = plan_to_example(schema, record_type, type_options or TypeOptions())
        self._encoder = build_encoder(self._to_example.schema, record_type)
        self._info: ShardInfo | None = None

    def __enter__(self) -> Self:
        self._file = ShardFile(self._path.parent, self._path.name, self._options)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch; InputDataError for a value that does not fit names column and row."""
        with locate_rows(batch, self._file.rows, "the table"):
            rows = self._to_example.apply(batch)
            for framed in self._encoder.encode_chunks(rows, self._options.chunk_rows):
                self._file.append(framed, find_record_starts(framed))

    @property
    def info(self) -> ShardInfo:
        """Name, rows, bytes and checksum of the finished file; a RuntimeError before that."""
        if self._info is None:
            raise RuntimeError(f"{self._path} is not finished; read `info` after the with block")
        return self._info

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._info = self._file.finish()
        else:
            self._file.discard()


def write_table(
    data: pa.Table | pa.RecordBatch,
    path: PathLike,
    *,
    options: ShardOptions | None = None,
    type_options: TypeOptions | None = None,
) -> ShardInfo:
    """Writes a table as one TFRecord file; arguments and errors as for `TableWriter`.

    Example:
        >>> write_table(pa.table({"user": [1, 2], "tags": [["a"], []]}), "train.tfrecord")
    """
    batches = [data] if isinstance(data, pa.RecordBatch) else data.to_batches()
    with TableWriter(path, data.schema, options, type_options) as writer:
        for batch in batches:
            writer.write(batch)
    return writer.info


def write_frame(
    frame: pd.DataFrame,
    path: PathLike,
    *,
    options: ShardOptions | None = None,
    type_options: TypeOptions | None = None,
) -> ShardInfo:
    """Writes a frame as one TFRecord file; as `write_table`, without the frame's index.

    A NaN in a float column is a null, as everywhere in pandas, and so a feature left out.

    A column that Arrow has no type for, or of several, raises Arrow's error.
    """
    table = pa.Table.from_pandas(frame, preserve_index=False)
    return write_table(table, path, options=options, type_options=type_options)


def infer_table_schema(paths: Iterable[PathLike], record_type: RecordType = "Example") -> pa.Schema:
    """Reads files for their columns: int64, float32, string, lists of these; errors as in reads."""
    if record_type == "ByteArray":
        return pa.schema([(BYTE_ARRAY_COLUMN, pa.binary())])
    features = infer_features(paths, record_type=record_type)
    return pa.schema([(feature.name, feature.text_type) for feature in features])


def read_table_batches(
    paths: Sequence[PathLike],
    *,
    schema: pa.Schema | None = None,
    record_type: RecordType = "Example",
    type_options: TypeOptions | None = None,
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Reads files batch by batch, each of some megabytes of records.

    Args:
        paths: TFRecord files, plain or compressed.
        schema: Columns to decode; None to infer them, which reads the files once more.
        record_type: What the records are.
        type_options: The policies that the files were written with, where a date or the like is to
            come back.

    Returns:
        The schema, and the batches in the order of the files.

    Raises:
        ConfigError: A column of a type that no feature can be read as.
        CorruptRecordError: A file is damaged.
        InputDataError: A feature does not fit its column.
    """
    target = infer_table_schema(paths, record_type) if schema is None else schema
    from_example = plan_from_example(target, record_type, type_options)
    decoder = build_decoder(from_example.features, record_type)

    def read() -> Iterator[pa.RecordBatch]:
        for path in paths:
            for block in read_record_blocks(path):
                batch = decoder.decode_block(block, str(path))
                with locate_rows(batch, block.first_record, "the file"):
                    restored = from_example.apply(batch, str(path))
                yield restored

    return target, read()


def read_table(
    paths: PathLike | Sequence[PathLike],
    *,
    schema: pa.Schema | None = None,
    record_type: RecordType = "Example",
    type_options: TypeOptions | None = None,
) -> pa.Table:
    """Reads whole files; arguments and errors as for `read_table_batches`.

    Example:
        >>> read_table("train.tfrecord").column("user").to_pylist()
        [1, 2]
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    found, batches = read_table_batches(
        listed, schema=schema, record_type=record_type, type_options=type_options
    )
    return pa.Table.from_batches(batches, found)


def read_frame(
    paths: PathLike | Sequence[PathLike],
    *,
    schema: pa.Schema | None = None,
    record_type: RecordType = "Example",
    type_options: TypeOptions | None = None,
) -> pd.DataFrame:
    """Reads whole files as a frame; arguments and errors as for `read_table`.

    Returns:
        One column per feature. A column of integers with nulls becomes pandas' nullable one, such
        as `Int64`, so that no id passes through a float.
    """
    table = read_table(paths, schema=schema, record_type=record_type, type_options=type_options)
    import pandas as pd

    names = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
    nullable = {pa.type_for_alias(name.lower()): pd.api.types.pandas_dtype(name) for name in names}
    with_nulls = {column.type for column in table.columns if column.null_count}
    chosen = {kind: dtype for kind, dtype in nullable.items() if kind in with_nulls}
    return table.to_pandas(types_mapper=chosen.get, integer_object_nulls=True)
