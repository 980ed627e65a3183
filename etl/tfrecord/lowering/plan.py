"""The plan made from a schema before any task starts, and what it makes of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.lowering.checks import check_byte_array, check_policies, resolve_names
from etl.tfrecord.lowering.description import write_description
from etl.tfrecord.lowering.nodes import Node, Output, join_outputs
from etl.tfrecord.lowering.packing import Packing, Slot, plan_packing
from etl.tfrecord.lowering.tree import Planner
from etl.tfrecord.lowering.types import is_binary
from etl.tfrecord.lowering.values import holds_same
from etl.tfrecord.policies import LoweringOptions


@dataclass(frozen=True)
class Lowering:
    """Turns batches of one schema into batches that the encoder takes; picklable.

    Attributes:
        source: Schema of the batches that come in.
        schema: Schema of those that go out.
        options: Policies and layout.
        nodes: One per column.
        packing: How columns are packed, or None.
    """

    source: pa.Schema
    schema: pa.Schema
    options: LoweringOptions
    nodes: tuple[Node, ...]
    packing: Packing | None

    @property
    def slots(self) -> Mapping[str, tuple[Slot, ...]]:
        """What lies where in each packed feature."""
        return {} if self.packing is None else self.packing.slots

    @property
    def _outputs(self) -> list[Output]:
        """What the columns become, before packing, under the names it has in the end."""
        outputs = list(join_outputs(self.nodes))
        names, _ = resolve_names(outputs, self.options)
        return [Output(name, output.type) for name, output in zip(names, outputs, strict=True)]

    @property
    def renames(self) -> dict[str, dict[str, str]] | None:
        """By column, the names that its features got by `nameCollisions=rename`.

        Each by the name that it would have had; None where two parts of one column had the same,
        so that none could tell which is which.
        """
        names, seen = iter(self._outputs), set()
        renames: dict[str, dict[str, str]] = {}
        for column, node in zip(self.source.names, self.nodes, strict=True):
            for wanted in (output.name for output in node.outputs):
                if (column, wanted) in seen:
                    return None
                seen.add((column, wanted))
                name = next(names).name
                if name != wanted:
                    renames.setdefault(column, {})[wanted] = name
        return renames

    @property
    def is_identity(self) -> bool:
        """Whether batches go out as they come in."""
        return self.source is self.schema

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Lowers a batch.

        Args:
            batch: Rows in the planned schema, sliced or not.

        Returns:
            As many rows, in `schema`.

        Raises:
            InputDataError: A value that the policies refuse, or another schema than planned; names
                the column and the row.
        """
        if self.is_identity and batch.schema.types == self.source.types:
            return batch
        columns = self._conform(batch)
        pairs = zip(self.nodes, columns, strict=True)
        arrays = [array for node, column in pairs for array in node.apply(column)]
        if self.packing is not None:
            arrays = self.packing.apply(arrays, batch.num_rows)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _conform(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns in the planned types, which may differ in zones, nullability and width."""
        try:
            types = self.source.types
            if batch.schema.names == self.source.names and all(
                holds_same(given, planned)
                for given, planned in zip(batch.schema.types, types, strict=True)
            ):
                pairs = zip(batch.columns, types, strict=True)
                return [c if c.type == planned else c.cast(planned) for c, planned in pairs]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            pass
        raise InputDataError(
            "a batch has another schema than the write was planned for",
            received=str(batch.schema),
            allowed=str(self.source),
        )

    def describe(self) -> dict[str, Any]:
        """What reading back needs, as JSON; see `description.read_description`."""
        binary = [output.name for output in self._outputs if is_binary(output.type)]
        extras = {"binary": binary, "renamed": self.renames}
        description = write_description(self.options, self.slots)
        return {**description, **{name: value for name, value in extras.items() if value}}


def plan_lowering(
    schema: pa.Schema, record_type: str, options: LoweringOptions | None = None
) -> Lowering:
    """Plans how the columns of a schema become features.

    Args:
        schema: Schema of the batches to come.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.
        options: Policies and layout; None for the defaults.

    Raises:
        ConfigError: Columns that do not fit, all of them in one message with what would make each
            fit.
    """
    options = options or LoweringOptions()
    planner = Planner(record_type, options)
    nodes = [planner.plan(field.name, field) for field in schema]
    outputs = list(join_outputs(node for node in nodes if node is not None))
    planner.problems += check_policies(options, planner.meanings)
    if record_type == "ByteArray":
        planner.problems += check_byte_array(schema, outputs, options)
    names, collisions = resolve_names(outputs, options)
    planner.problems += collisions
    if planner.problems:
        message = _MESSAGES.get(record_type, record_type)
        raise ConfigError(
            f"{len(planner.problems)} column(s) cannot be written as {message}",
            received="; ".join(planner.problems),
            allowed="booleans, integers, floats, decimals, strings, binary, lists of these; by "
            "option dates, timestamps, maps, structs' fields, vectors",
            fix="give the options named above for all columns, or for one by option columns",
        )
    outputs = [Output(name, output.type) for name, output in zip(names, outputs, strict=True)]
    return _assemble(schema, options, tuple(node for node in nodes if node is not None), outputs)


_MESSAGES = {
    "Example": "tf.train.Example",
    "SequenceExample": "tf.train.SequenceExample",
    "ByteArray": "ByteArray records",
}


def _assemble(
    schema: pa.Schema, options: LoweringOptions, nodes: tuple[Node, ...], outputs: list[Output]
) -> Lowering:
    packing = plan_packing(outputs) if options.layout == "packed" else None
    if packing is not None and packing.groups:
        outputs = packing.outputs(outputs)
    else:
        packing = None
        if [o.name for o in outputs] == schema.names and all(node.is_identity for node in nodes):
            return Lowering(schema, schema, options, nodes, None)
    lowered = pa.schema([pa.field(output.name, output.type) for output in outputs])
    return Lowering(schema, lowered, options, nodes, packing)
