"""Rows to a `tf.data.Dataset` of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import SluiceError
from training.input.columns import Column
from training.input.rows import Rows, regroup
from training.input.sparse import build_sparse
from training.input_errors import carry
from training.open_iterators import close_iterators_at_exit

Batch = dict[str, Any]

# Rows that are handed to TensorFlow at a time, where all columns have one size: a call costs
# some ten microseconds per column, which would be most of the time of a small batch.
SLAB_ROWS = 32768


class BatchLayout:
    """How columns cross into TensorFlow, and what is made of them there.

    Args:
        columns: The features.
        batch_size: Rows per batch.
        drop_remainder: Whether every batch has that many.
        cut: Padded lists whose length differs from batch to batch.
        sparse: Feature of the weights by feature of the ids: these become sparse tensors.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        batch_size: int,
        drop_remainder: bool,
        cut: Sequence[str] = (),
        sparse: Mapping[str, str] | None = None,
    ) -> None:
        self._columns = tuple(columns)
        self._batch_size, self._drop_remainder = batch_size, drop_remainder
        self._cut, self._sparse = frozenset(cut), dict(sparse or {})

    @property
    def is_uniform(self) -> bool:
        """Whether every row of every batch has the same size."""
        return not self._cut and all(column.is_dense for column in self._columns)

    def build_dataset(self, read: Callable[[], Iterator[Iterator[Rows]]]) -> tf.data.Dataset:
        """Builds the dataset of batches.

        Args:
            read: Begins to read the rows of each epoch, in parts of any size (which are batches
                already where lists are cut). No batch lies across two epochs; of several epochs the
                remainders must be dropped.
        """
        close_iterators_at_exit()
        size, is_uniform = self._batch_size, self.is_uniform
        most = max(1, SLAB_ROWS // size) * size if is_uniform else size

        def generate() -> Iterator[Any]:
            try:
                for epoch in read():
                    for rows in regroup(epoch, size, most, self._drop_remainder):
                        flat = self._flatten(rows)
                        yield dict(zip(names, flat, strict=True)) if is_uniform else tuple(flat)
            except SluiceError as error:
                raise carry(error) from error

        names, signature = [column.name for column in self._columns], self._signature()
        if is_uniform:
            specs = dict(zip(names, signature, strict=True))
            dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
            dataset = dataset.rebatch(size, drop_remainder=self._drop_remainder)
        else:
            dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
            dataset = dataset.map(self._assemble)
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _flatten(self, rows: Rows) -> Iterator[np.ndarray]:
        for column in self._columns:
            if column.is_dense:
                yield rows.dense[column.name]
            elif not column.wire.is_list:
                yield rows.lists[column.name].to_numpy(zero_copy_only=False)
            else:
                lists = rows.lists[column.name]
                yield lists.flatten().to_numpy(zero_copy_only=False)
                offsets = np.frombuffer(lists.buffers()[1], np.int32)
                offsets = offsets[lists.offset : lists.offset + len(lists) + 1]
                yield offsets.astype(np.int64) - offsets[0]

    def _signature(self) -> tuple[tf.TensorSpec, ...]:
        specs = []
        for column in self._columns:
            dtype = tf.string if column.spec.dtype == "bytes" else tf.as_dtype(column.spec.dtype)
            if column.is_dense and column.length is not None:
                length = None if column.name in self._cut else column.length
                specs.append(tf.TensorSpec([None, length], dtype))
            else:
                specs.append(tf.TensorSpec([None], dtype))
            if not column.is_dense and column.wire.is_list:
                specs.append(tf.TensorSpec([None], tf.int64))
        return tuple(specs)

    def _assemble(self, *tensors: tf.Tensor) -> Batch:
        batch: Batch = {}
        rows = self._batch_size if self._drop_remainder else None
        left = iter(tensors)
        for column in self._columns:
            value: Any = next(left)
            if not column.is_dense and column.wire.is_list:
                value = tf.RaggedTensor.from_row_splits(value, next(left), validate=False)
                if not column.is_ragged:
                    value = value.to_tensor(column.pad, shape=[None, column.length])
            if isinstance(value, tf.Tensor):
                value = tf.ensure_shape(value, [rows, *value.shape[1:]])
            batch[column.name] = value
        for ids, weights in self._sparse.items():
            size = next(c.spec.vocabulary_size for c in self._columns if c.name == ids)
            batch[ids] = build_sparse(batch[ids], batch.pop(weights), int(size or 0))
        return batch
