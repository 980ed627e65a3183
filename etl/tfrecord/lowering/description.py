"""What a manifest says of how columns were lowered, so that they can be read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from conf.errors import InputDataError
from etl.tfrecord.lowering.packing import Slot
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions


def write_description(
    options: LoweringOptions, slots: Mapping[str, tuple[Slot, ...]]
) -> dict[str, Any]:
    """Describes options and slots as JSON; see `read_description`."""
    return {
        "layout": options.layout,
        "slots": {
            name: [{"name": slot.name, "width": slot.width} for slot in group]
            for name, group in slots.items()
        },
        "struct_separator": options.struct_separator,
        "name_collisions": options.name_collisions,
        "policy": _describe_policy(options.default),
        "columns": {n: _describe_policy(p) for n, p in sorted(options.columns.items())},
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
    """Reads what `write_description` wrote; an empty one is that of the defaults.

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
        raise _damaged(error) from error
    return options, slots


def read_renames(description: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Reads what `nameCollisions=rename` did; see `Lowering.renames`.

    Raises:
        InputDataError: It is not of that form.
    """
    try:
        return {
            str(column): {str(wanted): str(name) for wanted, name in names.items()}
            for column, names in description.get("renamed", {}).items()
        }
    except AttributeError as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> InputDataError:
    return InputDataError(
        "the manifest's account of the columns is damaged",
        received=repr(error),
        fix="write the directory again, or read it with a schema and options of your own",
    )


def _read_policy(given: Mapping[str, Any]) -> ColumnPolicy:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return ColumnPolicy(**values)
