"""Ids beyond their feature's vocabulary, found once a step has tripped over one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest
from training.input import Batch


def find_stray_id(
    batches: Iterable[Batch], manifest: Manifest, features: Sequence[str]
) -> InputDataError | None:
    """Returns the error that names the first id that no row of a table stands for, or None.

    Looking at every id of every batch would cost each run what only a damaged dataset needs.

    Args:
        batches: The batches of the steps that failed.
        manifest: The dataset.
        features: Names of the features that are read.
    """
    sizes = {name: manifest.schema[name].vocabulary_size for name in features}
    for batch in batches:
        for name, size in sizes.items():
            if size is None or name not in batch:
                continue
            ids = _flatten(batch[name])
            stray = ids[(ids < 0) | (ids >= size)]
            if stray.size:
                return InputDataError(
                    f"feature {name!r} holds an id that its vocabulary does not have",
                    received=f"{int(stray[0])} in split 'train' of {manifest.dataset_name!r}",
                    allowed=f"0 to {size - 1}",
                    fix="leave such rows out by input.filter, or build the dataset again",
                )
    return None


def _flatten(value: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> np.ndarray:
    if isinstance(value, tf.RaggedTensor):
        value = value.flat_values
    elif isinstance(value, tf.SparseTensor):
        value = value.indices[:, -1]
    return np.asarray(value).ravel()
