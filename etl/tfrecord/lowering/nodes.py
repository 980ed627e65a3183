"""How one column becomes features: the tree that a plan is made of, and its leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.lowering.lists import fill_nulls
from etl.tfrecord.lowering.values import ValueRule


@dataclass(frozen=True)
class Output:
    """A feature to be.

    Attributes:
        name: Its name, before collisions are resolved.
        type: Type of the column that the encoder gets.
    """

    name: str
    type: pa.DataType


class Node(Protocol):
    """Lowers one column, or one field of a struct; picklable."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What it gives."""

    @property
    def is_identity(self) -> bool:
        """Whether it gives the column itself."""

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """Lowers the column of a batch.

        Raises:
            InputDataError: A value that the policies refuse; names the column and the row.
        """


def join_outputs(nodes: Iterable[Node]) -> tuple[Output, ...]:
    """What several nodes give, one after the other."""
    return tuple(output for node in nodes for output in node.outputs)


@dataclass(frozen=True)
class Leaf:
    """A column that gives one feature.

    Attributes:
        name: Column name, with the names of the structs around it.
        rule: Conversion of its values.
        nulls: Policy of null rows, see `ColumnPolicy`.
        default: What stands for a null row.
    """

    name: str
    rule: ValueRule
    nulls: Literal["absent", "default", "error"] = "absent"
    default: Any = None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `Node`."""
        return (Output(self.name, self.rule.target),)

    @property
    def is_identity(self) -> bool:
        """See `Node`."""
        return self.rule.is_identity and self.nulls == "absent"

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """See `Node`."""
        converted, refusal = self.rule.convert(column)
        if refusal is not None:
            raise InputDataError(
                f"column {self.name!r} has {refusal.what}",
                received=f"{refusal.received} in row {refusal.index} of the batch",
                allowed=refusal.allowed,
                fix=refusal.fix,
            )
        if self.nulls != "absent" and converted.null_count:
            if self.nulls == "error":
                refuse_null(self.name, converted, "policy nulls=error allows none")
            converted = fill_nulls(converted, self.default)
        return [converted]


def refuse_null(name: str, column: pa.Array, why: str) -> None:
    """Raises the error of a column's first null."""
    row = int(np.argmax(np.asarray(column.is_null())))
    raise InputDataError(
        f"column {name!r} has a null: {why}",
        received=f"null in row {row} of the batch",
        fix="policy nulls=default with a value of your choice, or filter the rows",
    )
