"""Item catalogue for objectives: counts in train, items that can be drawn, features by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from training.input.batches import Batch, build_eval_dataset, read_batches
from training.input.vocabularies import read_key_vocabulary, read_plan, read_token_counts

COUNTED_ROWS = 65_536


def read_item_counts(version_dir: ReadablePath, manifest: Manifest) -> np.ndarray:
    """Reads the train counts of the item vocabulary.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.

    Returns:
        int64 `[vocabulary_size]`, indexed by item id; 0 for padding. Id 1 (OOV) holds the train
        rows whose item is not in the vocabulary; drawn negatives count as none of these.

    Raises:
        InputDataError: The item feature has no vocabulary, or its file is missing or damaged.
    """
    spec = manifest.schema[manifest.require_key("item")]
    plan = read_plan(version_dir, manifest)
    try:
        vocabulary = plan.vocabulary(spec.encoding)
    except KeyError as error:
        raise InputDataError(
            f"the item feature {spec.name!r} has no vocabulary, so its items are not counted",
            received=f"encoding {spec.encoding!r}",
            allowed="a vocabulary of the encoder plan",
            fix="encode the item with a vocabulary and build the dataset again",
        ) from error
    if spec.vocabulary_size != vocabulary.size:
        raise InputDataError(
            f"the vocabulary of {spec.name!r} does not fit the schema",
            received=f"{vocabulary.size} ids",
            allowed=f"vocabulary_size = {spec.vocabulary_size}",
            fix="build the dataset again",
        )
    counts = read_token_counts(version_dir, vocabulary)
    events = manifest.split("train").rows - manifest.counts.drawn.get("train", 0)
    counts[OOV_ID] = max(0, events - int(counts.sum()))
    return counts


def read_catalog_counts(
    version_dir: ReadablePath, manifest: Manifest, ids: np.ndarray
) -> np.ndarray:
    """Reads how often each item of the catalogue occurs in the train split.

    Keys have no vocabulary that counts them: for them the train split is read through.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        ids: int64 `[items]`, ascending.

    Returns:
        int64 `[items]`; drawn negatives count as none of them where there is a vocabulary.

    Raises:
        InputDataError: The item feature's vocabulary is missing or damaged, or a record is.
    """
    item = manifest.require_key("item")
    if manifest.schema[item].vocabulary_size is not None:
        return read_item_counts(version_dir, manifest)[ids]
    counts = np.zeros(len(ids), np.int64)
    dataset = build_eval_dataset(version_dir, manifest, "train", COUNTED_ROWS, [item])
    for batch in read_batches(dataset, version_dir, manifest, "train"):
        found = np.asarray(batch[item], np.int64)
        rows = np.minimum(np.searchsorted(ids, found), len(ids) - 1)
        counts += np.bincount(rows[ids[rows] == found], minlength=len(ids))
    return counts


def read_drawable_items(version_dir: ReadablePath, manifest: Manifest) -> np.ndarray:
    """Reads which item ids stand for an item that can be recommended.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.

    Returns:
        int64 `[items]`, ascending: neither padding, nor OOV and its buckets, which stand for many
        unknown items each, nor tokens that are retired.

    Raises:
        ConfigError: No item is left.
        InputDataError: The vocabulary is missing or damaged.
    """
    key = manifest.require_key("item")
    vocabulary = read_key_vocabulary(version_dir, manifest, key)
    if vocabulary is None:
        ids = np.arange(FIRST_TOKEN_ID, int(manifest.schema[key].vocabulary_size or 0))
    else:
        ids = np.arange(vocabulary.first_id, vocabulary.size)
        if vocabulary.retired is not None:
            ids = ids[~vocabulary.retired]
    if not len(ids):
        raise ConfigError(
            "negatives need items to draw from, and the vocabulary has none",
            received=f"feature {key!r}: OOV buckets and retired tokens alone",
            fix="set model.objective.negatives={source: batch}, or build the dataset again",
        )
    return ids.astype(np.int64)


CATALOG_ROWS = 4096


class ItemFeatures:
    """Looks up the features of items by id: what drawn items are embedded from.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        names: Features to hold.

    Raises:
        InputDataError: The catalogue is missing or damaged.
    """

    def __init__(self, version_dir: ReadablePath, manifest: Manifest, names: Sequence[str]) -> None:
        self._key = manifest.require_key("item")
        others = [name for name in names if name != self._key]
        self._columns: dict[str, tf.Tensor] = {}
        if others:
            size = int(manifest.schema[self._key].vocabulary_size or 0)
            self._columns = _read_columns(version_dir, manifest, self._key, others, size)

    def lookup(self, ids: tf.Tensor) -> Batch:
        """Returns the features of items, a batch with one row per id.

        Args:
            ids: int64 `[n]`.
        """
        features = {name: tf.gather(column, ids) for name, column in self._columns.items()}
        return {self._key: ids, **features}


def _read_columns(
    version_dir: ReadablePath, manifest: Manifest, key: str, names: Sequence[str], size: int
) -> dict[str, tf.Tensor]:
    dataset = build_eval_dataset(version_dir, manifest, "catalog", CATALOG_ROWS, [key, *names])
    ids: list[np.ndarray] = []
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for batch in read_batches(dataset, version_dir, manifest, "catalog"):
        ids.append(batch[key].numpy())
        for name in names:
            value = batch[name]
            ragged = isinstance(value, tf.RaggedTensor)
            parts[name].append((value.to_tensor() if ragged else value).numpy())
    return {name: tf.constant(_fill_column(ids, parts[name], size)) for name in names if ids}


def _fill_column(ids: list[np.ndarray], parts: list[np.ndarray], size: int) -> np.ndarray:
    """Puts the rows of all batches at their ids; lists are padded to the catalogue's widest."""
    widest = max(part.shape[1:] for part in parts)
    dtype = parts[0].dtype
    column = np.full((size, *widest), b"" if dtype.hasobject else 0, dtype)
    for rows, part in zip(ids, parts, strict=True):
        if part.ndim == 1:
            column[rows] = part
        else:
            column[rows, : part.shape[1]] = part
    return column
