"""Maps to two lists, or to a feature for each of some keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.tfrecord.lowering.lists import Rows, split_lists
from etl.tfrecord.lowering.nodes import Leaf, Node, Output, join_outputs


def _split_maps(column: pa.Array) -> tuple[pa.Array, pa.Array, Rows]:
    """Keys and values of all rows, and the rows."""
    entries = column.values
    lists = pa.Array.from_buffers(
        pa.list_(entries.type),
        len(column),
        column.buffers()[:2],
        column.null_count,
        column.offset,
        [entries],
    )
    visible, rows = split_lists(lists)
    return visible.field(0), visible.field(1), rows


@dataclass(frozen=True)
class MapEntries:
    """A map as the list of its keys and the list of its values, in the same order.

    Attributes:
        keys: Lowers the lists of keys.
        values: Lowers the lists of values.
        key_lists: Type of the lists of keys.
        value_lists: Type of the lists of values.
        drop_null_values: Whether entries without a value are left out, keys included.
    """

    keys: Leaf
    values: Leaf
    key_lists: pa.DataType
    value_lists: pa.DataType
    drop_null_values: bool
    is_identity: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `Node`."""
        return (*self.keys.outputs, *self.values.outputs)

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """See `Node`."""
        keys, values, rows = _split_maps(column)
        if self.drop_null_values and values.null_count:
            mask = np.asarray(values.is_valid())
            keys, values, rows = keys.filter(mask), values.drop_null(), rows.keep(mask)
        return [
            *self.keys.apply(rows.build(keys, self.key_lists)),
            *self.values.apply(rows.build(values, self.value_lists)),
        ]


@dataclass(frozen=True)
class MapKeys:
    """A map's values under some keys; null where a row lacks the key.

    Attributes:
        keys: The keys, of the map's key type.
        key_type: That type, without a dictionary.
        children: Lowers the values, one per key.
    """

    keys: tuple[Any, ...]
    key_type: pa.DataType
    children: tuple[Node, ...]
    is_identity: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `Node`."""
        return join_outputs(self.children)

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """See `Node`."""
        keys, values, rows = _split_maps(column)
        if pa.types.is_dictionary(keys.type):
            keys = keys.dictionary_decode()
        row_of_entry = np.repeat(np.arange(len(column)), rows.lengths)
        arrays: list[pa.Array] = []
        for key, child in zip(self.keys, self.children, strict=True):
            found = np.flatnonzero(np.asarray(pc.equal(keys, pa.scalar(key, self.key_type))))
            places = np.full(len(column), -1, np.int64)
            places[row_of_entry[found]] = found  # of a key that occurs twice, the last
            arrays += child.apply(values.take(pa.array(places, mask=places < 0)))
        return arrays
