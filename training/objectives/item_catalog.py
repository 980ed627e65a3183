"""Item catalogue for objectives: events of items, items to draw, features by id."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID
from conf.splits import CATALOG
from training.encoders.vocabularies import read_key_vocabulary
from training.input.batches import Batch, read_split

CATALOG_ROWS = 4096
_log = logging.getLogger("sluice.training.input")


def read_drawable_items(version_dir: ReadablePath, manifest: Manifest) -> np.ndarray:
    """Reads which ids stand for an item that can be recommended, int64 `[items]`, ascending.

    Neither padding, nor OOV and its buckets, which stand for many unknown items each, nor tokens
    that are retired.
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


def read_catalog(
    version_dir: ReadablePath, manifest: Manifest, names: Sequence[str], batch_size: int
) -> Iterator[Batch]:
    """Reads the items that can be ranked, a row each, with some of their features.

    They are the split `catalog`. An imported dataset need not have one: its items are those of the
    train rows then, each with the features of its first row.
    """
    split = CATALOG
    if all(part.name != split for part in manifest.splits):
        split = "train"
    batches = read_split(version_dir, manifest, split, batch_size, names)
    yield from batches if split == CATALOG else _keep_first(batches, manifest)


def _keep_first(batches: Iterator[Batch], manifest: Manifest) -> Iterator[Batch]:
    """Keeps the first row of each item; padding and unknown items are none."""
    name = manifest.dataset_name
    _log.info("dataset %s has no split catalog: its items are those of train rows", name)
    key = manifest.require_key("item")
    known = np.arange(FIRST_TOKEN_ID)
    for batch in batches:
        ids, rows = np.unique(np.asarray(batch[key], np.int64), return_index=True)
        rows = np.sort(rows[~np.isin(ids, known, assume_unique=True)])
        if len(rows):
            known = np.union1d(known, ids)
            yield {name: tf.gather(value, rows) for name, value in batch.items()}


class ItemFeatures:
    """Looks up the features of items by id: what drawn items are embedded from."""

    def __init__(self, version_dir: ReadablePath, manifest: Manifest, names: Sequence[str]) -> None:
        self._key = manifest.require_key("item")
        others = [name for name in names if name != self._key]
        self._columns: dict[str, tf.Tensor] = {}
        if others:
            size = int(manifest.schema[self._key].vocabulary_size or 0)
            self._columns = _read_columns(version_dir, manifest, self._key, others, size)

    def lookup(self, ids: tf.Tensor) -> Batch:
        """Returns the features of items, a batch with one row per id, int64 `[n]`."""
        features = {name: tf.gather(column, ids) for name, column in self._columns.items()}
        return {self._key: ids, **features}


def _read_columns(
    version_dir: ReadablePath, manifest: Manifest, key: str, names: Sequence[str], size: int
) -> dict[str, tf.Tensor]:
    ids: list[np.ndarray] = []
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for batch in read_catalog(version_dir, manifest, [key, *names], CATALOG_ROWS):
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
