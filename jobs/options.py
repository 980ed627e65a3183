"""Command line options that several jobs share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from jobs.logs import LogFormat

CONFIG_HELP = "Preset name, or path of a YAML file."

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan; touch nothing.")]
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="How to log.")]


def list_overrides(overrides: Sequence[str] | None, options: Mapping[str, str | None]) -> list[str]:
    """Returns all overrides of a config: those of options of their own first, which `--set` beats.

    Args:
        overrides: What `--set` gave.
        options: Value by key; None where the option was not given.
    """
    given = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in options.items()
        if value is not None
    ]
    return [*given, *(overrides or [])]
