"""Checks of what the parts of a build config say of each other, before anything is read.

Events and joins, histories and windowed features, labels, splits, negatives and weights;
each function raises ValueError, which pydantic turns into a config error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import did_you_mean
from conf.etl.events import SESSION_ID, SESSION_POSITION, EventConditionConfig, JoinConfig
from conf.etl.labels import KEEP_RATE
from conf.etl.sources import NUMBER_TYPES, SCALAR_TYPES, is_list_type

if TYPE_CHECKING:
    from conf.etl.build import BuildConfig
    from conf.etl.labels import ConversionConfig, LabelConfig

_KEY_TYPES = ("int64", "string")
_TIME_TYPES = ("int64", "timestamp")
EVALUATION_FEATURES = ("seen", "candidates", "event_number")


@dataclass(frozen=True)
class Columns:
    """The columns that a part of the config may name.

    Attributes:
        origin: Where they come from, as messages name it.
        types: Type by name.
        nullable: Names of those that may be null.
    """

    origin: str
    types: Mapping[str, str]
    nullable: Collection[str] = ()

    def require(
        self, where: str, name: str | None, allowed: Collection[str] = (), *, nullable: bool = True
    ) -> str:
        """Returns the type of a column.

        Args:
            where: Key of the config that names the column, for the message.
            name: The column.
            allowed: The types that it may have; empty for any.
            nullable: Whether it may be null.

        Raises:
            ValueError: There is no such column, or it has another type or nulls.
        """
        kind = self.types.get(name or "")
        if kind is None:
            fix = did_you_mean(name or "", self.types) if self.types else "there are none"
            raise ValueError(f"{where}: {name!r} is not declared in {self.origin}; {fix}")
        if allowed and kind not in allowed:
            raise ValueError(
                f"{where}: {name!r} is {kind} in {self.origin}; it must be {' or '.join(allowed)}"
            )
        if not nullable and name in self.nullable:
            raise ValueError(f"{where}: {name!r} of {self.origin} must not be nullable")
        return kind


def source_columns(config: BuildConfig, source: str, *, declared: bool = False) -> Columns:
    """The columns of a source, with the types that they are read as, or those `declared`."""
    outputs = config.sources[source].outputs
    types = {column.name: column.type if declared else column.read_type for column in outputs}
    return Columns(repr(source), types, {column.name for column in outputs if column.nullable})


def _log_columns(config: BuildConfig) -> Columns:
    return source_columns(config, config.events.source)


def _event_columns(config: BuildConfig, joins: Collection[JoinConfig]) -> Columns:
    """The columns of the log and of the dictionaries of some joins."""
    log = _log_columns(config)
    types, nullable = dict(log.types), set(log.nullable)
    for join in joins:
        types.update(join.added_columns(config.sources[join.source]))
        dictionary = source_columns(config, join.source)
        nullable.update(dictionary.types if join.unmatched == "keep" else dictionary.nullable)
    return Columns("the log and its dictionaries", types, nullable)


def check_references(config: BuildConfig) -> None:
    """Checks every name that one part of the config uses of another, before anything is read.

    Raises:
        ValueError: A source or column is not declared, or cannot play the part it is given.
    """
    # What the contract names is checked with the contract, rule by rule.
    unknown = sorted(set(_joined_sources(config)) - set(config.sources))
    if unknown:
        shown = ", ".join(name or "''" for name in unknown)
        raise ValueError(f"not declared under `sources`: {shown}")
    for source in (config.events.source, config.split.test_source, config.split.validation_source):
        if source is not None:
            _check_events(config, source)
    _check_joins(config)
    _check_histories(config)
    _check_made_columns(config)
    _check_times(config)
    _check_examples(config)
    for role, column in (("user", config.events.user), ("item", config.events.item)):
        roles = {feature.role for feature in config.features if feature.column == column}
        if column is not None and role not in roles:
            raise ValueError(
                f"`features` must encode the event's {role} column {column!r} (role {role})"
            )


def find_used_sources(config: BuildConfig) -> tuple[str, ...]:
    """Returns the names of the sources that a build reads, each once, the event log first."""
    return tuple(dict.fromkeys((*_joined_sources(config), *sorted(config.contract.sources))))


def _joined_sources(config: BuildConfig) -> tuple[str, ...]:
    """The sources that records are made of."""
    conversions = [label.conversion for label in config.all_labels if label.conversion]
    used = [
        config.events.source,
        config.split.test_source,
        config.split.validation_source,
        *(join.source for join in config.joins),
        *(conversion.source for conversion in conversions),
    ]
    return tuple(dict.fromkeys(name for name in used if name is not None))


def _check_events(config: BuildConfig, source: str) -> None:
    """User, item and time are of every event: one with a null could not be ordered or counted.

    Only with `events.where` may the item be null: such an event is no sample.
    """
    events = config.events
    if events.time is None and not config.sources[source].has_order:
        raise ValueError(
            f"events.time: rows of {source!r} have no order of their own (format "
            f"{config.sources[source].format}); name the column of their time"
        )
    columns = source_columns(config, source, declared=True)
    named = {"user": events.user, "item": events.item, "time": events.time}
    if events.item is not None and events.item not in _log_columns(config).types:
        joined = _event_columns(config, config.joins)
        joined.require("events.item", named.pop("item"), _KEY_TYPES, nullable=bool(events.where))
    for part, name in named.items():
        given_without_time = source != events.source and name not in columns.types
        if name is None or (part == "time" and given_without_time):
            continue  # A given test event without a time comes after the whole log.
        where, allowed = f"events.{part}", _TIME_TYPES if part == "time" else _KEY_TYPES
        may_be_null = part == "item" and events.where is not None
        columns.require(where, name, allowed, nullable=may_be_null)
        source_columns(config, source).require(where, name, (_log_columns(config).types[name],))
    _check_same_types(config, source)


def _check_same_types(config: BuildConfig, source: str) -> None:
    """Columns of given events that the log has too stand below each other: as one type."""
    log = {name.lower(): kind for name, kind in _log_columns(config).types.items()}
    if source == config.split.test_source:
        log.pop((config.split.candidates or "").lower(), None)  # Read under a name of its own.
    other = [
        f"{name!r} is {kind}, in the log {log[name.lower()]}"
        for name, kind in source_columns(config, source).types.items()
        if log.get(name.lower(), kind) != kind
    ]
    if other:
        raise ValueError(
            f"source {source!r} of given events has columns of another type than the log "
            f"{config.events.source!r}: {'; '.join(other)}; declare both as one type, or give "
            "one another name"
        )


def _check_joins(config: BuildConfig) -> None:
    """Join columns exist with the key's type; no two sources bring a column of one name."""
    for number, join in enumerate(config.joins):
        where = f"join with {join.source!r}"
        known = _event_columns(config, config.joins[:number])
        check_key(config, where, known, join.column, join.source)
        added = join.added_columns(config.sources[join.source])
        clashing = sorted({n.lower() for n in added} & {n.lower() for n in known.types})
        if clashing:
            raise ValueError(
                f"dictionary {join.source!r} has columns that the event already has: "
                f"{', '.join(clashing)}; rename them in sources.{join.source}.columns"
            )
        if join.as_of is not None:
            dictionary = source_columns(config, join.source, declared=True)
            for name in join.as_of.columns:
                nullable = name == join.as_of.valid_to
                dictionary.require(where, name, _TIME_TYPES, nullable=nullable)


def check_key(
    config: BuildConfig, where: str, columns: Columns, name: str, dictionary: str
) -> None:
    """Checks that a column has the type of the key that it is looked up by."""
    key = config.sources[dictionary].key
    if key is None:
        raise ValueError(f"{where}: dictionaries need a `key`: {dictionary}")
    kind, expected = columns.require(where, name), config.sources[dictionary].column_types[key]
    if kind != expected:
        raise ValueError(
            f"{where}: column {name!r} is {kind}; in {dictionary!r} the key {key!r} is {expected}; "
            "declare both as one type"
        )


def _check_made_columns(config: BuildConfig) -> None:
    """No column that the build makes has the name of another."""
    made = [*_made_columns(config)]
    names = {name.lower() for name in made}
    # A label may take the place of the column that it is made of.
    own = {label.name.lower() for label in config.all_labels if label.name == label.column}
    clashing = (names - own) & {name.lower() for name in config.event_column_types}
    repeated = {name for name, count in Counter(map(str.lower, made)).items() if count > 1}
    if clashing or repeated:
        raise ValueError(
            "columns that the build makes are there already: "
            f"{', '.join(sorted(clashing or repeated))}; "
            "rename the sources' columns, or set the `name` of histories, rolling and label"
        )


def _made_columns(config: BuildConfig) -> Iterator[str]:
    """The columns that the build adds to the events, repeats kept."""
    for history in config.histories:
        yield from history.made
    if config.session_gap_minutes:
        yield from (SESSION_ID, SESSION_POSITION)
    yield from (rolling.name for rolling in config.rolling)
    yield from (counted.name for counted in config.most_frequent)
    if config.down_sampling is not None:
        yield KEEP_RATE
    yield from (name for name in (config.label_name, config.weight_name) if name)
    yield from (label.name for label in config.further_labels)
    if config.negatives:
        yield config.negatives.probability
    asked = (config.seen, config.split.candidates is not None, config.seen_where is not None)
    yield from (name for name, is_asked in zip(EVALUATION_FEATURES, asked, strict=True) if is_asked)


def _check_histories(config: BuildConfig) -> None:
    """Histories, sessions and rolling features name columns of the events that suit them."""
    columns = _event_columns(config, config.joins)
    if (config.histories or config.session_gap_minutes) and not config.events.has_user_histories:
        raise ValueError(
            "`histories` and `session_gap_minutes` need events.user and events.item: rows without "
            "them have no past; name the log's own list column by events.history"
        )
    for history in config.histories:
        where = f"histories.{history.name}"
        _check_condition(where, history.where, columns)
        for column in history.columns:
            _check_carried(f"{where}.columns", column, columns)
        if history.within_session and config.session_gap_minutes is None:
            raise ValueError(f"{where}.within_session: it needs `session_gap_minutes`")
    for counted in config.most_frequent:
        where = f"most_frequent.{counted.name}"
        if config.events.item is None:
            raise ValueError(f"{where} is a list for each item: it needs events.item")
        columns.require(f"{where}.column", counted.column, _KEY_TYPES)
        if counted.column == config.events.item:
            raise ValueError(f"{where}.column is the item itself")
    for rolling in config.rolling:
        where = f"rolling.{rolling.name}"
        for key in rolling.keys:
            kind = columns.require(f"{where}.keys", key)
            if kind not in _KEY_TYPES:
                raise ValueError(f"{where}.keys: {key!r} is {kind}; keys are int64 or string")
        _check_condition(where, rolling.where, columns)
        _check_condition(f"{where}.out_of", rolling.out_of, columns)


def _check_condition(where: str, condition: EventConditionConfig | None, columns: Columns) -> None:
    if condition is None:
        return
    kind = columns.require(f"{where}.where.column", condition.column)
    if condition.at_least is not None and kind not in NUMBER_TYPES:
        raise ValueError(
            f"{where}.where: `at_least` needs a number; {condition.column!r} is {kind}"
        )
    python_type = {"int64": int, "string": str}.get(kind, ())
    for value in condition.one_of or ():
        if not isinstance(value, python_type):
            raise ValueError(
                f"{where}.where.one_of: {value!r} is no value of {condition.column!r}, which is "
                f"{kind}; `one_of` takes values of int64 and string columns"
            )


def _check_carried(where: str, column: str, columns: Columns) -> None:
    kind = columns.require(where, column)
    if is_list_type(kind):
        raise ValueError(f"{where}: {column!r} is {kind}; a list of lists cannot be carried")
    if kind.startswith("float") and column in columns.nullable:
        raise ValueError(
            f"{where}: {column!r} is {kind} and may be null, which a list of numbers "
            "cannot hold; make the column not nullable, and its join not `unmatched: keep`"
        )


def _check_times(config: BuildConfig) -> None:
    """Parts that measure time need event times; histories need them of given events too."""
    time, split = config.events.time, config.split
    given = {"test": split.test_source, "validation": split.validation_source}
    for part in (*_events_in_time(config), *_examples_in_time(config)):
        if time is None:
            raise ValueError(f"{part} needs event times: declare events.time")
    for part in _events_in_time(config):
        for name, source in given.items():
            if source is not None and time not in config.sources[source].column_types:
                raise ValueError(
                    f"{part} needs event times: source {source!r} of the given {name} events has "
                    f"no column {time!r}"
                )


def _events_in_time(config: BuildConfig) -> Iterator[str]:
    yield from (f"histories.{history.name}" for history in config.histories if history.needs_time)
    yield from ("session_gap_minutes",) if config.session_gap_minutes else ()
    yield from (f"rolling.{rolling.name}" for rolling in config.rolling)
    yield from (f"joins.{join.source}.valid_from" for join in config.joins if join.as_of)


def _examples_in_time(config: BuildConfig) -> Iterator[str]:
    yield from ("label.conversion" for label in config.all_labels if label.conversion)
    if config.split.strategy in ("temporal", "sliding"):
        yield f"split.strategy {config.split.strategy}"
    if config.weights is not None and config.weights.half_life_days is not None:
        yield "weights.half_life_days"


def _check_examples(config: BuildConfig) -> None:
    """Parts that make examples of events name users, items, labels and columns that exist."""
    _check_brought_history(config)
    _check_train_samples(config)
    for label in config.all_labels:
        _check_label(config, label)
    _check_split(config)
    _check_negatives(config)
    _check_weights(config)


def _check_brought_history(config: BuildConfig) -> None:
    events, log = config.events, _log_columns(config)
    if config.seen and not events.has_user_histories:
        raise ValueError("`seen` needs events.user and events.item: rows without have no past")
    if events.history is None:
        return
    log.require("events.history", events.history, ("list<int64>", "list<string>"))


def _check_train_samples(config: BuildConfig) -> None:
    if config.train_samples == "all":
        return
    if not config.events.has_user_histories:
        raise ValueError(
            "train_samples takes the ends of users' sequences: it needs events.user and "
            "events.item; without users each row is a sequence of its own"
        )
    other = "down_sampling" if config.down_sampling is not None else None
    if config.events.where is not None:
        other = "events.where"
    if config.negatives is not None and not config.negatives.draws:
        other = "negatives.strategy exposure"
    if other is not None:
        raise ValueError(f"`train_samples` and `{other}` both choose the rows of train; keep one")


def _check_label(config: BuildConfig, label: LabelConfig) -> None:
    if label.name == label.column:
        _check_sole_reader(config, label.name)
    if label.conversion is not None:
        _check_conversion(config, label.conversion)
        return
    allowed = SCALAR_TYPES if label.values else NUMBER_TYPES
    kind = _log_columns(config).require("label.column", label.column, allowed)
    if any(isinstance(value, str) != (kind == "string") for value in label.values):
        raise ValueError(
            f"label.column: {label.column!r} is {kind}; the values of one_of must be of "
            f"its type, received {', '.join(map(repr, label.values))}"
        )
    fractions = [v for v in label.values if isinstance(v, float) and not v.is_integer()]
    if kind == "int64" and fractions:
        raise ValueError(
            f"label.column: {label.column!r} is int64, so no row can be {fractions[0]!r}; "
            "name whole numbers, or use at_least"
        )


def _check_sole_reader(config: BuildConfig, column: str) -> None:
    """Nothing else reads a column that its label takes the place of: it would read the label."""
    readers: dict[str, Collection[str | None]] = {
        f"features.{f.name}": f.columns for f in config.features if f.role != "label"
    }
    for history in config.histories:
        where = () if history.where is None else (history.where.column,)
        readers[f"histories.{history.name}"] = (*history.columns, *where)
    for rolling in config.rolling:
        conditions = (rolling.where, rolling.out_of)
        readers[f"rolling.{rolling.name}"] = (
            *rolling.keys,
            *(one.column for one in conditions if one),
        )
    readers |= {f"most_frequent.{m.name}": (m.column,) for m in config.most_frequent}
    readers |= {f"label {o.name}": (o.column,) for o in config.all_labels if o.name != column}
    weights, negatives = config.weights, config.negatives
    readers["weights.column"] = () if weights is None else (weights.column,)
    readers["negatives"] = () if negatives is None else (negatives.within,)
    readers["split.key"] = (config.split.key,)
    readers["seen"] = re.findall(r"\w+", config.seen_where or "")
    places = [place for place, columns in readers.items() if column in columns]
    if places:
        raise ValueError(
            f"the label {column!r} takes the place of its column, which {', '.join(places)} would "
            "read too; give the label another `name`"
        )


def _check_conversion(config: BuildConfig, conversion: ConversionConfig) -> None:
    log, conversions = _log_columns(config), source_columns(config, conversion.source)
    time_type = log.types[config.events.time or ""]
    conversions.require("label.conversion.time", conversion.time, (time_type,))
    for column, other in conversion.keys.items():
        kind = log.require("label.conversion.keys", column, SCALAR_TYPES)
        conversions.require("label.conversion.keys", other, (kind,))


def _check_split(config: BuildConfig) -> None:
    split, events, log = config.split, config.events, _log_columns(config)
    if split.candidates is not None:
        if events.item is None:
            raise ValueError("split.candidates are items: they need events.item")
        given = source_columns(config, split.test_source or "")
        item_type = config.event_column_types[events.item]
        given.require("split.candidates", split.candidates, (f"list<{item_type}>",))
    if split.strategy == "leave_one_out" and events.user is None:
        raise ValueError(
            "split.strategy leave_one_out needs events.user; without users use hash, temporal, "
            "sliding or given"
        )
    if split.validation_users is not None and events.user is None:
        raise ValueError("split.validation: a number of users needs events.user")
    if split.key is not None:
        log.require("split.key", split.key, SCALAR_TYPES, nullable=False)


def _check_negatives(config: BuildConfig) -> None:
    negatives, events = config.negatives, config.events
    if negatives is None:
        return
    if not negatives.draws:
        _check_exposures(config, negatives.within)
        return
    if events.item is None:
        raise ValueError(f"negatives.strategy {negatives.strategy} draws items: needs events.item")
    if negatives.not_seen is not None and events.user is None:
        raise ValueError("negatives.not_seen needs events.user")
    if negatives.within is not None:
        of_item = {
            column.name: column.type
            for join in config.joins
            if join.column == events.item
            for column in config.sources[join.source].columns
        }
        columns = Columns(f"the dictionaries joined on {events.item!r}", of_item)
        columns.require("negatives.within", negatives.within, (*SCALAR_TYPES, "timestamp"))


def _check_exposures(config: BuildConfig, within: str | None) -> None:
    if config.first_label is None or config.first_label.graded:
        raise ValueError("negatives.strategy exposure needs a label of 0 and 1")
    if config.down_sampling is not None:
        raise ValueError("negatives.strategy exposure samples the log: no down_sampling")
    group = within or config.events.user
    if group is None:
        raise ValueError("negatives.within: name the column that tells what was shown together")
    _log_columns(config).require("negatives.within", group, SCALAR_TYPES)


def _check_weights(config: BuildConfig) -> None:
    weights = config.weights
    if config.down_sampling is not None and (
        config.first_label is None or config.first_label.graded
    ):
        raise ValueError("down_sampling needs a label of 0 and 1")
    if weights is None:
        return
    if weights.by_class is not None and config.label_name is None:
        raise ValueError("weights.by_class needs a label")
    if weights.column is not None:
        _log_columns(config).require("weights.column", weights.column, NUMBER_TYPES)
