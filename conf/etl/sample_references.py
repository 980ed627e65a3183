"""Checks of what labels, splits, negatives and weights say of the columns and of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.etl.columns import is_list_type

if TYPE_CHECKING:
    from conf.etl import BuildConfig
    from conf.etl.labels import ConversionConfig

NUMERIC = ("int64", "float32", "float64")


def check_samples(config: BuildConfig) -> None:
    """Checks what makes samples of events.

    Raises:
        ValueError: A part asks for users, items, times, labels or columns that there are not.
    """
    _check_behaviour(config)
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


def _check_behaviour(config: BuildConfig) -> None:
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
        if not (text if kind == "string" else number and kind in NUMERIC):
            raise ValueError(
                f"label.column: {_describe(config, label.column)}; the values of equals or one_of "
                f"must be of its type, received {', '.join(map(repr, label.values))}"
            )
    elif kind not in NUMERIC:
        raise ValueError(
            f"label.column: {_describe(config, label.column)}; it must be {' or '.join(NUMERIC)}"
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
    if weights.column is not None and _log_types(config).get(weights.column) not in NUMERIC:
        raise ValueError(
            f"weights.column: {_describe(config, weights.column)}; it must be "
            f"{' or '.join(NUMERIC)}"
        )
