"""Vocabularies: the ids of tokens, how they grow, their files, and those of their statistics.

Ids follow falling counts, ties by token. A vocabulary that grows keeps its ids: tokens are
appended, retired and revived, never renumbered. A file is Parquet, a row per token by rising id.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from conf.encoders import TableSpec, TokenDType, VocabularySpec
from conf.errors import ConfigError, InputDataError
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import open_parquet, read_parquet
from etl.tfrecord.codec.crc32c import crc32c, describe_file

LAST_SEEN_COLUMN = "last_seen"
SPARK_TYPES: dict[TokenDType, str] = {"int64": "bigint", "string": "string"}
"""How Spark calls the types of tokens."""
_SAMPLE = 20  # tokens that a report names of each kind
_GROUP_ROWS = 1 << 20
_PARQUET: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "store_schema": False}


def vocabulary_schema(token_dtype: TokenDType, incremental: bool = False) -> pa.Schema:
    """Returns the columns of a vocabulary's table; `last_seen` is null where it is not known."""
    fields = [
        pa.field("token", TOKEN_TYPES[token_dtype], nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
    ]
    if incremental:
        fields.append(pa.field(LAST_SEEN_COLUMN, pa.date32()))
        fields.append(pa.field(RETIRED_COLUMN, pa.bool_(), nullable=False))
    return pa.schema(fields)


def _order(counted: pa.Table) -> pa.Table:
    """Sorts tokens by falling `count`, ties by `token`."""
    return counted.sort_by([("count", "descending"), ("token", "ascending")])


def _build(
    tokens: pa.Array, counts: pa.Array, schema: pa.Schema, first_id: int, *more: pa.Array
) -> pa.Table:
    ids = pa.array(np.arange(first_id, first_id + len(tokens)))
    table = pa.Table.from_arrays([tokens, ids, counts, *more], schema.names)
    return table.cast(schema).combine_chunks()


def assign_ids(
    counted: pa.Table, token_dtype: TokenDType, first_id: int = FIRST_TOKEN_ID
) -> pa.Table:
    """Returns the vocabulary's table of tokens with their `count`."""
    ordered = _order(counted)
    return _build(ordered["token"], ordered["count"], vocabulary_schema(token_dtype), first_id)


def number_given(
    tokens: pa.Array, counted: pa.Table, token_dtype: TokenDType, first_id: int
) -> pa.Table:
    """Returns the vocabulary's table of tokens in a given order; those not counted have count 0."""
    counted = counted.combine_chunks()
    rows = pc.index_in(tokens, value_set=counted["token"].cast(tokens.type))
    counts = pc.fill_null(counted["count"].take(rows), 0)
    return _build(tokens, counts, vocabulary_schema(token_dtype), first_id)


@dataclass(frozen=True)
class Growth:
    """How a vocabulary extends that of the version before."""

    known: pa.Table  # the tokens before, with all columns of a vocabulary that grows
    last_day: datetime.date | None = None  # of the train split, whether or not it has a token
    expire_after_days: int | None = None  # of a token that was not seen; None: it stays

    @property
    def oldest_day(self) -> datetime.date | None:
        """The day since which a token must have been seen; None: it need not."""
        if self.expire_after_days is None or self.last_day is None:
            return None
        return self.last_day - datetime.timedelta(days=self.expire_after_days)


def known_tokens(previous: pa.Table | None, token_dtype: TokenDType, first_id: int) -> pa.Table:
    """Returns an earlier version's tokens with all columns of a vocabulary that grows."""
    schema = vocabulary_schema(token_dtype, incremental=True)
    if previous is None:
        return schema.empty_table()
    found_id = previous["id"][0].as_py() if len(previous) else first_id
    received = previous.schema.field("token").type, found_id
    if received != (TOKEN_TYPES[token_dtype], first_id):
        raise ConfigError(
            "the vocabulary cannot grow out of the previous version's",
            received=f"tokens {received[0]}, first id {received[1]}",
            allowed=f"tokens {TOKEN_TYPES[token_dtype]}, first id {first_id}",
            fix="keep the column's type and `oov_buckets`, or set `incremental: false` once",
        )
    if RETIRED_COLUMN not in previous.schema.names:
        rows = len(previous)
        previous = previous.append_column(LAST_SEEN_COLUMN, pa.nulls(rows, pa.date32()))
        previous = previous.append_column(RETIRED_COLUMN, pa.array(np.zeros(rows, np.bool_)))
    return previous.cast(schema)


def extend_vocabulary(
    found: pa.Table, growth: Growth, max_size: int | None, first_id: int
) -> pa.Table:
    """Retires or revives the known tokens, and appends the new ones by falling count."""
    schema = growth.known.schema
    found = found.set_column(0, "token", found["token"].cast(schema.field("token").type))
    found = found.combine_chunks()
    old = _update_known(found, growth)
    is_known = pc.is_in(found["token"], value_set=growth.known["token"].combine_chunks())
    new = _order(found.filter(pc.invert(is_known)))
    if max_size is not None:
        new = new.slice(0, max(0, max_size - len(live_tokens(old))))
    kept = pa.array(np.zeros(len(new), np.bool_))
    first_new = first_id + len(old)
    added = _build(new["token"], new["count"], schema, first_new, new[LAST_SEEN_COLUMN], kept)
    return pa.concat_tables([old.cast(schema), added]).combine_chunks()


def _update_known(found: pa.Table, growth: Growth) -> pa.Table:
    known = growth.known
    rows = pc.index_in(known["token"], value_set=found["token"])
    # A token whose last day is not known ages from the first incremental version.
    before = pc.fill_null(known[LAST_SEEN_COLUMN], pa.scalar(growth.last_day, pa.date32()))
    last_seen = pc.max_element_wise(found[LAST_SEEN_COLUMN].take(rows), before)
    oldest = pa.scalar(growth.oldest_day, pa.date32())
    retired = pc.fill_null(pc.less(last_seen, oldest), False)
    counts = pc.if_else(retired, 0, pc.fill_null(found["count"].take(rows), 0))
    columns = [known["token"], known["id"], counts, last_seen, retired]
    return pa.Table.from_arrays(columns, known.schema.names)


def describe_changes(spec: VocabularySpec, known: pa.Table, current: pa.Table) -> dict[str, Any]:
    """Says what changed between two versions of a vocabulary that grows, as JSON.

    It counts tokens: `kept` are known to both, only the later one has an id for `added`, and no
    longer knows `retired`, whose ids stay theirs; it knows `revived` again. Some are named.
    """
    is_old = np.arange(len(current)) < len(known)
    retired, was_retired = current[RETIRED_COLUMN].to_numpy(), np.zeros(len(current), np.bool_)
    was_retired[is_old] = known[RETIRED_COLUMN].to_numpy()
    masks = {
        "added": ~is_old,
        "retired": retired & is_old & ~was_retired,
        "revived": was_retired & ~retired,
    }
    examples = {
        kind: current["token"].take(np.flatnonzero(mask)[:_SAMPLE]).to_pylist()
        for kind, mask in masks.items()
    }
    return {
        "name": spec.name,
        "version": spec.version,
        "parent_crc32c": spec.parent_crc32c,
        "kept": int((is_old & ~retired & ~was_retired).sum()),
        **{kind: int(mask.sum()) for kind, mask in masks.items()},
        "examples": {kind: list(map(str, tokens)) for kind, tokens in examples.items()},
    }


def read_token_file(path: Path, token_dtype: TokenDType) -> pa.Array:
    """Reads tokens in the order of a file: text, one on each line, or Parquet's `token`."""
    try:
        tokens = _parse_tokens(path).cast(TOKEN_TYPES[token_dtype])
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError, KeyError) as error:
        raise InputDataError(
            f"cannot read {token_dtype} tokens from the file of `path`, {path}", received=str(error)
        ) from error
    empty = tokens.null_count + (pc.sum(pc.equal(tokens.cast("string"), "")).as_py() or 0)
    distinct = len(pc.unique(tokens))
    if not len(tokens) or empty or distinct < len(tokens):
        raise InputDataError(
            f"the file of `path`, {path}, is no list of tokens",
            received=f"{len(tokens):,} tokens, {distinct:,} of them distinct, {empty:,} empty",
            allowed="one token or more, each once, none of them empty",
        )
    return tokens


def _parse_tokens(path: Path) -> pa.Array:
    data = path.read_bytes()
    if path.suffix == ".parquet":
        return parse_parquet(data, str(path))["token"].combine_chunks()
    # Ends of lines first, or the last token of a file of Windows would keep its `\r`.
    text = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    return pa.array(text.split("\n"))


def live_tokens(table: pa.Table) -> pa.Table:
    """Returns the tokens of a vocabulary that are not retired: columns `token` and `id`."""
    if RETIRED_COLUMN in table.schema.names:
        table = table.filter(pc.invert(table[RETIRED_COLUMN]))
    return table.select(["token", "id"])


@dataclass(frozen=True)
class OddTokens:
    """Tokens that are likely no values, but how a file writes them."""

    quoted: int  # how many are in quotes
    example: str | None  # one of these
    headers: tuple[str, ...]  # that name their column, with or without `id`, as a header does


def find_odd_tokens(tables: Iterable[pa.Table], columns: Sequence[str]) -> OddTokens:
    """Finds such tokens in the vocabulary of some columns, which comes a part at a time."""
    stems = {name.lower().removesuffix("id").removesuffix("_") or name.lower() for name in columns}
    names = pa.array([stem + end for stem in stems for end in ("", "_id", "id")], pa.string())
    quotes, example, headers = 0, None, []
    for table in tables:
        tokens = live_tokens(table)["token"]
        if not pa.types.is_string(tokens.type):
            break
        quoted = tokens.filter(pc.match_substring_regex(tokens, '^".*"$'))
        example = quoted[0].as_py() if len(quoted) and not quotes else example
        quotes += len(quoted)
        plain = pc.utf8_lower(pc.utf8_trim(tokens, '"'))
        headers += tokens.filter(pc.is_in(plain, value_set=names)).to_pylist()
    return OddTokens(quotes, example, tuple(headers))


def write_vocabulary(
    table: pa.Table,
    path: Path,
    oov_buckets: int | None = None,
    parent: VocabularySpec | None = None,
) -> VocabularySpec:
    """Writes a vocabulary, and returns its entry; the same vocabulary gives the same bytes."""
    is_integer = pa.types.is_integer(table.schema.field("token").type)
    incremental = RETIRED_COLUMN in table.schema.names
    schema = vocabulary_schema("int64" if is_integer else "string", incremental)
    spec = _write([table], path, schema, oov_buckets)
    if parent is None:
        return spec
    return replace(spec, version=parent.version + 1, parent_crc32c=parent.file_crc32c)


def write_ordered(
    counted: Iterable[pa.RecordBatch],
    path: Path,
    token_dtype: TokenDType,
    oov_buckets: int | None = None,
) -> VocabularySpec:
    """Writes tokens with their `count` that come in the order of their ids, a part at a time.

    The file is that which `write_vocabulary` makes of all of them.
    """
    schema, first = vocabulary_schema(token_dtype), FIRST_TOKEN_ID + (oov_buckets or 0)
    parts = (
        _build(part["token"], part["count"], schema, first + number * _GROUP_ROWS)
        for number, part in enumerate(_regroup(counted))
    )
    return _write(parts, path, schema, oov_buckets)


def _write(
    parts: Iterable[pa.Table], path: Path, schema: pa.Schema, oov_buckets: int | None
) -> VocabularySpec:
    checksum = _write_parquet(parts, schema, path)
    with open_parquet(path) as file:
        rows = file.metadata.num_rows
    return VocabularySpec(
        name=path.stem,
        token_dtype="int64" if schema.field("token").type == pa.int64() else "string",
        file=path.name,
        size=FIRST_TOKEN_ID + (oov_buckets or 0) + rows,
        file_crc32c=checksum,
        oov_buckets=oov_buckets,
        incremental=RETIRED_COLUMN in schema.names,
    )


def _write_parquet(parts: Iterable[pa.Table], schema: pa.Schema, path: Path) -> str:
    """Writes tables to one file, and returns its checksum; the same rows give the same bytes."""
    with atomic_file(path) as file, pq.ParquetWriter(file, schema, **_PARQUET) as writer:
        for part in parts:
            # Chunks and foreign metadata would show in the bytes.
            plain = pa.Table.from_arrays(part.combine_chunks().columns, schema=schema)
            writer.write_table(plain, _GROUP_ROWS)
    return describe_file(path.parent, path).crc32c


def _regroup(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Puts batches together to tables of `_GROUP_ROWS`; the last one has the rest."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held, rows = [*held, batch], rows + len(batch)
        while rows >= _GROUP_ROWS:
            table = pa.Table.from_batches(held)
            yield table.slice(0, _GROUP_ROWS)
            held, rows = table.slice(_GROUP_ROWS).to_batches(), rows - _GROUP_ROWS
    if held:
        yield pa.Table.from_batches(held)


def read_groups(file: Path) -> Iterator[pa.Table]:
    """Reads a vocabulary's file, a part at a time."""
    with open_parquet(file) as opened:
        yield from map(opened.read_row_group, range(opened.num_row_groups))


def measure_tokens(file: Path) -> int:
    """Returns the bytes of all tokens of a vocabulary: 8 each, or 4 and those of the text."""
    with open_parquet(file) as opened:
        groups = map(opened.metadata.row_group, range(opened.num_row_groups))
        return sum(group.column(0).total_uncompressed_size for group in groups)


def count_live(directory: Path, spec: VocabularySpec) -> int:
    """Returns how many tokens of a vocabulary are not retired."""
    if not spec.incremental:
        return spec.size - spec.first_token_id
    retired = read_parquet(directory / spec.file, [RETIRED_COLUMN])[RETIRED_COLUMN]
    return len(retired) - (pc.sum(retired).as_py() or 0)


def load_vocabulary(directory: ReadablePath, spec: VocabularySpec) -> pa.Table:
    """Reads a vocabulary that a plan names, and checks it against what the plan says."""
    return EncoderFiles(directory, crc32c).read_vocabulary(spec)


def write_statistic_table(values: np.ndarray, path: Path) -> TableSpec:
    """Writes floats `[vocabulary_size, 1 + folds]`, of all samples, then by fold."""
    names = ["all", *(f"fold_{fold}" for fold in range(values.shape[1] - 1))]
    schema = pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names])
    columns = [pa.array(column.astype(np.float32)) for column in values.T]
    checksum = _write_parquet([pa.table(columns, schema=schema)], schema, path)
    return TableSpec(path.name.removesuffix(".table.parquet"), path.name, len(values), checksum)


def read_statistic_table(directory: ReadablePath, spec: TableSpec) -> np.ndarray:
    """Reads the statistics that a plan names, float32 `[vocabulary_size, 1 + folds]`."""
    table = EncoderFiles(directory, crc32c).read_table(spec)
    return np.stack([column.to_numpy() for column in table.columns], axis=1)
