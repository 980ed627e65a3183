"""Operations as the JSON objects of `encoders.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from conf.errors import InputDataError
from conf.operations import OPERATIONS, Cross, Operation

_LATER = ("prepared", "is_weighted")


def operation_to_json(operation: Operation) -> dict[str, Any]:
    """Returns an operation as a JSON object.

    What was added to an operation later stands there only where it is used: what was written
    before keeps its bytes and its fingerprint.
    """
    data = {"kind": operation.kind, **asdict(operation)}
    if isinstance(operation, Cross):
        parts = [None if own is None else operation_to_json(own) for own in operation.prepared]
        data["prepared"] = parts
    return {name: value for name, value in data.items() if name not in _LATER or value}


def operation_from_json(data: Mapping[str, Any]) -> Operation:
    """Builds an operation from its JSON object.

    Raises:
        InputDataError: It is of no known kind.
        TypeError: A field is missing or unknown.
    """
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    if "prepared" in fields:
        fields["prepared"] = tuple(
            None if own is None else operation_from_json(own) for own in fields["prepared"]
        )
    kind = fields.pop("kind", None)
    make: Any = OPERATIONS.get(kind)
    if make is None:
        raise InputDataError(
            "an encoder is of an unknown kind",
            received=kind,
            allowed=", ".join(OPERATIONS),
            fix="read the dataset with the version of Sluice that wrote it",
        )
    operation: Operation = make(**fields)
    return operation
