"""The fitted vocabularies of a dataset version: raw tokens by id, checked before use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    EncoderPlan,
    TableSpec,
    TokenDType,
    VocabularySpec,
)
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.place import Place
from conf.schema import FIRST_TOKEN_ID
from etl.tfrecord.crc32c import crc32c

TOKEN_TYPES: dict[str, pa.DataType] = {"int64": pa.int64(), "string": pa.string()}


@dataclass(frozen=True)
class Vocabulary:
    """Raw tokens in the order of their ids, the first of which is 2, or past the OOV buckets.

    Attributes:
        name: Name in the encoder plan.
        token_dtype: Type of the tokens.
        tokens: `[size - first_id]` int64 or string.
        oov_buckets: Buckets of unknown tokens, or None.
        retired: Tokens that keep their ids but are no longer known, bool `[size - first_id]`, or
            None: no token is.
    """

    name: str
    token_dtype: TokenDType
    tokens: pa.Array
    oov_buckets: int | None = None
    retired: np.ndarray | None = None

    @property
    def first_id(self) -> int:
        """The id of the first token."""
        return FIRST_TOKEN_ID + (self.oov_buckets or 0)

    @property
    def size(self) -> int:
        """Number of ids, pad, OOV and its buckets included."""
        return len(self.tokens) + self.first_id

    def take(self, ids: np.ndarray) -> pa.Array:
        """Returns the tokens of ids, null for pad, OOV and ids beyond the vocabulary."""
        known = (ids >= self.first_id) & (ids < self.size)
        return self.tokens.take(pa.array(ids - self.first_id, pa.int64(), mask=~known))


def read_plan(version_dir: Place, manifest: Manifest) -> EncoderPlan:
    """Reads the encoder plan of a version.

    Raises:
        InputDataError: It is missing, damaged, or not the one that the manifest names.
    """
    file = version_dir / ENCODERS_DIR / ENCODERS_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InputDataError(
            f"cannot read {file}", received=str(error), fix="build the dataset again"
        ) from error
    try:
        plan = EncoderPlan.from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputDataError(
            f"{file} is not complete", received=repr(error), fix="build the dataset again"
        ) from error
    if plan.fingerprint != manifest.encoders_fingerprint:
        raise InputDataError(
            f"{file} is not the one that the manifest was published with",
            received=plan.fingerprint,
            allowed=manifest.encoders_fingerprint,
            fix="restore the file, or build the dataset again",
        )
    return plan


def read_vocabulary(version_dir: Place, spec: VocabularySpec) -> Vocabulary:
    """Reads one vocabulary and checks it against its description.

    Raises:
        InputDataError: The file is missing or outside its directory, its checksum, types or size
            differ, or its ids do not rise from the first one without gaps.
    """
    retired_columns = ["is_retired"] if spec.incremental else []
    file, table = _read_checked(version_dir, spec, ["token", "id", *retired_columns])
    tokens = table["token"].combine_chunks()
    if tokens.type != TOKEN_TYPES[spec.token_dtype] or tokens.null_count:
        raise _damaged(file, "token type", tokens.type, spec.token_dtype)
    retired = table["is_retired"].to_numpy() if spec.incremental else None
    return Vocabulary(spec.name, spec.token_dtype, tokens, spec.oov_buckets, retired)


def read_statistics(version_dir: Place, spec: TableSpec) -> np.ndarray:
    """Reads the statistic of each id of a vocabulary over the whole train split.

    Returns:
        float32 `[vocabulary_size]`.

    Raises:
        InputDataError: The file is missing or outside its directory, or is not the one that the
            plan was written for.
    """
    file, table = _read_parquet(version_dir, spec, ["all"])
    if len(table) != spec.rows or table["all"].type != pa.float32():
        raise _damaged(file, "statistic", f"{len(table)} rows", f"{spec.rows} rows of float32")
    return table["all"].to_numpy()


def read_token_counts(version_dir: Place, spec: VocabularySpec) -> np.ndarray:
    """Reads how often each token of a vocabulary occurs in the train split.

    Returns:
        int64 `[size]`, indexed by id; 0 for padding and OOV, which the file does not count.

    Raises:
        InputDataError: As in `read_vocabulary`, or a count is missing or below 0.
    """
    file, table = _read_checked(version_dir, spec, ["id", "count"])
    column = table["count"].combine_chunks()
    if column.type != pa.int64() or column.null_count:
        raise _damaged(file, "count type", column.type, "int64")
    counts = np.zeros(spec.size, np.int64)
    counts[spec.first_token_id :] = column.to_numpy(zero_copy_only=False)
    if counts.min(initial=0) < 0:
        raise _damaged(file, "count", counts.min(), "0 or more")
    return counts


def _read_checked(
    version_dir: Place, spec: VocabularySpec, columns: list[str]
) -> tuple[Place, pa.Table]:
    """Reads columns of a vocabulary's file, its path, checksum and ids checked."""
    file, table = _read_parquet(version_dir, spec, columns)
    first, ids = spec.first_token_id, table["id"].to_numpy()
    if not np.array_equal(ids, np.arange(first, spec.size)):
        raise _damaged(file, "ids", f"{len(ids)} ids", f"{first} to {spec.size - 1}, ascending")
    return file, table


def _read_parquet(
    version_dir: Place, spec: VocabularySpec | TableSpec, columns: list[str]
) -> tuple[Place, pa.Table]:
    """Reads columns of a file that a plan names, its path and checksum checked."""
    directory = (version_dir / ENCODERS_DIR).resolve()
    file = (directory / spec.file).resolve()
    if not file.is_relative_to(directory):
        raise InputDataError(
            f"vocabulary {spec.name!r} lies outside its dataset version", received=spec.file
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputDataError(f"cannot read {file}", received=error.strerror) from error
    found = f"{crc32c(content):08x}"
    if found != spec.file_crc32c:
        raise _damaged(file, "checksum", found, spec.file_crc32c)
    try:
        table = pq.read_table(pa.BufferReader(content), columns=columns)
        table = table.select(columns)
    except (KeyError, pa.ArrowException) as error:
        raise _damaged(file, "content", repr(error), f"columns {', '.join(columns)}") from error
    return file, table


def read_key_vocabulary(version_dir: Place, manifest: Manifest, feature: str) -> Vocabulary | None:
    """Reads the vocabulary of a key feature, or returns None where its ids are the tokens.

    Raises:
        InputDataError: The plan does not make the feature, or the vocabulary is damaged.
    """
    plan = read_plan(version_dir, manifest)
    try:
        name = plan.column(feature).vocabulary
        spec = None if name is None else plan.vocabulary(name)
    except KeyError as error:
        raise InputDataError(
            f"the encoder plan does not say how feature {feature!r} was made",
            received=str(error),
            fix="build the dataset again",
        ) from error
    return None if spec is None else read_vocabulary(version_dir, spec)


def _damaged(file: Place, part: str, received: Any, allowed: Any) -> InputDataError:
    return InputDataError(
        f"vocabulary {file}: the {part} does not fit its description",
        received=received,
        allowed=allowed,
        fix="restore the file, roll back to an earlier version, or build again",
    )
