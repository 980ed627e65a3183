"""Which row of an earlier embedding table is which row of a new one: the same token's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders import ColumnEncoding, EncoderPlan
from conf.manifest import Manifest
from conf.place import Place
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from training.vocabularies import Vocabulary, read_plan, read_vocabulary

NO_ROW = -1


@dataclass(frozen=True)
class EncodedVersion:
    """A dataset version and the encoders that gave its ids.

    Attributes:
        version_dir: Its directory.
        manifest: Its manifest.
        plan: Its encoders.
    """

    version_dir: Place
    manifest: Manifest
    plan: EncoderPlan


def read_encoded_version(version_dir: Place, manifest: Manifest) -> EncodedVersion:
    """Reads the encoders of a version.

    Raises:
        InputDataError: They are missing or damaged.
    """
    return EncodedVersion(version_dir, manifest, read_plan(version_dir, manifest))


def match_rows(table: str, new: EncodedVersion, old: EncodedVersion) -> np.ndarray | None:
    """Finds the row that each id of a table had in an earlier dataset version.

    Ids of a vocabulary are matched by token; padding and OOV keep their rows, OOV buckets where
    there are equally many. Ids that are computed, as by hashing, keep their rows where both
    versions compute them alike.

    Args:
        table: Name of the features' table.
        new: The version to train on.
        old: The version that the earlier table was trained on.

    Returns:
        int64 `[vocabulary_size]`: rows of the earlier table, -1 where there is none. None where
        the ids of the two versions have nothing to do with each other.

    Raises:
        InputDataError: A vocabulary is damaged.
    """
    found, before = _find_encoding(table, new), _find_encoding(table, old)
    if found is None or before is None:
        return None
    (spec, column), (old_spec, old_column) = found, before
    vocabulary = _read_tokens(new, spec, column)
    old_vocabulary = _read_tokens(old, old_spec, old_column)
    if vocabulary is not None and old_vocabulary is not None:
        return match_tokens(vocabulary, old_vocabulary)
    size = spec.vocabulary_size
    computed = vocabulary is None and old_vocabulary is None
    alike = column.operation == old_column.operation and size == old_spec.vocabulary_size
    return np.arange(size) if computed and alike and size is not None else None


def match_keys(
    feature: str, keys: np.ndarray, new: EncodedVersion, old: EncodedVersion
) -> np.ndarray | None:
    """Finds the key that each key of an earlier dynamic table has in a new dataset version.

    Keys that are computed, as by hashing, are the same; ids of a vocabulary are matched by token.

    Args:
        feature: A feature of the table.
        keys: int64 `[n]`, keys of the earlier table.
        new: The version to train on.
        old: The version that the earlier table was trained on.

    Returns:
        int64 `[n]`, -1 where the new vocabulary does not have the token. None where the keys of
        the two versions have nothing to do with each other.

    Raises:
        InputDataError: A vocabulary is damaged.
    """
    try:
        column, old_column = new.plan.column(feature), old.plan.column(feature)
    except KeyError:
        return None
    vocabulary = _read_tokens(new, new.manifest.schema[feature], column)
    old_vocabulary = _read_tokens(old, old.manifest.schema[feature], old_column)
    if vocabulary is None and old_vocabulary is None:
        return keys if column.operation == old_column.operation else None
    if vocabulary is None or old_vocabulary is None:
        return None
    rows = match_tokens(vocabulary, old_vocabulary)
    new_ids = np.full(old_vocabulary.size, NO_ROW, np.int64)
    new_ids[rows[rows != NO_ROW]] = np.flatnonzero(rows != NO_ROW)
    known = (keys > PAD_ID) & (keys < old_vocabulary.size)
    return np.where(known, new_ids[np.where(known, keys, PAD_ID)], NO_ROW)


def match_tokens(new: Vocabulary, old: Vocabulary) -> np.ndarray:
    """Returns the earlier id of each id, int64 `[new.size]`, -1 where the token is new."""
    rows = np.full(new.size, NO_ROW, np.int64)
    rows[[PAD_ID, OOV_ID]] = PAD_ID, OOV_ID
    if new.oov_buckets == old.oov_buckets:
        rows[: new.first_id] = np.arange(new.first_id)
    tokens, old_tokens = new.tokens, old.tokens
    if tokens.type != old_tokens.type:  # The raw column's declared type has changed.
        tokens, old_tokens = tokens.cast(pa.string()), old_tokens.cast(pa.string())
    positions = pc.index_in(tokens, value_set=old_tokens).fill_null(NO_ROW).to_numpy()
    rows[new.first_id :] = np.where(positions < 0, NO_ROW, positions + old.first_id)
    return rows


def _find_encoding(
    table: str, version: EncodedVersion
) -> tuple[FeatureSpec, ColumnEncoding] | None:
    """Returns the first feature that a table is of, and how its ids were made."""
    for spec in version.manifest.schema.features:
        if spec.table == table and spec.vocabulary_size is not None:
            try:
                return spec, version.plan.column(spec.name)
            except KeyError:
                continue
    return None


def _read_tokens(
    version: EncodedVersion, spec: FeatureSpec, column: ColumnEncoding
) -> Vocabulary | None:
    """Reads the vocabulary whose ids a feature's values are, or returns None."""
    if column.vocabulary is None:
        return None
    vocabulary = version.plan.vocabulary(column.vocabulary)
    if vocabulary.size != spec.vocabulary_size:
        return None
    return read_vocabulary(version.version_dir, vocabulary)
