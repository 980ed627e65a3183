"""The reference of the options of `format("tfrecord")`, from the table that parses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from etl.tfrecord.spark.options import BOTH_OPTIONS, READ_OPTIONS, WRITE_OPTIONS, Option


def render_page() -> str:
    """Returns the page."""
    parts = [
        '# Options of `format("tfrecord")`',
        "The first value is the default. Upper and lower case do not matter. `etl.tfrecord` takes "
        "those of types as `TypeOptions`, `sluice convert` as `--option name=value`.",
        "## Reads and writes",
        _render_table(BOTH_OPTIONS),
        "## Writes",
        _render_table(WRITE_OPTIONS),
        "## Reads",
        _render_table(READ_OPTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def _render_table(options: Iterable[Option]) -> str:
    rows = [f"| `{o.name}` | {_show(o.values)} | {o.about} |" for o in options]
    return "\n".join(["| option | values | about |", "| --- | --- | --- |", *rows])


def _show(values: str | Mapping[str, object]) -> str:
    if isinstance(values, str):
        return values
    return ", ".join(f"`{value}`" for value in values if value)
