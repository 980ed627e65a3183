"""Features of every catalogue item, held as tensors that are indexed by item id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from conf.manifest import Manifest
from conf.place import Place
from training.input import Batch, build_eval_dataset, read_batches

READ_ROWS = 4096


class ItemFeatures:
    """Looks up the features of items by id: what uniform negatives are embedded from.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.
        names: Features to hold.

    Raises:
        InputDataError: The catalogue is missing or damaged.
    """

    def __init__(self, version_dir: Place, manifest: Manifest, names: Sequence[str]) -> None:
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
    version_dir: Place, manifest: Manifest, key: str, names: Sequence[str], size: int
) -> dict[str, tf.Tensor]:
    dataset = build_eval_dataset(version_dir, manifest, "catalog", READ_ROWS, [key, *names])
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
    column = np.zeros((size, *widest), parts[0].dtype)
    for rows, part in zip(ids, parts, strict=True):
        if part.ndim == 1:
            column[rows] = part
        else:
            column[rows, : part.shape[1]] = part
    return column
