"""Checks of what the parts of a build config say of each other, before anything is read.

Events and joins, histories and windowed features, labels, splits, negatives and weights, and
the data contract; each function raises ValueError, which pydantic turns into a config error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from conf.errors import did_you_mean
from conf.etl.contract import (
    NUMERIC_TYPES,
    ContractValueRule,
    DomainRule,
    DriftRule,
    FreshnessRule,
    RangeRule,
    ReferencesRule,
    RuleConfig,
    TypeRule,
    UniqueRule,
    VolumeRule,
)
from conf.etl.events import EventConditionConfig, JoinConfig, RollingConfig
from conf.etl.sources import is_list_type

if TYPE_CHECKING:
    from conf.etl.build import BuildConfig
    from conf.etl.labels import ConversionConfig


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
    check_examples(config)
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
    check_histories(config, known)
    made = [*made_history_columns(config)]
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


_TIME_TYPES = ("int64", "timestamp")
_NUMBER_TYPES = ("int64", "float32", "float64", "timestamp")


def made_history_columns(config: BuildConfig) -> tuple[str, ...]:
    """Returns the columns that histories, sessions and rolling features make, repeats kept."""
    sessions = config.sessions
    return (
        *(name for history in config.histories for name in history.made),
        *((sessions.id_column, sessions.position_column) if sessions else ()),
        *(rolling.name for rolling in config.rolling),
    )


def check_histories(config: BuildConfig, known: Mapping[str, str]) -> None:
    """Checks histories, sessions and rolling features against the columns of the events.

    Args:
        config: The build's config.
        known: Type of each column of the log and its dictionaries.

    Raises:
        ValueError: A column is missing or of a type that cannot play its part, or event times
            are needed and not there.
    """
    if (config.histories or config.sessions) and not (config.events.user and config.events.item):
        raise ValueError("histories and sessions need events.user and events.item")
    for history in config.histories:
        where = f"histories.{history.name}"
        _check_where(where, history.where, known)
        for column in history.columns:
            _check_carried(config, where, column, known)
        if history.within_session and config.sessions is None:
            raise ValueError(f"{where}.within_session: the config declares no `sessions`")
    for rolling in config.rolling:
        _check_rolling(rolling, known)
    _check_event_times(config)


def check_as_of(config: BuildConfig, join: JoinConfig) -> None:
    """Checks the time columns of a dictionary that is joined as of the event's time.

    Raises:
        ValueError: A column is missing, no time, or may be null where it must not.
    """
    if join.as_of is None:
        return
    dictionary = config.sources[join.source]
    for name in join.as_of.columns:
        column = dictionary.column(name)
        if column is None or column.type not in _TIME_TYPES:
            raise ValueError(
                f"join with {join.source!r}: `as_of` needs an int64 column {name!r}; it is "
                f"{column.type if column else 'not declared'}"
            )
        if column.nullable and name != join.as_of.valid_to:
            raise ValueError(
                f"join with {join.source!r}: column {name!r} must not be nullable: an entry "
                "without a time could be placed nowhere"
            )


def _check_where(
    where: str, condition: EventConditionConfig | None, known: Mapping[str, str]
) -> None:
    if condition is None:
        return
    kind = _event_column_type(f"{where}.where.column", condition.column, known)
    if condition.at_least is not None and kind not in _NUMBER_TYPES:
        raise ValueError(
            f"{where}.where: `at_least` needs a number; {condition.column!r} is {kind}"
        )
    if condition.one_of is None:
        return
    python_type = {"int64": int, "string": str}.get(kind)
    wrong = [v for v in condition.one_of if python_type is None or not isinstance(v, python_type)]
    if wrong:
        raise ValueError(
            f"{where}.where.one_of: {wrong[0]!r} is no value of {condition.column!r}, which is "
            f"{kind}; `one_of` takes values of int64 and string columns"
        )


def _check_carried(config: BuildConfig, where: str, column: str, known: Mapping[str, str]) -> None:
    kind = _event_column_type(f"{where}.columns", column, known)
    if is_list_type(kind):
        raise ValueError(
            f"{where}.columns: {column!r} is {kind}; a list of lists cannot be carried"
        )
    if kind.startswith("float") and column in _nullable_columns(config):
        raise ValueError(
            f"{where}.columns: {column!r} is {kind} and may be null, which a list of numbers "
            "cannot hold; make the column not nullable, and its join not `unmatched: keep`"
        )


def _nullable_columns(config: BuildConfig) -> set[str]:
    sources = [(config.events.source, False)]
    sources += [(join.source, join.unmatched == "keep") for join in config.joins]
    return {
        column.name
        for name, unmatched in sources
        for column in config.sources[name].columns
        if column.nullable or unmatched
    }


def _check_rolling(rolling: RollingConfig, known: Mapping[str, str]) -> None:
    where = f"rolling.{rolling.name}"
    for key in rolling.keys:
        kind = _event_column_type(f"{where}.keys", key, known)
        if kind not in ("int64", "string"):
            raise ValueError(f"{where}.keys: {key!r} is {kind}; keys are int64 or string")
    _check_where(where, rolling.where, known)
    if rolling.rate:
        _check_where(f"{where}.rate", rolling.rate.out_of, known)


def _event_column_type(where: str, column: str, known: Mapping[str, str]) -> str:
    if column not in known:
        raise ValueError(
            f"{where}: neither the log nor a dictionary has a column {column!r}; "
            f"{did_you_mean(column, known)}"
        )
    return known[column]


def _check_event_times(config: BuildConfig) -> None:
    """What is measured in time needs the time of every event, given test events included."""
    for part in _timed_parts(config):
        if config.events.time is None:
            raise ValueError(f"{part} needs event times: declare events.time")
        test = config.split.test_source
        if test is not None and config.sources[test].column(config.events.time) is None:
            raise ValueError(
                f"{part} needs event times: source {test!r} of the given test events has no "
                f"column {config.events.time!r}"
            )


def _timed_parts(config: BuildConfig) -> Iterator[str]:
    yield from (f"histories.{history.name}" for history in config.histories if history.needs_time)
    yield from ("sessions",) if config.sessions else ()
    yield from (f"rolling.{rolling.name}" for rolling in config.rolling)
    yield from (f"joins.{join.source}.as_of" for join in config.joins if join.as_of)


_LABEL_TYPES = ("int64", "float32", "float64")


def check_examples(config: BuildConfig) -> None:
    """Checks what makes samples of events.

    Raises:
        ValueError: A part asks for users, items, times, labels or columns that there are not.
    """
    _check_brought_history(config)
    _check_label(config)
    _check_candidates(config)
    _check_split(config)
    _check_negatives(config)
    _check_weights(config)


def _log_types(config: BuildConfig) -> dict[str, str]:
    return config.sources[config.events.source].column_types


def _describe(config: BuildConfig, column: str | None) -> str:
    source = config.events.source
    return f"{column!r} is {_log_types(config).get(column or '', 'not declared')} in {source!r}"


def _check_brought_history(config: BuildConfig) -> None:
    events = config.events
    for part, asked in (("history", config.history is not None), ("seen", config.seen)):
        if asked and not events.has_behaviour:
            raise ValueError(
                f"`{part}` needs events.user and events.item: rows without them have no past to "
                "look up; leave it out, or name the log's own list column by events.history"
            )
    if events.history is None:
        return
    if config.history is not None:
        raise ValueError("events.history and `history` are two histories; set `history: null`")
    wanted = f"list<{_log_types(config)[events.item or '']}>"
    if _log_types(config).get(events.history) != wanted:
        raise ValueError(
            f"events.history: {_describe(config, events.history)}; it must be {wanted}"
        )


def _check_label(config: BuildConfig) -> None:
    label = config.label
    if label is None:
        return
    if label.conversion is not None:
        _check_conversion(config, label.conversion)
        return
    kind = _log_types(config).get(label.column or "")
    if label.values:
        text = all(isinstance(value, str) for value in label.values)
        number = not any(isinstance(value, str) for value in label.values)
        if not (text if kind == "string" else number and kind in _LABEL_TYPES):
            raise ValueError(
                f"label.column: {_describe(config, label.column)}; the values of equals or one_of "
                f"must be of its type, received {', '.join(map(repr, label.values))}"
            )
    elif kind not in _LABEL_TYPES:
        raise ValueError(
            f"label.column: {_describe(config, label.column)}; "
            f"it must be {' or '.join(_LABEL_TYPES)}"
        )


def _check_conversion(config: BuildConfig, conversion: ConversionConfig) -> None:
    if config.events.time is None:
        raise ValueError("label.conversion needs events.time: the window starts at the event")
    types = config.sources[conversion.source].column_types
    if types.get(conversion.time) != _log_types(config)[config.events.time]:
        raise ValueError(
            f"label.conversion.time: {conversion.time!r} is "
            f"{types.get(conversion.time, 'not declared')} in {conversion.source!r}; it must be of "
            f"the type of events.time, {_log_types(config)[config.events.time]}"
        )
    for column, other in conversion.keys.items():
        kind = _log_types(config).get(column)
        if kind is None or is_list_type(kind) or types.get(other) != kind:
            raise ValueError(
                f"label.conversion.keys: {_describe(config, column)}, {other!r} is "
                f"{types.get(other, 'not declared')} in {conversion.source!r}; both must be there, "
                "of one type, not lists"
            )


def _check_candidates(config: BuildConfig) -> None:
    if config.split.candidates is None:
        return
    if config.events.item is None:
        raise ValueError("split.candidates are items: they need events.item")
    declared = config.sources[config.split.test_source or ""].column_types
    wanted = f"list<{_log_types(config)[config.events.item]}>"
    if declared.get(config.split.candidates) != wanted:
        raise ValueError(
            f"split.candidates: {config.split.candidates!r} is "
            f"{declared.get(config.split.candidates, 'not declared')} in "
            f"{config.split.test_source!r}; it must be {wanted}"
        )


def _check_split(config: BuildConfig) -> None:
    split, events = config.split, config.events
    if split.strategy == "leave_one_out" and events.user is None:
        raise ValueError(
            "split.strategy leave_one_out needs events.user; without users use hash, temporal, "
            "sliding or given"
        )
    if split.strategy in ("temporal", "sliding") and events.time is None:
        raise ValueError(
            f"split.strategy {split.strategy} needs events.time; without times use hash or given"
        )
    if split.validation_users is not None and events.user is None:
        raise ValueError("split.validation_users needs events.user")
    if split.key is None:
        return
    column = config.sources[events.source].column(split.key)
    if column is None or column.nullable or column.is_list:
        raise ValueError(
            f"split.key: {_describe(config, split.key)}; it must be a column of the log, neither "
            "nullable nor a list"
        )


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
    if negatives.category is None:
        return
    of_item = {
        column.name: column.type
        for join in config.joins
        if join.column == events.item
        for column in config.sources[join.source].columns
    }
    if is_list_type(of_item.get(negatives.category, "list<")):
        raise ValueError(
            f"negatives.category: {negatives.category!r} is "
            f"{of_item.get(negatives.category, 'not there')}; it must be a scalar column of a "
            f"dictionary joined on {events.item!r}: {', '.join(of_item) or 'there is none'}"
        )


def _check_exposures(config: BuildConfig, within: str | None) -> None:
    if config.label is None or config.label.graded:
        raise ValueError("negatives.strategy exposure needs a label of 0 and 1")
    if config.down_sampling is not None:
        raise ValueError(
            "negatives.strategy exposure samples the log's negatives: no down_sampling"
        )
    group = within or config.events.user
    if group is None or is_list_type(_log_types(config).get(group, "list<")):
        raise ValueError(
            f"negatives.within: {_describe(config, group)}; it must be a column of the log that "
            "tells what was shown together, not a list"
        )


def _check_weights(config: BuildConfig) -> None:
    weights = config.weights
    if config.down_sampling is not None and (config.label is None or config.label.graded):
        raise ValueError("down_sampling needs a label of 0 and 1")
    if weights is None:
        return
    by_class = weights.positive is not None or weights.negative is not None
    if by_class and config.label_name is None:
        raise ValueError("weights.positive and weights.negative need a label")
    if weights.half_life_days is not None and config.events.time is None:
        raise ValueError("weights.half_life_days needs events.time")
    if weights.column is not None and _log_types(config).get(weights.column) not in _LABEL_TYPES:
        raise ValueError(
            f"weights.column: {_describe(config, weights.column)}; it must be "
            f"{' or '.join(_LABEL_TYPES)}"
        )


CONTRACT_SPLITS = ("train", "validation", "test", "catalog", "users")
_MADE_FEATURES = ("seen", "candidates")


def check_contract_references(config: BuildConfig) -> None:
    """Checks every source, column, feature and split that the contract names.

    Raises:
        ValueError: One is not declared, or cannot play the part it is given.
    """
    features = {feature.name for feature in config.features} | set(_MADE_FEATURES)
    features |= {config.label.name} if config.label else set()
    for name in config.contract.slices:
        _require("contract.slices", "feature", name, features)
    if config.contract.slices and config.label is None:
        raise ValueError("contract.slices: there is no label whose rate could be kept by slice")
    for index, rule in enumerate(config.contract.rules):
        _check_rule(config, f"contract.rules[{index}] ({rule.kind})", rule, features)


def _check_rule(config: BuildConfig, where: str, rule: RuleConfig, features: set[str]) -> None:
    if isinstance(rule, ContractValueRule | DriftRule | VolumeRule) and rule.split is not None:
        _require(where, "split", rule.split, CONTRACT_SPLITS)
    if isinstance(rule, ContractValueRule | DriftRule) and rule.feature is not None:
        _require(where, "feature", rule.feature, features)
        _check_rule_feature(config, where, rule)
        return
    source = getattr(rule, "source", None)
    if source is None:
        return
    _require(where, "source", source, config.sources)
    declared = config.sources[source].column_types
    columns = rule.columns if isinstance(rule, UniqueRule) else [getattr(rule, "column", None)]
    for column in columns:
        if column is not None:
            _require(where, f"column of source {source!r}", column, declared)
            _check_rule_column(config, where, rule, column, declared[column])


def _check_rule_column(
    config: BuildConfig, where: str, rule: RuleConfig, column: str, kind: str
) -> None:
    element = kind.removeprefix("list<").removesuffix(">")
    if isinstance(rule, TypeRule) and rule.type != kind:
        raise ValueError(f"{where}: column {column!r} is declared as {kind}, not {rule.type}")
    if isinstance(rule, RangeRule | FreshnessRule) and element not in NUMERIC_TYPES:
        raise ValueError(f"{where}: column {column!r} is {kind}, not a number")
    if isinstance(rule, DomainRule) and element != "string":
        others = [value for value in rule.one_of if isinstance(value, str)]
        if others:
            raise ValueError(f"{where}: column {column!r} is {kind}; one_of holds {others[0]!r}")
    if isinstance(rule, UniqueRule | ReferencesRule | FreshnessRule) and kind != element:
        raise ValueError(f"{where}: column {column!r} is a list")
    if isinstance(rule, ReferencesRule):
        _require(where, "dictionary", rule.dictionary, config.sources)
        dictionary = config.sources[rule.dictionary]
        key = None if dictionary.key is None else dictionary.column_types[dictionary.key]
        if key != kind:
            raise ValueError(
                f"{where}: column {column!r} is {kind}, the key of {rule.dictionary!r} is "
                f"{key or 'not declared'}"
            )


def _check_rule_feature(
    config: BuildConfig, where: str, rule: ContractValueRule | DriftRule
) -> None:
    declared = next((f for f in config.features if f.name == rule.feature), None)
    is_id = declared is not None and declared.encoding.kind == "vocabulary"
    wants_numbers = isinstance(rule, RangeRule) or (
        isinstance(rule, DriftRule) and rule.metric == "ks"
    )
    if is_id and wants_numbers:
        raise ValueError(
            f"{where}: feature {rule.feature!r} holds ids of a vocabulary, which have no order; "
            "use domain, null_rate, or drift by psi or js"
        )


def _require(where: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: no such {what}: {name!r}; {did_you_mean(name, known)}")
