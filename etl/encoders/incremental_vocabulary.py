"""Incremental vocabularies: from version to version append, retire, revive; never renumber."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.encoder_files import RETIRED_COLUMN
from conf.encoders import TokenDType
from conf.errors import ConfigError
from etl.encoders.vocabulary import (
    LAST_SEEN_COLUMN,
    order_tokens,
    vocabulary_schema,
)

_SAMPLE = 20  # tokens that a report names of each kind


@dataclass(frozen=True)
class IncrementalFit:
    """How an incremental vocabulary extends the previous version's.

    Attributes:
        previous: The previous version's table; None for the first version.
        time_column_ms: Column of the train split with the time of each row, milliseconds since
            the epoch; None where there is no time.
        expire_after_days: A token is retired once it was last seen longer ago than this before
            the last day of the train split; None: tokens stay for ever.
        last_day: That day, whether or not it has a token; None: it is not known yet, or there is
            no time.
    """

    previous: pa.Table | None = None
    time_column_ms: str | None = None
    expire_after_days: int | None = None
    last_day: datetime.date | None = None

    def __post_init__(self) -> None:
        """Refuses to let tokens expire where nothing says when they were seen.

        Raises:
            ConfigError: There is no time column.
        """
        if self.expire_after_days is not None and self.time_column_ms is None:
            raise ConfigError(
                "tokens cannot expire: the log has no time column",
                received=f"expire_after_days: {self.expire_after_days}, events.time: null",
                fix="declare events.time, or leave `expire_after_days` out",
            )

    @property
    def oldest_day(self) -> datetime.date | None:
        """The day since which a token must have been seen; None: it need not."""
        if self.expire_after_days is None or self.last_day is None:
            return None
        return self.last_day - datetime.timedelta(days=self.expire_after_days)

    def known_tokens(self, token_dtype: TokenDType, first_id: int) -> pa.Table:
        """Returns the previous version's tokens with all columns of an incremental vocabulary.

        Raises:
            ConfigError: They are of another type, or their ids start elsewhere.
        """
        schema = vocabulary_schema(token_dtype, incremental=True)
        if self.previous is None:
            return schema.empty_table()
        table = self.previous
        received = (
            table.schema.field("token").type,
            table["id"][0].as_py() if len(table) else None,
        )
        if received[0] != schema.field("token").type or received[1] not in (first_id, None):
            raise ConfigError(
                "the vocabulary cannot grow out of the previous version's",
                received=f"tokens {received[0]}, first id {received[1]}",
                allowed=f"tokens {schema.field('token').type}, first id {first_id}",
                fix="keep the column's type and `oov_buckets`, or set `incremental: false` once",
            )
        if RETIRED_COLUMN not in table.schema.names:
            rows = len(table)
            table = table.append_column(LAST_SEEN_COLUMN, pa.nulls(rows, pa.date32()))
            table = table.append_column(RETIRED_COLUMN, pa.array(np.zeros(rows, np.bool_)))
        return table.cast(schema)


def extend_vocabulary(
    found: pa.Table, known: pa.Table, fit: IncrementalFit, max_size: int | None, first_id: int
) -> pa.Table:
    """Appends new tokens to the known ones, and retires or revives those.

    Args:
        found: Tokens of the train split: `token`, `count`, `last_seen`, `is_known`.
        known: The previous version's tokens (`IncrementalFit.known_tokens`).
        fit: When tokens expire.
        max_size: Most tokens that are not retired; known ones go first. None: no bound.
        first_id: Id of the first token.

    Returns:
        The vocabulary's table: the known tokens with their ids, then the new ones by falling
        count, ties by token.
    """
    schema = known.schema
    token_type = schema.field("token").type
    found = found.set_column(0, "token", found["token"].cast(token_type)).combine_chunks()
    old = _update_known(found, known, fit)
    new = order_tokens(found.filter(pc.invert(found["is_known"])))
    new = new.filter(pc.invert(_expired(new[LAST_SEEN_COLUMN], fit)))
    if max_size is not None:
        live = len(old) - (pc.sum(old[RETIRED_COLUMN]).as_py() or 0)
        new = new.slice(0, max(0, max_size - live))
    return _append(old, new, first_id, schema)


def _update_known(found: pa.Table, known: pa.Table, fit: IncrementalFit) -> pa.Table:
    rows = pc.index_in(known["token"], value_set=found["token"])
    counts = pc.fill_null(found["count"].take(rows), 0)
    seen = found[LAST_SEEN_COLUMN].take(rows)
    # A token whose last day is not known ages from the first incremental version.
    before = pc.fill_null(known[LAST_SEEN_COLUMN], pa.scalar(fit.last_day, pa.date32()))
    last_seen = pc.max_element_wise(seen, before)
    retired = _expired(last_seen, fit)
    counts = pc.if_else(retired, 0, counts)
    return pa.Table.from_arrays(
        [known["token"], known["id"], counts, last_seen, retired], names=known.schema.names
    )


def _expired(last_seen: pa.ChunkedArray, fit: IncrementalFit) -> pa.ChunkedArray:
    oldest = pa.scalar(fit.oldest_day, pa.date32())
    return pc.fill_null(pc.less(last_seen, oldest), False)


def _append(old: pa.Table, new: pa.Table, first_id: int, schema: pa.Schema) -> pa.Table:
    start = first_id + len(old)
    added = pa.Table.from_arrays(
        [
            new["token"],
            pa.array(np.arange(start, start + len(new), dtype=np.int64)),
            new["count"],
            new[LAST_SEEN_COLUMN],
            pa.array(np.zeros(len(new), np.bool_)),
        ],
        names=schema.names,
    )
    return pa.concat_tables([old.cast(schema), added.cast(schema)]).combine_chunks()


@dataclass(frozen=True)
class VocabularyDiff:
    """What changed between two versions of a vocabulary.

    Attributes:
        name: The vocabulary.
        version: Version of the later one.
        parent_crc32c: Checksum of the earlier one, or None where there is none.
        kept: Tokens that both know.
        added: Tokens that only the later one has an id for.
        retired: Tokens that the later one no longer knows; their ids stay theirs.
        revived: Tokens that the earlier one had retired and the later one knows again.
        examples: The first tokens of `added`, `retired` and `revived`, as text.
    """

    name: str
    version: int
    parent_crc32c: str | None
    kept: int
    added: int
    retired: int
    revived: int
    examples: dict[str, list[str]]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return asdict(self)


def diff_vocabularies(
    name: str, previous: pa.Table | None, current: pa.Table, version: int, parent: str | None
) -> VocabularyDiff:
    """Compares two versions of an incremental vocabulary.

    Args:
        name: The vocabulary.
        previous: The previous version's table, or None.
        current: The later table.
        version: Its version.
        parent: Checksum of the earlier file.
    """
    size = 0 if previous is None else len(previous)
    retired = current[RETIRED_COLUMN].to_numpy()
    was_retired = np.zeros(len(current), np.bool_)
    if previous is not None and RETIRED_COLUMN in previous.schema.names:
        was_retired[:size] = previous[RETIRED_COLUMN].to_numpy()
    is_old = np.arange(len(current)) < size
    masks = {
        "added": ~is_old,
        "retired": is_old & retired & ~was_retired,
        "revived": is_old & ~retired & was_retired,
    }
    return VocabularyDiff(
        name=name,
        version=version,
        parent_crc32c=parent,
        kept=int((is_old & ~retired & ~was_retired).sum()),
        **{kind: int(mask.sum()) for kind, mask in masks.items()},
        examples={kind: _name_some(current["token"], mask) for kind, mask in masks.items()},
    )


def _name_some(tokens: pa.ChunkedArray, mask: np.ndarray) -> list[str]:
    rows = np.flatnonzero(mask)[:_SAMPLE]
    return [str(token) for token in tokens.take(pa.array(rows)).to_pylist()]
