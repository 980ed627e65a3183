"""The same model as stock Keras trains it: `Embedding`, `compile`, `fit` with Adam."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from jobs.bench.train_step.sluice import HIDDEN_UNITS


class KerasTraining:
    """A compiled Keras model in training.

    Args:
        vocabulary_size: Rows of the table.
        dim: Length of a row.
        dataset: Its batches.
        compile_arguments: Further arguments of `compile`.
    """

    def __init__(
        self, vocabulary_size: int, dim: int, dataset: tf.data.Dataset, **compile_arguments: Any
    ) -> None:
        history = keras.Input([None], dtype="int64", name="history")
        item = keras.Input([], dtype="int64", name="item")
        table = keras.layers.Embedding(vocabulary_size, dim, mask_zero=True)
        pooled = keras.layers.GlobalAveragePooling1D()(table(history))
        hidden = keras.layers.Dense(HIDDEN_UNITS, activation="relu")(pooled)
        user = keras.layers.Dense(dim)(hidden)
        logits = keras.layers.Dot(axes=1)([user, table(item)])
        self._model = keras.Model({"history": history, "item": item}, logits)
        self._model.compile(
            optimizer=keras.optimizers.Adam(),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            **compile_arguments,
        )
        self._dataset = dataset.map(
            lambda batch: ({"history": batch["history"], "item": batch["item"]}, batch["label"])
        ).prefetch(2)

    def __call__(self, steps: int) -> None:
        """Runs steps by `fit`."""
        self._model.fit(self._dataset, steps_per_epoch=steps, epochs=1, verbose=0)
