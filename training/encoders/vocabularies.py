"""Vocabularies of a dataset version: raw tokens by id, and equal tokens in two versions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.encoder_files import RETIRED_COLUMN, EncoderFiles, read_plan_file
from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    ColumnEncoding,
    EncoderPlan,
    TableSpec,
    TokenDType,
    VocabularySpec,
)
from conf.encoders.hashing import Cross
from conf.encoders.numbers import Bucketize
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSpec
from etl.tfrecord.codec.crc32c import crc32c


@dataclass(frozen=True)
class Vocabulary:
    """Raw tokens in the order of their ids, the first of which is 2, or past the OOV buckets."""

    name: str  # in the encoder plan
    token_dtype: TokenDType
    tokens: pa.Array  # `[size - first_id]` int64 or string
    oov_buckets: int | None = None
    retired: np.ndarray | None = None  # which keep their ids and are no longer known, bool
    pad_token: int | None = None  # pads lists in the raw data

    @property
    def first_id(self) -> int:
        return FIRST_TOKEN_ID + (self.oov_buckets or 0)

    @property
    def size(self) -> int:
        """Number of ids, pad, OOV and its buckets included."""
        return len(self.tokens) + self.first_id

    def take(self, ids: np.ndarray) -> pa.Array:
        """Returns the tokens of ids, null for pad, OOV and ids beyond the vocabulary."""
        known = is_named(ids, range(self.first_id, self.size))
        return self.tokens.take(pa.array(ids - self.first_id, pa.int64(), mask=~known))


def read_whole_key(value: Any) -> int | None:
    """Returns a key that is a whole number or its text; else None, as of 007, which is not 7."""
    if not isinstance(value, int | str):
        return None
    try:
        key = int(value)
    except ValueError:
        return None
    return key if str(key) == str(value) and -(2**63) <= key < 2**63 else None


def is_named(ids: np.ndarray, named: range | None) -> np.ndarray:
    """Tells ids that name one thing, `named` of a vocabulary or (None) keys, from all others."""
    if named is None:
        return np.asarray((ids != PAD_ID) & (ids != OOV_ID))
    return np.asarray((ids >= named.start) & (ids < named.stop))


def read_plan(version_dir: ReadablePath, manifest: Manifest) -> EncoderPlan:
    """Reads the encoder plan of a version, which must be the one that the manifest names."""
    directory = version_dir / ENCODERS_DIR
    plan = read_plan_file(directory)
    if plan.fingerprint != manifest.encoders_fingerprint:
        raise InputDataError(
            f"{directory / ENCODERS_FILE} is not the one that the manifest was published with",
            received=plan.fingerprint,
            allowed=manifest.encoders_fingerprint,
            fix="restore the file, or build the dataset again",
        )
    return plan


def read_vocabulary(version_dir: ReadablePath, spec: VocabularySpec) -> Vocabulary:
    """Reads one vocabulary and checks it against its description."""
    columns = ["token", "id", *([RETIRED_COLUMN] if spec.incremental else [])]
    table = EncoderFiles(version_dir / ENCODERS_DIR, crc32c).read_vocabulary(spec, columns)
    retired = table[RETIRED_COLUMN].to_numpy() if spec.incremental else None
    tokens = table["token"].combine_chunks()
    return Vocabulary(
        spec.name, spec.token_dtype, tokens, spec.oov_buckets, retired, spec.pad_token
    )


def read_statistics(version_dir: ReadablePath, spec: TableSpec) -> np.ndarray:
    """Reads the statistic of each id over the whole train split, float32 `[vocabulary_size]`."""
    files = EncoderFiles(version_dir / ENCODERS_DIR, crc32c)
    return files.read_table(spec, ["all"])["all"].to_numpy()


def read_key_vocabulary(
    version_dir: ReadablePath, manifest: Manifest, feature: str
) -> Vocabulary | None:
    spec = _find_vocabulary(version_dir, manifest, feature)
    return None if spec is None else read_vocabulary(version_dir, spec)


def read_token_counts(version_dir: ReadablePath, manifest: Manifest, feature: str) -> np.ndarray:
    """Returns how often train has each token of a feature's vocabulary, int64 `[tokens]`."""
    spec = _find_vocabulary(version_dir, manifest, feature)
    if spec is None:
        raise ValueError(f"{feature} has no vocabulary")
    files = EncoderFiles(version_dir / ENCODERS_DIR, crc32c)
    return files.read_vocabulary(spec, ["token", "id", "count"])["count"].to_numpy()


def find_named_ids(version_dir: ReadablePath, manifest: Manifest, feature: str) -> range | None:
    """Returns the ids that name one token each, retired ones too; None: they are keys or hashes."""
    spec = _find_vocabulary(version_dir, manifest, feature)
    return None if spec is None else range(spec.first_token_id, spec.size)


def _find_vocabulary(
    version_dir: ReadablePath, manifest: Manifest, feature: str
) -> VocabularySpec | None:
    plan = read_plan(version_dir, manifest)
    name = find_column(plan, feature).vocabulary
    return None if name is None else plan.vocabulary(name)


def find_column(plan: EncoderPlan, feature: str) -> ColumnEncoding:
    try:
        return plan.column(feature)
    except KeyError as error:
        raise InputDataError(
            "the encoder plan does not say how a feature was made",
            received=feature,
            allowed=", ".join(column.feature for column in plan.columns),
        ) from error


NO_ROW = -1


@dataclass(frozen=True)
class EncodedVersion:
    """A dataset version and the encoders that gave its ids."""

    version_dir: ReadablePath
    manifest: Manifest
    plan: EncoderPlan


def read_encoded_version(version_dir: ReadablePath, manifest: Manifest) -> EncodedVersion:
    return EncodedVersion(version_dir, manifest, read_plan(version_dir, manifest))


def is_encoded_alike(name: str, new: EncodedVersion, old: EncodedVersion) -> bool:
    """Whether a feature's values mean the same in two versions: nothing was fitted anew."""
    try:
        column, earlier = new.plan.column(name), old.plan.column(name)
    except KeyError:  # A label, or what the build adds: in both or in neither.
        return name in new.manifest.schema and name in old.manifest.schema
    return column == earlier and _list_fitted(column, new) == _list_fitted(earlier, old)


def _list_fitted(column: ColumnEncoding, version: EncodedVersion) -> tuple[object, ...]:
    vocabularies = (v for v in version.plan.vocabularies if v.name == column.vocabulary)
    return (*vocabularies, *_list_tables(column, version))


def _list_tables(column: ColumnEncoding, version: EncodedVersion) -> list[TableSpec]:
    table = getattr(column.operation, "table", None)
    return [spec for spec in version.plan.tables if spec.name == table]


def list_fitted_anew(
    inputs: Collection[str], looked_up: Collection[str], new: EncodedVersion, old: EncodedVersion
) -> list[str]:
    """Returns the inputs whose values mean something else than before, if no token matches them."""
    return [
        name
        for name in inputs
        if not (name in looked_up and _has_tokens(name, new) and _has_tokens(name, old))
        and not is_encoded_alike(name, new, old)
    ]


def _has_tokens(name: str, version: EncodedVersion) -> bool:
    return any(c.feature == name and c.vocabulary is not None for c in version.plan.columns)


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


def is_computed_alike(name: str, new: EncodedVersion, old: EncodedVersion) -> bool:
    """Whether two versions make one number of equal raw values: by the same fitted ones."""
    try:
        column, earlier = new.plan.column(name), old.plan.column(name)
    except KeyError:
        return False
    if column.operation != earlier.operation:
        return False
    if _list_tables(column, new) != _list_tables(earlier, old):
        return False
    if column.vocabulary is None or earlier.vocabulary is None:
        return column.vocabulary == earlier.vocabulary
    own = read_vocabulary(new.version_dir, new.plan.vocabulary(column.vocabulary))
    other = read_vocabulary(old.version_dir, old.plan.vocabulary(earlier.vocabulary))
    return np.array_equal(match_tokens(own, other), np.arange(other.size))


MatchTokens = Callable[[Vocabulary, Vocabulary], np.ndarray | None]
"""Earlier id of each id of a new vocabulary, -1 or None where there is none."""


def match_rows(
    table: str, new: EncodedVersion, old: EncodedVersion, match: MatchTokens = match_tokens
) -> np.ndarray | None:
    """Finds the row that each id of a table had in an earlier dataset version.

    Ids of a vocabulary are matched by token (`match`); padding and OOV keep their rows, OOV buckets
    where there are equally many. Computed ids, as by hashing, keep theirs where both versions
    compute them alike. int64 `[vocabulary_size]`, -1 where there is none; None where the ids of the
    two versions have nothing to do with each other.
    """
    found, before = _find_encoding(table, new), _find_encoding(table, old)
    if found is None or before is None:
        return None
    (spec, column), (old_spec, old_column) = found, before
    vocabulary = _read_tokens(new, spec, column)
    old_vocabulary = _read_tokens(old, old_spec, old_column)
    if vocabulary is not None and old_vocabulary is not None:
        return match(vocabulary, old_vocabulary)
    size = spec.vocabulary_size
    computed = vocabulary is None and old_vocabulary is None
    made, was = column.operation, old_column.operation
    # Equally full buckets keep their order: the k-th of each version holds values of one rank.
    is_refitted = isinstance(made, Bucketize | Cross) and type(made) is type(was)
    alike = (made == was or is_refitted) and size == old_spec.vocabulary_size
    return np.arange(size) if computed and alike and size is not None else None


def match_keys(
    feature: str, keys: np.ndarray, new: EncodedVersion, old: EncodedVersion
) -> np.ndarray | None:
    """Finds the key that each key of an earlier dynamic table has in a new dataset version.

    int64 `[n]`, -1 where there is none; None where the keys have nothing to do with each other.
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
