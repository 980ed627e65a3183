"""Lineage events as a file transport leaves them, each checked by OpenLineage's own JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator
from referencing import Registry, Resource

_SCHEMAS = Path(__file__).parent / "contract" / "openlineage"


def file_transport(file: Path) -> dict[str, str]:
    """Variables that switch events on, appended to a file."""
    return {
        "OPENLINEAGE__TRANSPORT__TYPE": "file",
        "OPENLINEAGE__TRANSPORT__LOG_FILE_PATH": str(file),
        "OPENLINEAGE__TRANSPORT__APPEND": "true",
    }


def read_events(file: Path) -> list[dict[str, Any]]:
    """The events of a file; each is valid, and each facet of it."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    for event in events:
        check_event(event)
    return events


def check_event(event: dict[str, Any]) -> None:
    """Compares an event, and each of its facets, with the schema that it names."""
    schemas = [json.loads(path.read_text()) for path in _SCHEMAS.rglob("*.json")]
    known = {schema["$id"]: schema for schema in schemas}
    registry = Registry().with_resources(
        (name, Resource.from_contents(schema)) for name, schema in known.items()
    )

    def check(value: Any, pointer: str) -> None:
        assert pointer.partition("#")[0] in known, pointer
        found = Draft202012Validator(
            {"$ref": pointer}, registry=registry, format_checker=FormatChecker()
        )
        found.validate(value)

    check(event, event["schemaURL"])
    parts = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    kinds = ("facets", "inputFacets", "outputFacets")
    facets = [facet for part in parts for kind in kinds for facet in part.get(kind, {}).values()]
    for facet in facets:
        check(facet, facet["_schemaURL"])
