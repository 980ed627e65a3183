"""Which tensor of the optimizers belongs to which weight, in two models of different weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.checkpoint.files import Layout
from training.checkpoint.state import OPTIMIZERS, State

ITEM_OF_LIST = re.compile(r"(.+)/([0-9]+)")


@dataclass(frozen=True)
class SlotMap:
    """A tensor of the new optimizers and the earlier one that it continues.

    Attributes:
        name: Its name.
        source: Name of the earlier tensor.
        table: The table whose rows it follows, or None: it is of a dense weight, or a counter.
    """

    name: str
    source: str
    table: str | None


def map_slots(
    new: tuple[State, Layout],
    old: tuple[Mapping[str, Sequence[int]], Layout],
    fresh: dict[str, str],
) -> list[SlotMap]:
    """Pairs the tensors of two optimizers.

    Optimizers hold their slots in lists: one tensor per table or per dense weight, in the order
    of the layout. Whole numbers of shape `[]` are counters of steps.

    Args:
        new: The new state and its layout.
        old: The earlier tensors' shapes and their layout.
        fresh: Receives the tensors that no earlier one belongs to, with the reason.
    """
    (state, layout), (old_shapes, old_layout) = new, old
    slots = {name: v for name, v in state.variables.items() if name.startswith(f"{OPTIMIZERS}/")}
    shapes = {name: variable.shape.as_list() for name, variable in slots.items()}
    table_shapes = [state.variables[name].shape.as_list() for name in layout.tables.values()]
    dense_shapes = [state.variables[name].shape.as_list() for name in layout.dense]
    maps: list[SlotMap] = []
    for prefix, names in _group(shapes).items():
        found = [shapes[name] for name in names]
        if prefix and _leads(found, table_shapes):
            for name, table in zip(names, layout.tables, strict=True):
                _pair(maps, fresh, name, table, _position(table, old_layout.tables), old_shapes)
        elif prefix and found == dense_shapes:
            for name, weight in zip(names, layout.dense, strict=True):
                _pair(maps, fresh, name, None, _position(weight, old_layout.dense), old_shapes)
        else:
            maps += [
                SlotMap(name, name, None)
                for name in names
                if slots[name].dtype.is_integer and not shapes[name] and name in old_shapes
            ]
            fresh |= {
                name: "it is not known which weight this tensor of the optimizers is of"
                for name in names
                if shapes[name]
            }
    return maps


def _group(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """Names by the list that they are of, in its order; those of no list under ""."""
    groups: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in shapes:
        match = ITEM_OF_LIST.fullmatch(name)
        groups[match[1] if match else ""].append((int(match[2]) if match else 0, name))
    return {prefix: [name for _, name in sorted(items)] for prefix, items in groups.items()}


def _leads(found: Sequence[Sequence[int]], tables: Sequence[Sequence[int]]) -> bool:
    """Whether each tensor has a row for each row of its table."""
    return len(found) == len(tables) and all(
        shape[:1] == table[:1] for shape, table in zip(found, tables, strict=True)
    )


def _position(name: str, names: Mapping[str, str] | Sequence[str]) -> int | None:
    ordered = list(names)
    return ordered.index(name) if name in ordered else None


def _pair(
    maps: list[SlotMap],
    fresh: dict[str, str],
    name: str,
    table: str | None,
    position: int | None,
    old_shapes: Mapping[str, Sequence[int]],
) -> None:
    if position is None:
        return  # The weight itself is fresh, and said to be.
    source = f"{name.rpartition('/')[0]}/{position}"
    if source in old_shapes:
        maps.append(SlotMap(name, source, table))
    else:
        fresh[name] = f"the earlier optimizers have no {source}"
