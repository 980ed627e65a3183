"""The schema of imported records, whether they hold what it says, and the vocabularies of ids.

Where ids move, they are a vocabulary whose tokens are the ids of the files: what shows or takes raw
values, such as an exported model, speaks of those.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.artefacts.entries import ENTRY_NAME_PATTERN
from conf.artefacts.train_counts import IdCounter
from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    IDENTITY,
    ColumnEncoding,
    EncoderPlan,
    VocabularySpec,
)
from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, FeatureSpec
from conf.storage.atomic_output import write_text_atomic
from etl.encoders.vocabulary import write_vocabulary
from etl.imported.mapping import MappedFeature, RecordMapping

MOST_IDS = 100_000_000
"""Ids of a table whose number nobody declared: 25 GB of rows of 64 numbers."""
SPARSE_IDS = 1_000_000
"""A table of more ids than this, few of which occur, is worth a warning."""
SPARSE_SHARE = 0.01
_ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}
"""Splits whose records hold one side alone."""
_log = logging.getLogger("sluice.import")
Statistics = Sequence[Mapping[str, Any]]  # Of a feature, of each split that holds it.


def build_schema(
    mapping: RecordMapping, statistics: Mapping[str, Mapping[str, Any]]
) -> FeatureSchema:
    """Completes the schema by the statistics of the records, which it holds against the config."""
    found = {
        feature.name: [
            by_feature[feature.name]
            for split, by_feature in statistics.items()
            if _ROLE_OF_SPLIT.get(split, feature.config.role) == feature.config.role
        ]
        for feature in mapping.features
    }
    sizes: dict[str, int] = {}  # Of the tables that features share.
    for feature in mapping.features:
        _check_present(feature, found[feature.name])
        if feature.are_ids:
            size, table = _count_ids(feature, found[feature.name]), feature.spec.table
            _warn_of_sparse_ids(feature.name, size, found[feature.name])
            sizes[table] = max(sizes.get(table, 0), size)
    _refuse_special_ids(mapping, found)
    specs = (
        replace(f.spec, vocabulary_size=sizes[f.spec.table]) if f.are_ids else f.spec
        for f in mapping.features
    )
    return FeatureSchema(tuple(specs))


def _check_present(feature: MappedFeature, found: Statistics) -> None:
    """Refuses what training would stop at: absent values, and lists of another length."""
    spec, length = feature.spec, feature.config.length
    rows, missing = (sum(one[key] for one in found) for key in ("rows", "missing"))
    is_optional = feature.config.pad_value is not None or feature.is_embedded
    is_required = not is_optional and (length is not None or not spec.is_list)
    if missing == rows or (missing and is_required):
        raise InputDataError(
            f"no record holds feature {spec.name!r}"
            if missing == rows
            else f"records lack feature {spec.name!r}",
            received=f"{missing:,} of {rows:,} records without it",
            fix="correct its name, or give it a pad_value, which stands for an absent value",
        )
    lengths = {one["length"][key] for one in found for key in ("min", "max") if length} - {None}
    if not lengths <= ({length, 0} if is_optional else {length}):
        raise InputDataError(
            f"lists of feature {spec.name!r} are not of the declared length",
            received=f"{min(lengths)} to {max(lengths)} values",
            fix="correct its length, or declare max_len for lists of any length",
        )


def _count_ids(feature: MappedFeature, found: Statistics) -> int:
    """Number of a feature's ids, 0 for padding and 1 for absent values included."""
    offset, declared = feature.offset, feature.config.vocabulary_size
    lowest = min((one["min"] for one in found if one["min"] is not None), default=0)
    highest = max((one["max"] for one in found if one["max"] is not None), default=0)
    size = int(max(highest + 1 if declared is None else declared + offset, FIRST_TOKEN_ID))
    # A vocabulary has a row in a file for each id, whatever is declared.
    most = size if declared is not None and not offset else MOST_IDS
    if lowest < 0 or highest >= size or size > most:
        raise InputDataError(
            f"feature {feature.name!r} holds ids outside its table",
            received=int(lowest) if lowest < 0 else max(int(highest), size - 1) - offset,
            allowed=f"{FIRST_TOKEN_ID - offset if offset else 0} to {min(size, most) - offset - 1}"
            + (f"; {feature.pad} stands for none" if offset else ""),
            fix="raise vocabulary_size, or leave it out to take the highest id; set `offset: 2` "
            "where ids start at 0 and -1 is none, `ids: false` for numbers, `ids: keys` for hashes "
            f"(train with model.embeddings.{feature.spec.table}.kind=dynamic)",
        )
    return size


def _warn_of_sparse_ids(name: str, size: int, found: Statistics) -> None:
    """Warns where hardly any row of a table would ever be learned."""
    distinct = max((one["distinct"]["count"] for one in found), default=0)
    if size > SPARSE_IDS and distinct < SPARSE_SHARE * size:
        _log.warning(
            "feature %s: about %s of %s ids occur, and a table has a row for each; `ids: keys` and "
            "a dynamic table has rows for those that occur",
            name, f"{distinct:,.0f}", f"{size:,}",
        )  # fmt: skip


def _refuse_special_ids(mapping: RecordMapping, found: Mapping[str, Statistics]) -> None:
    """Refuses ids that would be read as padding or as an absent value; names all features."""
    declared = {f.spec.table for f in mapping.features if f.config.offset is not None}
    held: dict[str, str] = {}
    for feature in mapping.features:
        if feature.is_embedded and feature.spec.table not in declared:
            counts = {
                id_: sum(one[key] for one in found[feature.name])
                for id_, key in ((0, "zeros"), (1, "oov"))
                if id_ or not feature.spec.is_list  # In a list, 0 may well be padding.
            }
            shown = [f"{id_} ({count:,} times)" for id_, count in counts.items() if count]
            rows = sum(one["rows"] for one in found[feature.name])
            held |= {feature.name: f"{' and '.join(shown)}, in {rows:,} records"} if shown else {}
    if held:
        raise InputDataError(
            f"features {', '.join(map(repr, held))} hold what Sluice reads as padding (0) or as an "
            "absent value (1)",
            received="; ".join(f"{name}: {text}" for name, text in held.items()),
            allowed="ids or keys from 2",
            fix="set `offset`: 2 where ids start at 0, 1 where they start at 1 and 0 is none, 0 "
            "where 0 and 1 are none already; or `ids: false` if the values are numbers",
        )


def write_encoders(
    staging: Path, mapping: RecordMapping, schema: FeatureSchema, tokens: Mapping[str, IdCounter]
) -> EncoderPlan:
    """Writes how features come from the files' values: as they are, or by vocabularies."""
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    written: dict[str, VocabularySpec] = {}
    specs: list[FeatureSpec] = []
    for feature, spec in zip(mapping.features, schema.features, strict=True):
        table = spec.table
        if feature.offset and table not in written:
            is_plain = ENTRY_NAME_PATTERN.fullmatch(table) and table != IDENTITY
            path = directory / f"{table if is_plain else f'ids_{len(written)}'}.parquet"
            vocabulary = _build_vocabulary(feature, spec.vocabulary_size or 0, tokens[table])
            written[table] = replace(write_vocabulary(vocabulary, path), pad_token=feature.pad)
        specs += [replace(spec, encoding=written[table].name) if feature.offset else spec]
    plan = EncoderPlan(
        FeatureSchema(tuple(specs)),
        tuple(ColumnEncoding(spec.name, spec.name, spec.dtype, spec.encoding) for spec in specs),
        vocabularies=tuple(written.values()),
    )
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    return plan


def _build_vocabulary(feature: MappedFeature, size: int, held: IdCounter) -> pa.Table:
    ids, counts = np.arange(size), np.zeros(size, np.int64)
    found = held.result()
    counts[found.ids] = found.rows
    columns = {"token": ids - feature.offset, "id": ids, "count": counts}
    return pa.table(columns).slice(FIRST_TOKEN_ID)
