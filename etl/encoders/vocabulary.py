"""Vocabularies: the ids of tokens (`assign_ids`), and their files: Parquet, a row per token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.artefacts.encoder_files import (
    RETIRED_COLUMN,
    TOKEN_TYPES,
    EncoderFiles,
    parse_parquet,
)
from conf.artefacts.entries import ENTRY_NAME_PATTERN
from conf.encoders import TokenDType, VocabularySpec
from conf.errors import ConfigError, InputDataError
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID
from conf.storage.atomic_output import write_bytes_atomic
from etl.tfrecord.codec.crc32c import crc32c

_SUFFIX = ".parquet"
LAST_SEEN_COLUMN = "last_seen"
_REBUILD = "fit the vocabulary again, or restore the file"


def vocabulary_schema(token_dtype: TokenDType, incremental: bool = False) -> pa.Schema:
    """Returns the columns of a vocabulary's table.

    Args:
        token_dtype: Type of the tokens.
        incremental: Whether later versions append to it: it then has `last_seen`, days
            since the epoch as date32 or null where that is not known, and `is_retired`.
    """
    fields = [
        pa.field("token", TOKEN_TYPES[token_dtype], nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
    ]
    if incremental:
        fields.append(pa.field(LAST_SEEN_COLUMN, pa.date32()))
        fields.append(pa.field(RETIRED_COLUMN, pa.bool_(), nullable=False))
    return pa.schema(fields)


def order_tokens(counted: pa.Table) -> pa.Table:
    """Sorts tokens by falling `count`, ties by `token`."""
    return counted.sort_by([("count", "descending"), ("token", "ascending")])


def assign_ids(
    counted: pa.Table, token_dtype: TokenDType, first_id: int = FIRST_TOKEN_ID
) -> pa.Table:
    """Assigns ids by falling count, ties by token.

    Args:
        counted: `token` and `count`.
        token_dtype: Type of the tokens.
        first_id: Id of the most frequent one.

    Returns:
        The vocabulary's table.
    """
    ordered = order_tokens(counted)
    ids = np.arange(first_id, first_id + len(ordered), dtype=np.int64)
    columns = [ordered["token"], pa.chunked_array([pa.array(ids)]), ordered["count"]]
    schema = vocabulary_schema(token_dtype)
    return pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    ).combine_chunks()


def number_given(tokens: pa.Array, counted: pa.Table, first_id: int = FIRST_TOKEN_ID) -> pa.Table:
    """Numbers tokens in the order in which they are given.

    Args:
        tokens: int64 or string, each once.
        counted: `token` and `count` of those that the train split has.
        first_id: Id of the first one.

    Returns:
        The vocabulary's table; a token that the train split lacks has the count 0.
    """
    token_table = counted.combine_chunks()
    rows = pc.index_in(tokens, value_set=token_table["token"].cast(tokens.type))
    counts = pc.fill_null(token_table["count"].combine_chunks().take(rows), 0)
    ids = pa.array(np.arange(first_id, first_id + len(tokens), dtype=np.int64))
    schema = vocabulary_schema("int64" if pa.types.is_integer(tokens.type) else "string")
    return pa.Table.from_arrays([tokens, ids, counts], schema=schema)


_MOST_TOKEN_BYTES = 8 << 30


def read_token_file(path: Path, token_dtype: TokenDType) -> pa.Array:
    """Reads the tokens of a vocabulary that is not fitted.

    Args:
        path: Text, a token on each line, or Parquet with a column `token`.
        token_dtype: Type of the tokens.

    Returns:
        int64 or string, in the order of the file.

    Raises:
        InputDataError: The file cannot be read or is empty, a token occurs twice, or one is null,
            empty or of another type.
    """
    fix = "correct the file that the encoding's `path` names"
    try:
        if path.stat().st_size > _MOST_TOKEN_BYTES:
            raise InputDataError(
                f"the file of tokens {path} is too large",
                received=f"{path.stat().st_size:,} bytes",
                allowed=f"at most {_MOST_TOKEN_BYTES:,}",
            )
        data = path.read_bytes()
        tokens = _parse_tokens(data, path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputDataError(
            f"cannot read the tokens of {path}", received=str(error), fix=fix
        ) from error
    try:
        typed = tokens.cast(TOKEN_TYPES[token_dtype])
    except pa.ArrowInvalid as error:
        raise InputDataError(
            f"{path} holds a token that is no {token_dtype}", received=str(error), fix=fix
        ) from error
    distinct, empty = len(pc.unique(typed)), pc.sum(_is_empty(typed)).as_py() or 0
    if not len(typed) or typed.null_count or empty or distinct < len(typed):
        raise InputDataError(
            f"{path} is no list of tokens",
            received=f"{len(typed):,} tokens, {distinct:,} of them distinct, "
            f"{typed.null_count + empty:,} null or empty",
            allowed="one token or more, each once, none of them empty",
            fix=fix,
        )
    return typed


def _parse_tokens(data: bytes, path: Path) -> pa.Array:
    if path.suffix != _SUFFIX:
        # Ends of lines first, or the last token of a file of Windows would keep its `\r`.
        text = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        return pa.array(text.split("\n"))
    table = parse_parquet(data, str(path))
    if "token" not in table.schema.names:
        raise InputDataError(
            f"{path} has no column `token`", received=", ".join(table.schema.names)
        )
    return table["token"].combine_chunks()


def _is_empty(tokens: pa.Array) -> pa.Array:
    return pc.equal(pc.cast(tokens, pa.string()), "")


def live_tokens(table: pa.Table) -> pa.Table:
    """Returns the tokens of a vocabulary that are not retired: one column, `token`."""
    if RETIRED_COLUMN in table.schema.names:
        table = table.filter(pc.invert(table[RETIRED_COLUMN]))
    return table.select(["token"])


@dataclass(frozen=True)
class OddTokens:
    """Tokens that are likely no values, but how a file writes them.

    Attributes:
        quoted: How many are in quotes.
        example: One of these; None: there are none.
        headers: Those that name their column, with or without `id`, as a header line does.
    """

    quoted: int
    example: str | None
    headers: tuple[str, ...]


def find_odd_tokens(table: pa.Table, columns: Sequence[str]) -> OddTokens:
    """Finds tokens of a vocabulary that are likely no values.

    Args:
        table: The vocabulary's table.
        columns: The columns that its tokens come from.
    """
    tokens = live_tokens(table)["token"]
    if not pa.types.is_string(tokens.type):
        return OddTokens(0, None, ())
    quoted = tokens.filter(pc.match_substring_regex(tokens, '^".*"$'))
    stems = {name.lower().removesuffix("id").removesuffix("_") or name.lower() for name in columns}
    names = pa.array([stem + end for stem in stems for end in ("", "_id", "id")], tokens.type)
    plain = pc.utf8_lower(pc.utf8_trim(tokens, '"'))
    headers = tokens.filter(pc.is_in(plain, value_set=names)).to_pylist()
    return OddTokens(len(quoted), quoted[0].as_py() if len(quoted) else None, tuple(headers))


def first_token_id(table: pa.Table) -> int:
    """Returns the id of a vocabulary's first token; the usual one where it holds none."""
    return table["id"][0].as_py() if len(table) else FIRST_TOKEN_ID


def write_vocabulary(
    table: pa.Table,
    path: str | os.PathLike[str],
    oov_buckets: int | None = None,
    parent: VocabularySpec | None = None,
) -> VocabularySpec:
    """Writes a vocabulary; the same vocabulary gives the same bytes.

    Args:
        table: As from `fit_vocabularies`.
        path: `<name>.parquet`; replaced as a whole, or left as it was where writing fails.
        oov_buckets: Buckets of unknown tokens, between OOV and the first token; None for none.
        parent: What it grew out of, or None.

    Returns:
        What the plan says of the file, `file` being its bare name.

    Raises:
        ConfigError: The name is not a plain file name.
        InputDataError: The table is no vocabulary.
    """
    path = Path(path)
    if path.suffix != _SUFFIX or not ENTRY_NAME_PATTERN.fullmatch(path.stem):
        raise ConfigError(
            "a vocabulary's name must be a plain name",
            received=path.name,
            allowed="letters, digits, '_', '-', '.', first a letter or digit; then .parquet",
        )
    first_id = FIRST_TOKEN_ID + (oov_buckets or 0)
    token_dtype = _check_table(table, str(path), first_id)
    incremental = RETIRED_COLUMN in table.schema.names
    data = to_parquet(table, vocabulary_schema(token_dtype, incremental))
    write_bytes_atomic(path, memoryview(data))
    return VocabularySpec(
        name=path.stem,
        token_dtype=token_dtype,
        file=path.name,
        size=first_id + len(table),
        file_crc32c=checksum(data),
        oov_buckets=oov_buckets,
        incremental=incremental,
        version=1 if parent is None else parent.version + 1,
        parent_crc32c=None if parent is None else parent.file_crc32c,
    )


def to_parquet(table: pa.Table, schema: pa.Schema) -> pa.Buffer:
    """Returns the bytes of a Parquet file; the same rows give the same bytes."""
    # Chunks and foreign metadata would show in the bytes; distinct tokens gain no dictionary.
    plain = pa.Table.from_arrays(table.combine_chunks().columns, schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(plain, sink, compression="zstd", use_dictionary=False, store_schema=False)
    return sink.getvalue()


def checksum(data: pa.Buffer | bytes) -> str:
    """Returns the CRC32C of a file's bytes, 8 hex digits."""
    return f"{crc32c(memoryview(data)):08x}"


def load_vocabulary(directory: ReadablePath, spec: VocabularySpec) -> pa.Table:
    """Reads a vocabulary that a plan names, and checks it against what the plan says.

    Args:
        directory: Where `encoders.json` lies.
        spec: The plan's entry.

    Raises:
        InputDataError: The file lies elsewhere, cannot be read, or is not the one that the plan
            was written for.
    """
    return EncoderFiles(directory, crc32c).read_vocabulary(spec)


def _check_table(table: pa.Table, origin: str, first_id: int) -> TokenDType:
    """Returns the token type of a sound vocabulary table."""
    incremental = RETIRED_COLUMN in table.schema.names
    token_dtype: TokenDType
    for token_dtype in TOKEN_TYPES:
        expected = vocabulary_schema(token_dtype, incremental)
        if table.schema.names == expected.names and table.schema.types == expected.types:
            break
    else:
        raise InputDataError(
            f"{origin} is not a vocabulary",
            received=", ".join(f"{field.name}: {field.type}" for field in table.schema),
            allowed="token: int64 or string, id: int64, count: int64 (and last_seen: date32, "
            "is_retired: bool)",
            fix=_REBUILD,
        )
    expected_ids = np.arange(first_id, first_id + len(table))
    whole = [table[field.name] for field in expected if not field.nullable]
    if any(column.null_count for column in whole) or not np.array_equal(
        table["id"].to_numpy(), expected_ids
    ):
        raise InputDataError(
            f"{origin} is not a vocabulary: its ids do not rise from {first_id} without gaps",
            fix=_REBUILD,
        )
    return token_dtype
