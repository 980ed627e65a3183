"""A page per command, from the options that the code declares."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator
from typing import Any

import typer

from jobs.cli import SUBCOMMANDS
from tests.docs_site.markdown import join_blocks, render_table


def load_command(name: str) -> Any:
    """Returns the Click command of a subcommand of `sluice`."""
    return typer.main.get_command(importlib.import_module(SUBCOMMANDS[name][0]).app)


def list_commands() -> Iterator[tuple[str, Any]]:
    """Yields each command that does something, by its words behind `sluice`."""
    for name in SUBCOMMANDS:
        command = load_command(name)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {part}", found) for part, found in inner.items())


def find_faults() -> list[str]:
    """Returns the options and commands that say nothing of themselves."""
    faults = []
    for name, command in list_commands():
        if not command.help:
            faults.append(f"sluice {name}: its function needs a docstring")
        faults += [
            f"sluice {name} {_name(parameter)}: give it `help=`"
            for parameter in command.params
            if not _help(parameter)
        ]
    return faults


def render_page() -> str:
    """Returns the page of all commands in Markdown."""
    blocks = ["# Commands", "`sluice COMMAND --help` shows the same in a terminal."]
    for name, command in list_commands():
        blocks += [f"## `sluice {name}`", html.escape(" ".join(str(command.help).split()))]
        if command.params:
            rows = map(_row, command.params)
            blocks.append(render_table(("option", "meaning", "default"), rows))
    return join_blocks(blocks)


def _row(parameter: Any) -> tuple[str, str, str]:
    default = "required" if parameter.required else _default(parameter.default)
    return f"`{_name(parameter)}`", html.escape(_help(parameter)), default


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name).upper()
    return " / ".join((*parameter.opts, *parameter.secondary_opts))


def _help(parameter: Any) -> str:
    return " ".join(str(getattr(parameter, "help", None) or "").split())


def _default(default: Any) -> str:
    value = getattr(default, "value", default)
    is_none = value is None or value is False or value == () or callable(value)
    return "" if is_none else f"`{value}`"
