"""Vocabularies: fitted by Spark, stored as Parquet, tokens from id 2 by falling frequency."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf.dataset import write_bytes_atomic
from conf.encoders import TokenDType, VocabularySpec
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.pointer import NAME_PATTERN
from conf.schema import FIRST_TOKEN_ID
from etl.tfrecord.crc32c import crc32c

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SUFFIX = ".parquet"
_TOKEN_TYPES: dict[TokenDType, pa.DataType] = {"int64": pa.int64(), "string": pa.string()}
_SPARK_TOKEN_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "bigint"),
    "string": "string",
}
_REBUILD = "fit the vocabulary again, or restore the file"


def fit_vocabulary(
    df: DataFrame, columns: Sequence[str], min_count: int = 1, max_size: int | None = None
) -> pa.Table:
    """Counts the tokens of one or more columns and numbers them.

    Tokens are ordered by falling count, ties by token: integers by value, strings by their UTF-8
    bytes, which is the order of Spark's strings, Arrow's and Python's alike. Null is no token;
    the empty string is one. Only the vocabulary comes to the driver, as Arrow.

    Args:
        df: The train split.
        columns: Columns that share the vocabulary: all of integers or all of strings, scalars or
            arrays, of which each element counts.
        min_count: Rarer tokens are left out; at least 1.
        max_size: Number of tokens kept, the most frequent; None keeps all.

    Returns:
        Columns `token` (int64 or string), `id` and `count` (int64), by rising id from
        `FIRST_TOKEN_ID`.

    Raises:
        ConfigError: No such column, columns of different or other types, or a bound below 1.
    """
    from pyspark.sql import functions as F

    if min_count < 1 or (max_size is not None and max_size < 1):
        raise ConfigError(
            "a vocabulary's bounds must be at least 1",
            received=f"min_count={min_count}, max_size={max_size}",
        )
    spark_type = _spark_type_of(df, columns)
    tokens = df.select(_tokens(df, columns, spark_type).alias("token"))
    counted = tokens.where(F.col("token").isNotNull()).groupBy("token").count()
    counted = counted.where(F.col("count") >= min_count)
    if max_size is not None:
        counted = counted.orderBy(F.desc("count"), F.asc("token")).limit(max_size)
    return _number_tokens(counted.toArrow(), "int64" if spark_type == "bigint" else "string")


def _spark_type_of(df: DataFrame, columns: Sequence[str]) -> str:
    found: dict[str, str] = {}
    for column in columns:
        if column not in df.columns:
            raise ConfigError(
                "a vocabulary is to be fitted on a column that is not there",
                received=column,
                fix=did_you_mean(column, df.columns),
            )
        found[column] = _element_type(df, column)
    types = {_SPARK_TOKEN_TYPES.get(name) for name in found.values()}
    spark_type = types.pop() if len(types) == 1 else None
    if spark_type is None:
        raise ConfigError(
            "columns of these types cannot feed one vocabulary",
            received=", ".join(f"{column}: {name}" for column, name in found.items()) or "none",
            allowed="integers only, or strings only, or arrays of them",
            fix="give the columns vocabularies of their own, or declare them with one type",
        )
    return spark_type


def _is_array(df: DataFrame, column: str) -> bool:
    return df.schema[column].dataType.typeName() == "array"


def _element_type(df: DataFrame, column: str) -> str:
    data_type = df.schema[column].dataType
    if _is_array(df, column):
        data_type = data_type.elementType  # type: ignore[attr-defined]
    return data_type.simpleString().partition(" ")[0]  # "string collate ..." is a string


def _tokens(df: DataFrame, columns: Sequence[str], spark_type: str) -> Column:
    """One token per row: all columns' tokens in a single scan."""
    from pyspark.sql import functions as F

    quoted = {column: F.col("`" + column.replace("`", "``") + "`") for column in columns}
    if len(columns) == 1 and not _is_array(df, columns[0]):
        return quoted[columns[0]].cast(spark_type)
    array_type = f"array<{spark_type}>"
    none = F.array().cast(array_type)
    arrays = [
        F.coalesce(values.cast(array_type), none)
        if _is_array(df, column)
        else F.array(values.cast(spark_type))
        for column, values in quoted.items()
    ]
    return F.explode(F.concat(*arrays))


def _number_tokens(counted: pa.Table, token_dtype: TokenDType) -> pa.Table:
    ordered = counted.sort_by([("count", "descending"), ("token", "ascending")])
    ids = np.arange(FIRST_TOKEN_ID, FIRST_TOKEN_ID + len(ordered), dtype=np.int64)
    columns = [ordered["token"], pa.chunked_array([pa.array(ids)]), ordered["count"]]
    schema = _table_schema(token_dtype)
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    ).combine_chunks()


def _table_schema(token_dtype: TokenDType) -> pa.Schema:
    return pa.schema(
        [
            pa.field("token", _TOKEN_TYPES[token_dtype], nullable=False),
            pa.field("id", pa.int64(), nullable=False),
            pa.field("count", pa.int64(), nullable=False),
        ]
    )


def write_vocabulary(table: pa.Table, path: str | os.PathLike[str]) -> VocabularySpec:
    """Writes a vocabulary; the same vocabulary gives the same bytes.

    Args:
        table: As from `fit_vocabulary`.
        path: `<name>.parquet`; replaced as a whole, or left as it was where writing fails.

    Returns:
        What the plan says of the file, `file` being its bare name.

    Raises:
        ConfigError: The name is not a plain file name.
        InputDataError: The table is no vocabulary.
    """
    path = Path(path)
    if path.suffix != _SUFFIX or not NAME_PATTERN.fullmatch(path.stem):
        raise ConfigError(
            "a vocabulary's name must be a plain name",
            received=path.name,
            allowed="letters, digits, '_', '-', '.', first a letter or digit; then .parquet",
        )
    token_dtype = _check_table(table, str(path))
    data = _to_parquet(table, token_dtype)
    write_bytes_atomic(path, memoryview(data))
    return VocabularySpec(
        name=path.stem,
        token_dtype=token_dtype,
        file=path.name,
        size=FIRST_TOKEN_ID + len(table),
        file_crc32c=_checksum(data),
    )


def _to_parquet(table: pa.Table, token_dtype: TokenDType) -> pa.Buffer:
    # Chunks and foreign metadata would show in the bytes; distinct tokens gain no dictionary.
    plain = pa.Table.from_arrays(table.combine_chunks().columns, schema=_table_schema(token_dtype))
    sink = pa.BufferOutputStream()
    pq.write_table(plain, sink, compression="zstd", use_dictionary=False, store_schema=False)
    return sink.getvalue()


def _checksum(data: pa.Buffer | bytes) -> str:
    return f"{crc32c(memoryview(data)):08x}"


def read_vocabulary(path: str | os.PathLike[str]) -> pa.Table:
    """Reads a vocabulary.

    Args:
        path: Parquet file.

    Returns:
        Columns `token`, `id` and `count`, as from `fit_vocabulary`.

    Raises:
        InputDataError: The file cannot be read or is no vocabulary.
    """
    return _parse(_read_bytes(Path(path)), str(path))


def load_vocabulary(directory: Path, spec: VocabularySpec) -> pa.Table:
    """Reads a vocabulary that a plan names, and checks it against what the plan says.

    Args:
        directory: Where `encoders.json` lies.
        spec: The plan's entry.

    Raises:
        InputDataError: The file lies elsewhere, cannot be read, or is not the one that the plan
            was written for.
    """
    path = (directory / spec.file).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise InputDataError(
            f"vocabulary {spec.name!r} names a file outside its own directory",
            received=spec.file,
            allowed=f"paths inside {directory}",
        )
    data = _read_bytes(path)
    found = _checksum(data)
    if found != spec.file_crc32c:
        raise _mismatch(path, "checksum", found, spec.file_crc32c)
    table = _parse(data, str(path))
    if table.schema.field("token").type != _TOKEN_TYPES.get(spec.token_dtype):
        raise _mismatch(path, "token type", table.schema.field("token").type, spec.token_dtype)
    if FIRST_TOKEN_ID + len(table) != spec.size:
        raise _mismatch(path, "size", FIRST_TOKEN_ID + len(table), spec.size)
    return table


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputDataError(
            f"cannot read the vocabulary {path}", received=error.strerror, fix=_REBUILD
        ) from error


def _mismatch(path: Path, what: str, received: object, allowed: object) -> InputDataError:
    return InputDataError(
        f"{path} is not the vocabulary that the encoders were written with: another {what}",
        received=received,
        allowed=allowed,
        fix=_REBUILD,
    )


def _parse(data: bytes, origin: str) -> pa.Table:
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise InputDataError(
            f"{origin} is not a Parquet file", received=str(error), fix=_REBUILD
        ) from error
    _check_table(table, origin)
    return table.combine_chunks()


def _check_table(table: pa.Table, origin: str) -> TokenDType:
    """Returns the token type of a sound vocabulary table."""
    token_dtype: TokenDType
    for token_dtype in _TOKEN_TYPES:
        expected = _table_schema(token_dtype)
        if table.schema.names == expected.names and table.schema.types == expected.types:
            break
    else:
        raise InputDataError(
            f"{origin} is not a vocabulary",
            received=", ".join(f"{field.name}: {field.type}" for field in table.schema),
            allowed="token: int64 or string, id: int64, count: int64",
            fix=_REBUILD,
        )
    expected_ids = np.arange(FIRST_TOKEN_ID, FIRST_TOKEN_ID + len(table))
    if any(column.null_count for column in table.columns) or not np.array_equal(
        table["id"].to_numpy(), expected_ids
    ):
        raise InputDataError(
            f"{origin} is not a vocabulary: its ids do not rise from {FIRST_TOKEN_ID} without gaps",
            fix=_REBUILD,
        )
    return token_dtype
