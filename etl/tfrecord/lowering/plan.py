"""The plan made from a schema before any task starts, and what it makes of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.tfrecord.lowering.nodes import Node, Output
from etl.tfrecord.lowering.packing import PACKED_PREFIX, Packing, Slot, plan_packing
from etl.tfrecord.lowering.tree import Planner
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions, option_name


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
        if self.is_identity:
            return batch
        if batch.schema.names != self.source.names or batch.schema.types != self.source.types:
            raise InputDataError(
                "a batch has another schema than the write was planned for",
                received=str(batch.schema),
                allowed=str(self.source),
            )
        pairs = zip(self.nodes, batch.columns, strict=True)
        arrays = [array for node, column in pairs for array in node.apply(column)]
        if self.packing is not None:
            arrays = self.packing.apply(arrays, batch.num_rows)
        if not arrays:
            rows = pa.StructArray.from_buffers(pa.struct([]), batch.num_rows, [None])
            return pa.RecordBatch.from_struct_array(rows)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def describe(self) -> dict[str, Any]:
        """What reading back needs, as JSON; see `read_description`."""
        slots = {
            name: [{"name": slot.name, "width": slot.width} for slot in group]
            for name, group in self.slots.items()
        }
        return {
            "layout": self.options.layout,
            "slots": slots,
            "struct_separator": self.options.struct_separator,
            "name_collisions": self.options.name_collisions,
            "policy": _describe_policy(self.options.default),
            "columns": {n: _describe_policy(p) for n, p in sorted(self.options.columns.items())},
        }


def _describe_policy(policy: ColumnPolicy) -> dict[str, Any]:
    values = {f.name: getattr(policy, f.name) for f in fields(ColumnPolicy)}
    default = ColumnPolicy()
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != getattr(default, name)
    }


def read_description(
    description: Mapping[str, Any],
) -> tuple[LoweringOptions, dict[str, tuple[Slot, ...]]]:
    """Reads what `Lowering.describe` wrote; an empty one is that of the defaults.

    Raises:
        InputDataError: It is not of that form.
    """
    try:
        options = LoweringOptions(
            default=_read_policy(description.get("policy", {})),
            columns={n: _read_policy(p) for n, p in description.get("columns", {}).items()},
            struct_separator=description.get("struct_separator", "."),
            name_collisions=description.get("name_collisions", "error"),
            layout=description.get("layout", "columns"),
        )
        slots = {
            name: tuple(Slot(str(slot["name"]), int(slot["width"])) for slot in group)
            for name, group in description.get("slots", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputDataError(
            "the manifest's account of the columns is damaged",
            received=repr(error),
            fix="write the directory again, or read it with a schema and options of your own",
        ) from error
    return options, slots


def _read_policy(given: Mapping[str, Any]) -> ColumnPolicy:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return ColumnPolicy(**values)


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
    outputs = [output for node in nodes if node is not None for output in node.outputs]
    planner.problems += _check_policies(planner)
    if record_type == "ByteArray":
        planner.problems += _check_byte_array(schema, outputs, options)
    names, collisions = _resolve_names(outputs, options)
    planner.problems += collisions
    if planner.problems:
        raise ConfigError(
            f"{len(planner.problems)} column(s) cannot be written as {_MESSAGES[record_type]}",
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


def _check_byte_array(
    schema: pa.Schema, outputs: list[Output], options: LoweringOptions
) -> list[str]:
    problems = []
    if options.layout == "packed":
        problems.append("layout=packed: payloads have no features to pack")
    if len(schema) != 1 or [_is_bytes(output.type) for output in outputs] not in ([True], []):
        shown = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no column"
        problems.append(f"{shown}: one binary or string column is wanted")
    return problems


def _is_bytes(data_type: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_binary(data_type) or t.is_large_binary(data_type) or t.is_string(data_type)
                or t.is_large_string(data_type))  # fmt: skip


def _resolve_names(outputs: list[Output], options: LoweringOptions) -> tuple[list[str], list[str]]:
    """Names of the features, and what is wrong with them."""
    wanted = [output.name for output in outputs]
    problems = [
        f"{name}: the packed layout keeps names with {PACKED_PREFIX} in front for itself"
        for name in wanted
        if options.layout == "packed" and name.startswith(PACKED_PREFIX)
    ]
    if options.name_collisions == "error":
        counts = Counter(wanted)
        problems += [
            f"{name}: {count} columns end up under this name (name occurs twice): rename one, or "
            "option nameCollisions=rename"
            for name, count in counts.items()
            if count > 1
        ]
        return wanted, problems
    names: list[str] = []
    taken = set(wanted)
    for name in wanted:
        number, free = 1, name
        while free in names or (free != name and free in taken):
            number += 1
            free = f"{name}_{number}"
        names.append(free)
    return names, problems


def _check_policies(planner: Planner) -> list[str]:
    """Policies of columns that are not there, or that mean nothing for them."""
    options, meanings = planner.options, planner.meanings
    by_name: dict[str, set[str]] = {}
    for path, meaning in meanings.items():
        name = options.policy_name(path)
        if name is not None:
            by_name.setdefault(name, set()).update(meaning)
    problems = []
    for name, policy in options.columns.items():
        if name not in by_name:
            problems.append(f"{name}: option columns names no such column, "
                            + did_you_mean(name, meanings))  # fmt: skip
            continue
        without = [
            f"{option_name(f.name)}={getattr(policy, f.name)}"
            for f in fields(ColumnPolicy)
            if getattr(policy, f.name) != getattr(options.default, f.name)
            and f.name not in by_name[name]
        ]
        if without:
            problems.append(f"{name}: {', '.join(without)} means nothing for its type")
    problems += [
        f"{name or 'all columns'}: {text}"
        for name, policy in [("", options.default), *options.columns.items()]
        for text in _contradictions(policy)
    ]
    return problems


def _contradictions(policy: ColumnPolicy) -> list[str]:
    texts = []
    if policy.default is not None and "default" not in (policy.nulls, policy.null_elements):
        texts.append("option default needs nulls=default or nullElements=default")
    if policy.map_keys and policy.maps != "keys":
        texts.append("option mapKeys needs maps=keys")
    if policy.maps == "keys" and not policy.map_keys:
        texts.append("maps=keys needs option mapKeys")
    return texts
