"""Decoded features back to the columns of a wanted schema: the way back of `lowering`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.features import WireFeature
from etl.tfrecord.lowering.packing import Slot
from etl.tfrecord.policies import LoweringOptions
from etl.tfrecord.raising.names import FeatureNames
from etl.tfrecord.raising.nodes import Node
from etl.tfrecord.raising.planner import Planner


@dataclass(frozen=True)
class Raising:
    """Turns decoded batches into batches of a wanted schema; picklable.

    Attributes:
        target: The wanted schema, without metadata.
        features: What to decode, in this order.
        nodes: One per column.
    """

    target: pa.Schema
    features: tuple[WireFeature, ...]
    nodes: tuple[Node, ...]

    def apply(self, batch: pa.RecordBatch, name: str = "<buffer>") -> pa.RecordBatch:
        """Raises a batch.

        Args:
            batch: One column per feature, in the order of `features`.
            name: What to call its origin in an error.

        Returns:
            As many rows, in `target`.

        Raises:
            InputDataError: A value does not fit its column, or is missing where the column is not
                nullable; names the origin and the feature.
        """
        columns = [node.build(batch, name) for node in self.nodes]
        for field, column in zip(self.target, columns, strict=True):
            if column.null_count and not field.nullable:
                raise InputDataError(
                    f"{name}: feature {field.name!r} is missing in {column.null_count} record(s), "
                    "but its column is not nullable",
                    fix="make the column nullable in the schema",
                )
        if not columns:
            rows = pa.StructArray.from_buffers(pa.struct([]), batch.num_rows, [None])
            return pa.RecordBatch.from_struct_array(rows)
        return pa.RecordBatch.from_arrays(columns, schema=self.target)


def plan_raising(
    target: pa.Schema,
    record_type: str,
    options: LoweringOptions | None = None,
    slots: Mapping[str, tuple[Slot, ...]] | None = None,
    names: FeatureNames | None = None,
) -> Raising:
    """Plans how features become the columns of a schema.

    Args:
        target: The wanted schema; see `etl.tfrecord.spark.schema.to_arrow_schema`.
        record_type: `"Example"` or `"SequenceExample"`.
        options: How dates, timestamps, maps, vectors and structs were written; None for the
            defaults.
        slots: What lies where in packed features.
        names: What the features are called; None where every column goes by its own name.

    Raises:
        ConfigError: Columns that cannot be read, all of them in one message.
    """
    options = options or LoweringOptions()
    planner = Planner(record_type, options, slots or {}, names or FeatureNames())
    nodes = [planner.plan_column(field) for field in target]
    if planner.problems:
        raise ConfigError(
            f"{len(planner.problems)} column(s) cannot be read from tf.train.{record_type}",
            received="; ".join(planner.problems),
            allowed="boolean, integers, float, double, decimal, string, binary, arrays of these; "
            "structs of these; by option dates, timestamps, maps, vectors",
            fix="give the options named above, or read the column as another type",
        )
    fields = [pa.field(field.name, field.type, field.nullable) for field in target]
    built = tuple(node for node in nodes if node is not None)
    return Raising(pa.schema(fields), tuple(planner.features.values()), built)
