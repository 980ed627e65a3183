"""Columns that arrive packed already: whoever hands the rows over has put them side by side.

Handing one list over costs Spark less than half of what handing its values over one by one does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.lowering.nodes import refuse_null
from etl.tfrecord.lowering.plan import Lowering, plan_lowering
from etl.tfrecord.policies import LoweringOptions

_TYPES = {"packed.int64": pa.int64(), "packed.float": pa.float32()}


@dataclass(frozen=True)
class Prepacked:
    """What was packed beforehand.

    Attributes:
        order: All columns as they were, partition columns left out.
        packed: Columns by packed feature, in their order; all that belong there.
        types: Spark's name for the type that each of these had.
    """

    order: tuple[str, ...] = ()
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    def dumps(self) -> str:
        """Returns it as JSON, for an option."""
        return json.dumps({"order": self.order, "packed": self.packed, "types": self.types})

    @classmethod
    def loads(cls, text: str) -> Prepacked:
        """Parses what `dumps` returned.

        Raises:
            ConfigError: It is something else.
        """
        try:
            data = json.loads(text)
            packed = {name: tuple(columns) for name, columns in data["packed"].items()}
            if not set(packed) <= set(_TYPES):
                raise ValueError(f"no packed feature of numbers: {', '.join(packed)}")
            return cls(tuple(data["order"]), packed, dict(data["types"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "bad value of TFRecord option 'prepacked'",
                received=text,
                fix="leave it out: write_tfrecords sets it for itself",
            ) from error

    @property
    def columns(self) -> frozenset[str]:
        """Every column that was packed."""
        return frozenset(name for names in self.packed.values() for name in names)

    def unpacked_schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema as it was before packing, numbers as int64 and float32."""
        if not self.packed:
            return schema
        types = {n: _TYPES[key] for key, names in self.packed.items() for n in names}
        return pa.schema(
            [pa.field(n, types[n]) if n in types else schema.field(n) for n in self.order]
        )


@dataclass(frozen=True)
class PrepackedLowering:
    """Lowers batches of which some columns are packed already.

    Attributes:
        lowering: The plan for the columns as they were.
        given: What was packed.
    """

    lowering: Lowering
    given: Prepacked

    @property
    def schema(self) -> pa.Schema:
        """Schema of the batches that go out."""
        return self.lowering.schema

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Lowers a batch; see `Lowering.apply`."""
        arrays: list[Any] = []
        for node, name in zip(self.lowering.nodes, self.lowering.source.names, strict=True):
            arrays += [None] if name in self.given.columns else node.apply(batch.column(name))
        packing = self.lowering.packing
        if packing is None:
            raise InputDataError("columns were packed beforehand, but the layout packs none")
        ready = {name: self._fix_width(name, batch.column(name)) for name in self.given.packed}
        columns = packing.apply(arrays, batch.num_rows, ready)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _fix_width(self, name: str, lists: pa.Array) -> pa.Array:
        """The lists of a packed feature, all of them of one length and without nulls."""
        names = self.given.packed[name]
        values = lists.flatten()
        if lists.null_count or len(values) != len(lists) * len(names):
            raise InputDataError(
                f"feature {name!r} was packed beforehand to another width",
                allowed=f"{len(names)} values per row",
            )
        if values.null_count:
            missing = np.asarray(values.is_null()).reshape(len(lists), len(names))
            slot = int(np.argmax(missing.any(axis=0)))
            marked = pa.array(np.zeros(len(lists), np.int8), mask=missing[:, slot])
            refuse_null(names[slot], marked, "the packed layout has a place for every value")
        return pa.FixedSizeListArray.from_arrays(values, len(names))


def plan_prepacked(
    schema: pa.Schema, record_type: str, options: LoweringOptions, given: Prepacked
) -> Lowering | PrepackedLowering:
    """Plans the lowering of batches some columns of which may be packed already.

    Args:
        schema: Schema of the batches.
        record_type: As for `plan_lowering`.
        options: As for `plan_lowering`.
        given: What was packed; nothing makes it `plan_lowering`.

    Raises:
        ConfigError: Columns that do not fit.
    """
    lowering = plan_lowering(given.unpacked_schema(schema), record_type, options)
    return PrepackedLowering(lowering, given) if given.packed else lowering
