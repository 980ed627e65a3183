"""Checks of what the parts of a build config say of each other, before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.etl.behaviour_references import check_as_of, check_behaviours, made_names

if TYPE_CHECKING:
    from conf.etl import BuildConfig


def check_references(config: BuildConfig) -> None:
    """Checks every name that one part of the config uses of another, before anything is read.

    Raises:
        ValueError: A source or column is not declared, or cannot play the part it is given.
    """
    used = [config.events.source, *(join.source for join in config.joins)]
    if config.split.test_source:
        used.append(config.split.test_source)
    unknown = sorted(set(used) - set(config.sources))
    if unknown:
        raise ValueError(f"not declared under `sources`: {', '.join(unknown)}")
    _check_events(config, config.events.source)
    if config.split.test_source:
        _check_events(config, config.split.test_source)
    _check_joins(config)
    _check_label_and_candidates(config)
    roles = {feature.role for feature in config.features if feature.column == config.events.user}
    items = {feature.role for feature in config.features if feature.column == config.events.item}
    if "user" not in roles or "item" not in items:
        raise ValueError(
            "`features` must encode the event's user column (role user) and item column (role item)"
        )


def _check_events(config: BuildConfig, source: str) -> None:
    """User, item and time must be there in every event: a null could be placed nowhere."""
    events, declared = config.events, config.sources[source]
    wanted = {"user": events.user, "item": events.item, "time": events.time}
    for part, name in wanted.items():
        column = declared.column(name) if name is not None else None
        if name is None or (part == "time" and source != events.source and column is None):
            continue
        if column is None:
            raise ValueError(
                f"events.{part}: source {source!r} has no column {name!r}; it has "
                f"{', '.join(declared.column_types)}"
            )
        if column.nullable:
            raise ValueError(f"events.{part}: column {name!r} of {source!r} must not be nullable")
        allowed = ("int64",) if part == "time" else ("int64", "string")
        if column.type not in allowed:
            raise ValueError(
                f"events.{part}: column {name!r} of {source!r} is {column.type}; it must be "
                f"{' or '.join(allowed)}"
            )
        expected = config.sources[events.source].column_types.get(name)
        if column.type != expected:
            raise ValueError(
                f"events.{part}: {name!r} is {column.type} in {source!r}, "
                f"{expected} in {events.source!r}"
            )


def _check_joins(config: BuildConfig) -> None:
    """Join columns exist with the key's type; no two sources bring a column of one name."""
    known = dict(config.sources[config.events.source].column_types)
    for join in config.joins:
        dictionary = config.sources[join.source]
        if dictionary.key is None:
            raise ValueError(f"dictionaries need a `key`: {join.source}")
        key_type = dictionary.column_types[dictionary.key]
        if known.get(join.column) != key_type:
            raise ValueError(
                f"join with {join.source!r}: column {join.column!r} is "
                f"{known.get(join.column, 'not declared')}, "
                f"the key {dictionary.key!r} is {key_type}"
            )
        added = join.added_columns(dictionary)
        clashing = sorted({n.lower() for n in added} & {n.lower() for n in known})
        if clashing:
            raise ValueError(
                f"dictionary {join.source!r} has columns that the event already has: "
                f"{', '.join(clashing)}; rename them in sources.{join.source}.columns"
            )
        check_as_of(config, join)
        known.update(added)
    check_behaviours(config, known)
    made = [*made_names(config)]
    made += [config.history.name] if config.history else []
    made += ["seen"] if config.seen else []
    made += [config.label.name] if config.label else []
    made += ["candidates"] if config.split.candidates else []
    clashing = sorted({n.lower() for n in made} & {n.lower() for n in known})
    if clashing or len(made) != len({n.lower() for n in made}):
        raise ValueError(
            f"columns that the build makes are there already: {', '.join(clashing or made)}; "
            "rename the sources' columns, or set the `name` of history, histories, sessions, "
            "rolling and label"
        )


def _check_label_and_candidates(config: BuildConfig) -> None:
    types = config.sources[config.events.source].column_types
    if config.label and types.get(config.label.column) not in ("int64", "float32"):
        raise ValueError(
            f"label.column: {config.label.column!r} is "
            f"{types.get(config.label.column, 'not declared')} in {config.events.source!r}; it "
            "must be int64 or float32"
        )
    if config.split.candidates:
        declared = config.sources[config.split.test_source or ""].column_types
        wanted = f"list<{types[config.events.item]}>"
        if declared.get(config.split.candidates) != wanted:
            raise ValueError(
                f"split.candidates: {config.split.candidates!r} is "
                f"{declared.get(config.split.candidates, 'not declared')} in "
                f"{config.split.test_source!r}; it must be {wanted}"
            )
