"""What becomes of values and types that the wire has no place for: a policy per column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ColumnPolicy:
    """Policies of one column.

    Attributes:
        float64: `error`: the nearest float32, refusing a finite value beyond its range, a value
            that would become zero, and a whole number that would become another; `exact`: refuse
            any change; `cast`: nearest, infinite beyond the range; `clip`: nearest, the largest
            float32 beyond the range.
        integers: Unsigned 64-bit values beyond int64: refused, or the largest int64.
        nulls: A null row: feature absent, `default` instead, or refused.
        null_elements: A null inside a list: refused, left out, or `default` instead.
        default: What stands for a null; None for 0, 0.0 or "".
        dates: `days` since 1970-01-01 as int64, or ISO 8601 text.
        timestamps: Seconds, milliseconds or microseconds since 1970 UTC as int64, or ISO 8601.
        maps: `entries`: two lists, `<name>.keys` and `<name>.values`; `keys`: a feature
            `<name>.<key>` for each of `map_keys`.
        map_keys: Keys that become features.
        vectors: `dense`: a float list; `sparse`: `<name>.indices`, `<name>.values`, `<name>.size`.
    """

    float64: Literal["error", "exact", "cast", "clip"] = "error"
    integers: Literal["error", "clip"] = "error"
    nulls: Literal["absent", "default", "error"] = "absent"
    null_elements: Literal["error", "drop", "default"] = "error"
    default: int | float | str | None = None
    dates: Literal["error", "days", "iso"] = "error"
    timestamps: Literal["error", "s", "ms", "us", "iso"] = "error"
    maps: Literal["error", "entries", "keys"] = "error"
    map_keys: tuple[str, ...] = ()
    vectors: Literal["dense", "sparse"] = "dense"


@dataclass(frozen=True)
class LoweringOptions:
    """How columns become features.

    Attributes:
        default: Policies of columns that are not named.
        columns: Policies by column name.
        struct_separator: Between a struct's name and its field's.
        name_collisions: Two columns that end up under one name: refused, or numbered.
        layout: `columns`: a feature each; `packed`: scalars of one kind in one list feature.
    """

    default: ColumnPolicy = ColumnPolicy()
    columns: Mapping[str, ColumnPolicy] = field(default_factory=dict)
    struct_separator: str = "."
    name_collisions: Literal["error", "rename"] = "error"
    layout: Literal["columns", "packed"] = "columns"
