"""What a manifest says when a job adds to a directory: one description for all of its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError
from etl.tfrecord.committed import Committed
from etl.tfrecord.features import Kind, WireFeature

# Policies by which a column's features differ, not only the values in them.
_READING_POLICIES = ("dates", "timestamps", "maps", "map_keys", "vectors")


def describe_features(schema: pa.Schema, record_type: str) -> tuple[WireFeature, ...]:
    """Features that columns become on the wire.

    Args:
        schema: Columns as the encoder takes them.
        record_type: Record type; `ByteArray` has no features.
    """
    if record_type == "ByteArray":
        return ()
    return tuple(_describe(field) for field in schema)


def _describe(field: pa.Field) -> WireFeature:
    depth, value_type = 0, field.type
    while hasattr(value_type, "value_field"):
        depth, value_type = depth + 1, value_type.value_type
    if pa.types.is_dictionary(value_type):
        value_type = value_type.value_type
    kind: Kind = "bytes"
    if pa.types.is_integer(value_type) or pa.types.is_boolean(value_type):
        kind = "int64"
    elif pa.types.is_floating(value_type) or pa.types.is_decimal(value_type):
        kind = "float32"
    return WireFeature(field.name, kind, depth == 1, depth > 1)


def merge_description(old: Committed | None, new: Committed, directory: object) -> Committed:
    """Describes a directory's earlier shards and a job's together.

    Args:
        old: Manifest of the shards that stay, or None.
        new: Description of the job's shards.
        directory: What to call the directory in an error.

    Returns:
        The old shards under a description that holds for both; features that only one of the
        two has are listed, for a record may lack any feature.

    Raises:
        ConfigError: They differ in a way that no single reader could follow; says how.
    """
    if old is None or not old.shards:
        return replace(new, shards=())
    mine, theirs = _traits(new), _traits(old)
    differing = [name for name in mine if mine[name] != theirs[name]]
    kinds = {feature.name: feature for feature in old.features}
    clashing = [f for f in new.features if kinds.get(f.name, f) != f]
    _check_case(new.features, kinds, directory)
    if differing or clashing:
        received = [f"{name} {mine[name]}" for name in differing]
        allowed = [f"{name} {theirs[name]}" for name in differing]
        received += [f"feature {f.name!r}: {_name_type(f)}" for f in clashing]
        allowed += [f"feature {f.name!r}: {_name_type(kinds[f.name])}" for f in clashing]
        raise ConfigError(
            f"the shards would not fit those that stay in {directory}",
            received="; ".join(received),
            allowed="; ".join(allowed),
            fix="write them alike, overwrite the whole directory, or write to another",
        )
    added = tuple(f for f in new.features if f.name not in kinds)
    # Bytes that one of them knows to be no text are none in either.
    binary = {*old.lowering.get("binary", ()), *new.lowering.get("binary", ())}
    lowering = {**new.lowering, **({"binary": sorted(binary)} if binary else {})}
    features = (*old.features, *added)
    columns = _merge_columns(old, new)
    return replace(new, features=features, lowering=lowering, shards=old.shards, columns=columns)


def _check_case(
    features: Sequence[WireFeature], known: Mapping[str, WireFeature], directory: object
) -> None:
    """Refuses a feature that differs from an earlier one in case alone: Spark takes them for one.

    Raises:
        ConfigError: There is such a feature.
    """
    by_lower = {name.lower(): name for name in known}
    for name in (f.name for f in features if f.name not in known):
        if name.lower() in by_lower:
            raise ConfigError(
                f"the shards that stay in {directory} have this feature in another case",
                received=name,
                allowed=by_lower[name.lower()],
                fix="rename the column as it is there, or write to another directory",
            )


def _merge_columns(old: Committed, new: Committed) -> Mapping[str, Any] | None:
    """Columns that hold for both, where both turned them into features by the same rules.

    One that had two types is left out: it is read as its feature.
    """
    is_alike = _reading_rules(old.lowering) == _reading_rules(new.lowering)
    if old.columns is None or new.columns is None or not is_alike:
        return None
    fields = {field["name"]: field for field in old.columns["fields"]}
    for field in new.columns["fields"]:
        known = fields.setdefault(field["name"], field)
        if known is not None and known["type"] != field["type"]:
            fields[field["name"]] = None
    return {**old.columns, "fields": [field for field in fields.values() if field is not None]}


def _reading_rules(lowering: Mapping[str, Any]) -> Any:
    """What of a description decides how features are read back."""
    policies = {"": lowering.get("policy", {}), **lowering.get("columns", {})}
    rules = {
        name: {key: policy[key] for key in _READING_POLICIES if key in policy}
        for name, policy in policies.items()
    }
    separator = lowering.get("struct_separator", ".")
    return rules, separator, lowering.get("slots", {}), lowering.get("renamed", {})


def _traits(committed: Committed) -> dict[str, Any]:
    lowering: Mapping[str, Any] = committed.lowering
    return {
        "record type": committed.record_type,
        "compression": (committed.compression or "none").lower(),
        "partition columns": [list(column) for column in committed.partition_columns],
        "layout": lowering.get("layout", "columns"),
        "slots": lowering.get("slots", {}),
        "timestamps": _timestamp_policies(lowering),
    }


def _timestamp_policies(lowering: Mapping[str, Any]) -> dict[str, Any]:
    """Units of time by column, "" for all others: two of them in one feature look alike."""
    policies = {"": lowering.get("policy", {}), **lowering.get("columns", {})}
    return {n: p["timestamps"] for n, p in sorted(policies.items()) if "timestamps" in p}


def _name_type(feature: WireFeature) -> str:
    if feature.is_sequence:
        return f"list of lists of {feature.kind}"
    return f"list of {feature.kind}" if feature.is_list else feature.kind
