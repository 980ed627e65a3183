"""Ids of imported records: what stands for none, how many there may be, and ids that move.

Sluice's ids start at 2: 0 pads, 1 stands for an absent value. Files of one's own often count from 0
or 1. There ids move up by an `offset`, and become a vocabulary whose tokens are the ids of the
files: what shows or takes raw values, such as an exported model, speaks of those.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.entries import ENTRY_NAME_PATTERN
from conf.encoders import IDENTITY, VocabularySpec
from conf.errors import InputDataError
from conf.etl.imported import ImportConfig, ImportedFeatureConfig
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSpec
from etl.encoders.vocabulary import write_vocabulary

MOST_IDS = 100_000_000
"""Ids of a table whose number nobody declared: 25 GB of rows of 64 numbers."""
SPARSE_IDS = 1_000_000
"""A table of more ids than this, few of which occur, is worth a warning."""
SPARSE_SHARE = 0.01
_INT64 = np.iinfo(np.int64)
_log = logging.getLogger("sluice.import")

Statistics = Sequence[Mapping[str, Any]]
"""Statistics of a feature, of each split that holds it."""


def find_pad_token(offset: int) -> int:
    """Returns what stands for none where ids move: the number below the lowest id."""
    return OOV_ID - offset


@dataclass(frozen=True)
class MovedIds:
    """Features whose ids move.

    Attributes:
        offsets: By feature, what is added: 1 or 2.
    """

    offsets: Mapping[str, int]

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns records with their ids moved.

        What stands for none becomes padding in a list, and else an absent value.

        Args:
            batch: A column per feature; those of ids int64, or lists of int64.
        """
        columns = [
            _move(column, self.offsets[name]) if name in self.offsets else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def plan_moved_ids(config: ImportConfig) -> MovedIds:
    """Plans which ids move."""
    return MovedIds({f.name: f.offset for f in config.features if f.offset})


def _move(column: pa.Array, offset: int) -> pa.Array:
    if not pa.types.is_list(column.type):
        return _add(column, offset)
    moved = _add(column.flatten(), offset)
    is_none = pc.equal(moved, OOV_ID).fill_null(False)
    values = pc.if_else(is_none, pa.scalar(PAD_ID, pa.int64()), moved)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    mask = column.is_null() if column.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=column.type, mask=mask)


def _add(values: pa.Array, offset: int) -> pa.Array:
    # A sum beyond 64 bits would be a negative id; there is no table for either.
    highest = pa.scalar(_INT64.max - offset, pa.int64())
    moved = pc.add(pc.min_element_wise(values, highest, skip_nulls=False), offset)
    # What is below none stays negative, to be refused.
    return pc.if_else(pc.less(values, find_pad_token(offset)), values, moved)


class TokenCounts:
    """Counts the ids of each moved table in train records, by one feature of the table.

    That is the one that names users or items, else the first scalar, else the first list.

    Args:
        config: The config.
        lists: Names of the features that are lists.
    """

    def __init__(self, config: ImportConfig, lists: Sequence[str]) -> None:
        named = (config.keys.user, config.keys.item)
        self._feature: dict[str, str] = {}
        moved = [feature for feature in config.features if feature.offset]
        for feature in sorted(moved, key=lambda f: (f.name not in named, f.name in lists)):
            self._feature.setdefault(feature.table_name, feature.name)
        self._counts = {table: np.zeros(FIRST_TOKEN_ID, np.int64) for table in self._feature}

    def update(self, batch: pa.RecordBatch) -> None:
        """Adds train records whose ids have moved; ids that no table has are left out."""
        for table, name in self._feature.items():
            column = batch.column(name)
            values = column.flatten() if pa.types.is_list(column.type) else column
            ids = values.drop_null().to_numpy()
            rows_of_ids = np.bincount(ids[(ids >= 0) & (ids <= MOST_IDS)], minlength=0)
            counts = self._counts[table]
            if len(rows_of_ids) > len(counts):
                grown = np.zeros(max(len(rows_of_ids), len(counts) * 3 // 2), np.int64)
                grown[: len(counts)] = counts
                self._counts[table] = counts = grown
            counts[: len(rows_of_ids)] += rows_of_ids

    def read(self, table: str, size: int) -> np.ndarray:
        """Returns the counts of a table's ids, int64 `[size]`."""
        counts = np.zeros(size, np.int64)
        rows_of_ids = self._counts[table][:size]
        counts[: len(rows_of_ids)] = rows_of_ids
        return counts


def write_vocabularies(
    directory: Path, config: ImportConfig, specs: Sequence[FeatureSpec], counts: TokenCounts
) -> dict[str, VocabularySpec]:
    """Writes the vocabulary of each table whose ids have moved.

    Args:
        directory: Where `encoders.json` lies.
        config: The config.
        specs: The features, with the sizes of their tables.
        counts: How often ids occur in the train split.

    Returns:
        By table, what the plan says of its vocabulary.
    """
    sizes = {spec.table: spec.vocabulary_size for spec in specs}
    written: dict[str, VocabularySpec] = {}
    for feature in config.features:
        table, offset = feature.table_name, feature.offset
        if not offset or table in written:
            continue
        size = int(sizes[table] or 0)
        ids = np.arange(FIRST_TOKEN_ID, size, dtype=np.int64)
        columns = {"token": ids - offset, "id": ids, "count": counts.read(table, size)[ids]}
        path = directory / f"{_name_file(table, len(written))}.parquet"
        spec = write_vocabulary(pa.table(columns), path)
        written[table] = replace(spec, pad_token=find_pad_token(offset))
    return written


def _name_file(table: str, number: int) -> str:
    is_plain = ENTRY_NAME_PATTERN.fullmatch(table) and table != IDENTITY
    return table if is_plain else f"ids_{number}"


def count_ids(config: ImportedFeatureConfig, found: Statistics) -> int:
    """Returns the number of a feature's ids, 0 for padding and 1 for absent values included.

    Args:
        config: The feature.
        found: Its statistics; ids have moved.

    Raises:
        InputDataError: Ids are negative, beyond the declared vocabulary, or too many.
    """
    offset = config.offset or 0
    lowest = min((one["min"] for one in found if one["min"] is not None), default=0)
    highest = max((one["max"] for one in found if one["max"] is not None), default=0)
    if lowest < 0:
        none = f"; {find_pad_token(offset)} stands for none" if offset else ""
        raise InputDataError(
            f"feature {config.name!r} holds negative ids",
            received=int(lowest),
            allowed=f"{FIRST_TOKEN_ID - offset if offset else 0} and above{none}",
            fix="declare `ids: false` if its values are numbers, `ids: keys` if they are hashes; "
            "where ids start at 0 and -1 is none, `offset: 2`",
        )
    declared = config.vocabulary_size
    if declared is not None and highest - offset >= declared:
        raise InputDataError(
            f"feature {config.name!r} holds ids beyond its vocabulary",
            received=int(highest) - offset,
            allowed=f"0 to {declared - 1}",
            fix="raise vocabulary_size, or leave it out to take the highest id",
        )
    size = max((highest + 1) if declared is None else declared + offset, FIRST_TOKEN_ID)
    if size > MOST_IDS and (declared is None or offset):
        _refuse_many(config, int(size))
    return int(size)


def _refuse_many(config: ImportedFeatureConfig, size: int) -> None:
    declare = "" if config.offset else ", or `vocabulary_size` if the ids are that many"
    raise InputDataError(
        f"feature {config.name!r} would have {size:,} ids, each of them a row of a table",
        received=f"highest id {size - 1 - (config.offset or 0)}",
        allowed=f"{MOST_IDS:,} ids",
        fix="declare `ids: keys` for hashes and other keys of 64 bits, and train with "
        f"model.embeddings.{config.table_name}.kind=dynamic{declare}",
    )


def describe_special_ids(found: Statistics, *, is_list: bool) -> str | None:
    """Returns how often a feature holds what would be padding or an absent value, or None.

    In a list, 0 may well be padding.

    Args:
        found: Statistics of the feature.
        is_list: Whether it is a list.
    """
    zeros, ones = (sum(one[key] for one in found) for key in ("zeros", "oov"))
    counts = {0: 0 if is_list else zeros, 1: ones}
    held = [f"{value} ({count:,} times)" for value, count in counts.items() if count]
    if not held:
        return None
    return f"{' and '.join(held)}, in {sum(one['rows'] for one in found):,} records"


def refuse_special_ids(held: Mapping[str, str], keys: Collection[str]) -> None:
    """Refuses ids that would be read as padding or as an absent value.

    Args:
        held: By feature of which nothing says what 0 and 1 are, what it holds of them.
        keys: Those of the features that are 64-bit keys.

    Raises:
        InputDataError: There are such features; names all of them.
    """
    if not held:
        return
    names = ", ".join(map(repr, held))
    who = f"feature {names} holds" if len(held) == 1 else f"features {names} hold"
    fix = "set `offset`: 2 where ids start at 0, 1 where they start at 1 and 0 is none, 0 where 0 "
    fix += "and 1 are none already; or `ids: false` if the values are numbers"
    allowed = "ids from 2"
    if set(held) <= set(keys):
        fix = "set `offset: 0` if they stand for none, or write other keys in their place"
        allowed = "keys other than 0 and 1"
    shown = [text if len(held) == 1 else f"{name}: {text}" for name, text in held.items()]
    raise InputDataError(
        f"{who} what Sluice reads as padding (0) or as an absent value (1)",
        received="; ".join(shown),
        allowed=allowed,
        fix=fix,
    )


def warn_of_sparse_ids(spec: FeatureSpec, found: Statistics) -> None:
    """Warns where hardly any row of a table would ever be learned."""
    size = spec.vocabulary_size or 0
    distinct = max((one["distinct"]["count"] for one in found), default=0)
    if size > SPARSE_IDS and distinct < SPARSE_SHARE * size:
        _log.warning(
            "feature %s: about %s of %s ids occur, and a table has a row for each; `ids: keys` and "
            "a dynamic table has rows for those that occur",
            spec.name, f"{distinct:,.0f}", f"{size:,}",
        )  # fmt: skip
