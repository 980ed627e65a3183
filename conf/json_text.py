"""JSON that others may have written: what cannot be read is always a ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def parse_json(text: str) -> Any:
    """Returns what a JSON text holds.

    Raises:
        ValueError: It is not valid, is nested too deeply, or has a number with too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of objects in objects, with their keys by dots."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
