"""Structs flattened: each field becomes a column of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from etl.tfrecord.lowering.nodes import Node, Output, join_outputs


@dataclass(frozen=True)
class FlattenStruct:
    """A struct's fields, null where the struct is.

    Attributes:
        children: One per field.
    """

    children: tuple[Node, ...]
    is_identity: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `Node`."""
        return join_outputs(self.children)

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """See `Node`."""
        pairs = zip(self.children, column.flatten(), strict=True)
        return [array for child, field in pairs for array in child.apply(field)]
