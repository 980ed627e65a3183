"""Checks of what the parts of a build config say of each other, before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.etl.behaviour_references import check_as_of, check_behaviours, made_names
from conf.etl.sample_references import check_samples

if TYPE_CHECKING:
    from conf.etl import BuildConfig


def check_references(config: BuildConfig) -> None:
    """Checks every name that one part of the config uses of another, before anything is read.

    Raises:
        ValueError: A source or column is not declared, or cannot play the part it is given.
    """
    # What the contract names is checked with the contract, rule by rule.
    unknown = sorted(set(_joined_sources(config)) - set(config.sources))
    if unknown:
        raise ValueError(f"not declared under `sources`: {', '.join(unknown)}")
    for source in (config.events.source, config.split.test_source, config.split.validation_source):
        if source:
            _check_events(config, source)
    _check_joins(config)
    check_samples(config)
    for role, column in (("user", config.events.user), ("item", config.events.item)):
        roles = {feature.role for feature in config.features if feature.column == column}
        if column is not None and role not in roles:
            raise ValueError(
                f"`features` must encode the event's {role} column {column!r} (role {role})"
            )


def used_sources(config: BuildConfig) -> tuple[str, ...]:
    """Returns the sources that a build reads, each once, the event log first."""
    return tuple(dict.fromkeys((*_joined_sources(config), *sorted(config.contract.sources))))


def _joined_sources(config: BuildConfig) -> tuple[str, ...]:
    """The sources that records are made of."""
    conversion = config.label.conversion if config.label else None
    used = [
        config.events.source,
        config.split.test_source,
        config.split.validation_source,
        *(join.source for join in config.joins),
        conversion.source if conversion else None,
    ]
    return tuple(dict.fromkeys(name for name in used if name))


def _check_events(config: BuildConfig, source: str) -> None:
    """User, item and time, where declared, stand in every event: a null could be placed nowhere."""
    events, declared = config.events, config.sources[source]
    if events.time is None and not declared.has_order:
        raise ValueError(
            f"events.time: rows of {source!r} have no order of their own (format "
            f"{declared.format}); name the column of their time"
        )
    wanted = {"user": events.user, "item": events.item, "time": events.time}
    for part, name in wanted.items():
        column = declared.column(name) if name is not None else None
        if name is None or (part == "time" and source != events.source and column is None):
            continue  # A given test event without a time comes after the whole log.
        if column is None:
            raise ValueError(
                f"events.{part}: source {source!r} has no column {name!r}; it has "
                f"{', '.join(declared.column_types)}"
            )
        if column.nullable:
            raise ValueError(f"events.{part}: column {name!r} of {source!r} must not be nullable")
        allowed = ("int64", "timestamp") if part == "time" else ("int64", "string")
        if column.type not in allowed:
            raise ValueError(
                f"events.{part}: column {name!r} of {source!r} is {column.type}; it must be "
                f"{' or '.join(allowed)}"
            )
        if column.type == "timestamp" and events.time_unit != "ms":
            raise ValueError(
                f"events.time: timestamps such as {name!r} are read as milliseconds; set "
                "`events.time_unit: ms`"
            )
        expected = config.sources[events.source].column_types.get(name)
        if column.read_type != expected:
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
    made += [name for name in (config.label_name, config.weight_name) if name]
    made += [config.negatives.probability] if config.negatives else []
    made += [config.down_sampling.name] if config.down_sampling else []
    made += ["candidates"] if config.split.candidates else []
    clashing = sorted({n.lower() for n in made} & {n.lower() for n in known})
    if clashing or len(made) != len({n.lower() for n in made}):
        raise ValueError(
            f"columns that the build makes are there already: {', '.join(clashing or made)}; "
            "rename the sources' columns, or set the `name` of history, histories, sessions, "
            "rolling and label"
        )
