"""Plan-time checks across columns: policies, names, and what a record type takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields

import pyarrow as pa

from conf.errors import did_you_mean
from etl.tfrecord.lowering.nodes import Output
from etl.tfrecord.lowering.packing import PACKED_PREFIX
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions, option_name


def check_byte_array(
    schema: pa.Schema, outputs: list[Output], options: LoweringOptions
) -> list[str]:
    """What a schema has that payloads of their own cannot hold."""
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


def resolve_names(outputs: list[Output], options: LoweringOptions) -> tuple[list[str], list[str]]:
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
    names: dict[str, None] = {}
    taken = set(wanted)
    for name in wanted:
        number, free = 1, name
        while free in names or (free != name and free in taken):
            number += 1
            free = f"{name}_{number}"
        names[free] = None
    return list(names), problems


def check_policies(options: LoweringOptions, meanings: Mapping[str, set[str]]) -> list[str]:
    """What is wrong with the policies.

    Args:
        options: All policies.
        meanings: By path of column or field, the fields of `ColumnPolicy` that mean something.

    Returns:
        Policies of columns that are not there or mean nothing for them, and contradictions.
    """
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
            if getattr(policy, f.name) not in (f.default, getattr(options.default, f.name))
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
    return texts
