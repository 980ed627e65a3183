"""Checks of what histories, sessions, rolling features and as-of joins say of other parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from conf.errors import did_you_mean
from conf.etl.columns import is_list_type
from conf.etl.histories import RollingConfig, WhereConfig
from conf.etl.joins import JoinConfig

if TYPE_CHECKING:
    from conf.etl import BuildConfig

_TIMES = ("int64", "timestamp")
_NUMBERS = ("int64", "float32", "float64", "timestamp")


def made_names(config: BuildConfig) -> tuple[str, ...]:
    """Returns the columns that histories, sessions and rolling features make, repeats kept."""
    sessions = config.sessions
    return (
        *(name for history in config.histories for name in history.made),
        *((sessions.id_column, sessions.position_column) if sessions else ()),
        *(rolling.name for rolling in config.rolling),
    )


def check_behaviours(config: BuildConfig, known: Mapping[str, str]) -> None:
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
    _check_times(config)


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
        if column is None or column.type not in _TIMES:
            raise ValueError(
                f"join with {join.source!r}: `as_of` needs an int64 column {name!r}; it is "
                f"{column.type if column else 'not declared'}"
            )
        if column.nullable and name != join.as_of.valid_to:
            raise ValueError(
                f"join with {join.source!r}: column {name!r} must not be nullable: an entry "
                "without a time could be placed nowhere"
            )


def _check_where(where: str, condition: WhereConfig | None, known: Mapping[str, str]) -> None:
    if condition is None:
        return
    kind = _type_of(f"{where}.where.column", condition.column, known)
    if condition.at_least is not None and kind not in _NUMBERS:
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
    kind = _type_of(f"{where}.columns", column, known)
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
        kind = _type_of(f"{where}.keys", key, known)
        if kind not in ("int64", "string"):
            raise ValueError(f"{where}.keys: {key!r} is {kind}; keys are int64 or string")
    _check_where(where, rolling.where, known)
    if rolling.rate:
        _check_where(f"{where}.rate", rolling.rate.out_of, known)


def _type_of(where: str, column: str, known: Mapping[str, str]) -> str:
    if column not in known:
        raise ValueError(
            f"{where}: neither the log nor a dictionary has a column {column!r}; "
            f"{did_you_mean(column, known)}"
        )
    return known[column]


def _check_times(config: BuildConfig) -> None:
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
