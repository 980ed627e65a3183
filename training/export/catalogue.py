"""The catalogue inside a SavedModel: exact top-k of a retrieval model, features of known items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from conf.errors import InputDataError
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import read_key_vocabulary
from training.evaluation.item_index import ItemIds
from training.export.serving_encoders import (
    INT_PAD_TOKENS,
    STRING_PAD_TOKENS,
    ServingEncoders,
    fit_length,
)
from training.input.batches import Features

NO_SCORE = float(np.finfo(np.float32).min)
"""Score of a place of a list for which there is no item; JSON knows no infinity."""


class Catalogue(tf.Module):
    """Items by key: which of them a raw value names, and the raw token of each.

    Args:
        trained: The run's model.
        encoders: Encoders, those of the item's key among them.
        items: The items, ids ascending.

    Attributes:
        key: Feature of the items' keys.
        raw: Raw input of the key.
        size: Number of items.

    Raises:
        InputDataError: An item has no raw token.
    """

    def __init__(self, trained: TrainedModel, encoders: ServingEncoders, items: ItemIds) -> None:
        super().__init__(name="catalogue")
        self.key = trained.manifest.require_key("item")
        [self.raw] = [item for item in encoders.inputs if item.feature == self.key]
        self.size = len(items)
        self._encoders = encoders
        tokens = _read_tokens(trained, self.key, items)
        self._ids = tf.Variable(items.ids, trainable=False, name="item_ids")
        self._tokens = tf.Variable(tokens, trainable=False, name="item_tokens")
        is_text = self._tokens.dtype == tf.string
        self.pad_token: int | str = STRING_PAD_TOKENS[0] if is_text else INT_PAD_TOKENS[0]

    def find(self, tokens: tf.Tensor) -> tf.Tensor:
        """Returns the positions of items, `size` where the catalogue does not have one.

        Args:
            tokens: Raw values of the key, any shape.

        Returns:
            int32 of the same shape.
        """
        flat = {self.raw.name: tf.reshape(tokens, [-1])}
        wanted = self._encoders.encode(flat, (self.key,))[self.key]
        positions = tf.minimum(tf.searchsorted(self._ids, wanted), self.size - 1)
        is_known = tf.equal(tf.gather(self._ids, positions), wanted)
        return tf.reshape(tf.where(is_known, positions, self.size), tf.shape(tokens))

    def rank(
        self, scores: tf.Tensor, k: tf.Tensor | int, exclude: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns the items of the highest scores; equal ones in the order of ids.

        Args:
            scores: `[rows, size]`.
            k: Length of the lists; at most that of the catalogue.
            exclude: Raw values of keys that are left out, `[rows, …]`; unknown ones are ignored.

        Returns:
            `items` and `scores`, `[rows, k]`: `pad_token` and `NO_SCORE` behind a list's end.
        """
        if exclude is not None:
            scores = self._mask(scores, self.find(exclude))
        best, columns = tf.math.top_k(scores, tf.minimum(k, self.size))
        tokens = tf.gather(self._tokens, columns)
        pad = tf.cast(self.pad_token, tokens.dtype)
        return {"items": tf.where(best > NO_SCORE, tokens, pad), "scores": best}

    def _mask(self, scores: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
        known = tf.cast(tf.where(columns < self.size), tf.int32)  # [cells, 2]: row, position
        cells = tf.stack([known[:, 0], tf.gather_nd(columns, known)], axis=1)
        return tf.tensor_scatter_nd_update(
            scores, cells, tf.fill(tf.shape(cells)[:1], tf.constant(NO_SCORE))
        )


class CatalogueFeatures(tf.Module):
    """Encoded features of the catalogue's items, and of an item that it does not have.

    Args:
        columns: The features, a row per item.
        specs: The features by name.
    """

    def __init__(self, columns: Features, specs: Mapping[str, FeatureSpec]) -> None:
        super().__init__(name="catalogue_features")
        self._columns = {
            name: tf.Variable(_append_unknown(columns[name], spec), trainable=False, name=name)
            for name, spec in specs.items()
        }

    def take(self, positions: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the features of items by their positions, `[items]`."""
        return {name: tf.gather(column, positions) for name, column in self._columns.items()}


def _append_unknown(values: tf.Tensor | tf.RaggedTensor, spec: FeatureSpec) -> tf.Tensor:
    """Adds the row of an unknown item: an unknown id, lists without a value."""
    if isinstance(values, tf.RaggedTensor):
        values = values.to_tensor()
    values = fit_length(values, spec)
    if spec.vocabulary_size is not None or spec.dtype == "int64":
        filler: object = PAD_ID if spec.is_list else OOV_ID
    else:
        filler = spec.pad_value or ("" if values.dtype == tf.string else 0)
    row = tf.fill([1, *values.shape[1:]], tf.cast(filler, values.dtype))
    return tf.concat([values, row], axis=0)


def _read_tokens(trained: TrainedModel, key: str, items: ItemIds) -> np.ndarray:
    vocabulary = read_key_vocabulary(trained.version_dir, trained.manifest, key)
    if vocabulary is None:
        return items.ids
    tokens = vocabulary.take(items.ids)
    if tokens.null_count:
        raise InputDataError(
            "the catalogue holds items that its vocabulary does not know",
            received=f"{tokens.null_count} items",
            fix="build the dataset again",
        )
    return np.asarray(tokens.to_numpy(zero_copy_only=False))
