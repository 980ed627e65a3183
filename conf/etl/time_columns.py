"""Time columns of a build: which columns hold times, and in which unit.

Each column says its unit where its source is declared: a timestamp is read as milliseconds since
1970, a whole number is in seconds unless its `unit` says milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from conf.etl.encodings import CrossConfig, CyclicalConfig, DatePartConfig, FeatureConfig
from conf.etl.split import SplitConfig

if TYPE_CHECKING:
    from conf.etl.build import BuildConfig

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

TimeUse = Literal["event", "conversion", "entry", "end", "feature", "rule"]
_Parts = Mapping[str, Any]
"""The validated parts of a build config by key; one that is wrong is missing."""


@dataclass(frozen=True)
class TimeColumn:
    """A column of a source that a part of the config reads as times.

    Attributes:
        source: The source.
        column: The column, by the name that the source declares.
        unit: `s`, `ms`, or `us` where an encoding says so.
        use: `event`, `conversion`, `entry` (from when a dictionary's entry counts), `end` (of its
            validity), `feature` or `rule` of the contract.
        key: Where the config says the unit.
    """

    source: str
    column: str
    unit: str
    use: TimeUse
    key: str

    @property
    def name(self) -> str:
        """The column with its source, as messages name it."""
        return f"{self.source}.{self.column}"


def settle_split(split: SplitConfig, known: _Parts) -> SplitConfig:
    """Writes dates and timestamps as numbers in the unit of the log, which they are compared in."""
    events = known.get("events")
    if events is None or events.time is None or events.source not in known.get("sources", ()):
        return split
    given = {"validation": split.validation, "test": split.test}
    unit = timedelta(milliseconds=known["sources"][events.source].ms_per_unit(events.time))
    numbers = {
        # Rounded up: what a coarser unit cannot say begins with its next number.
        key: -((_EPOCH - _in_utc(bound)) // unit)
        for key, bound in given.items()
        if isinstance(bound, datetime)
    }
    return split.model_copy(update=numbers)


def _in_utc(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def settle_feature(feature: FeatureConfig, known: _Parts) -> FeatureConfig:
    """Fills in the units of dates that an encoding leaves out: that of the column that it reads."""
    encoding = feature.encoding
    if isinstance(encoding, DatePartConfig | CyclicalConfig):
        settled: Any = _settle_date(encoding, feature.column, known)
    elif isinstance(encoding, CrossConfig):
        prepared = {
            column: _settle_date(part, column, known) if isinstance(part, DatePartConfig) else part
            for column, part in encoding.prepared.items()
        }
        settled = cast(Any, encoding).model_copy(update={"prepared": prepared})
    else:
        return feature
    return feature.model_copy(update={"encoding": settled})


def _settle_date(encoding: Any, column: str, known: _Parts) -> Any:
    if encoding.unit is not None:
        return encoding
    origin = _find_origin(known, column)
    unit = "ms" if origin is None else known["sources"][origin[0]].time_unit(origin[1])
    return encoding.model_copy(update={"unit": unit})


def _find_origin(known: _Parts, column: str) -> tuple[str, str] | None:
    """The source and column that a column of the samples has its values of; None: it is made."""
    events, sources = known.get("events"), known.get("sources") or {}
    if events is None:
        return None
    for history in known.get("histories", ()):
        for carried in history.columns:
            if column == history.carried(carried):
                return _find_origin(known, carried)
    for counted in known.get("most_frequent", ()):
        if column == counted.name:
            return _find_origin(known, counted.column)
    named = (events.source, *(join.source for join in known.get("joins", ())))
    return next(((s, column) for s in named if s in sources and sources[s].column(column)), None)


def find_time_columns(config: BuildConfig) -> tuple[TimeColumn, ...]:
    """Lists every column of a source that the build reads as times, once for each reader."""
    return tuple(_list_columns(config))


def _list_columns(config: BuildConfig) -> Iterator[TimeColumn]:
    def declared(source: str, column: str, use: TimeUse) -> TimeColumn:
        unit = config.sources[source].time_unit(column)
        return TimeColumn(source, column, unit, use, f"sources.{source}.columns, {column}")

    events, split = config.events, config.split
    for source in (events.source, split.validation_source, split.test_source):
        if source and events.time is not None and config.sources[source].column(events.time):
            yield declared(source, events.time, "event")
    for join in config.joins:
        as_of = join.as_of
        for column in as_of.columns if as_of is not None else ():
            is_end = as_of is not None and column == as_of.valid_to
            yield declared(join.source, column, "end" if is_end else "entry")
    for label in config.all_labels:
        if label.conversion is not None:
            yield declared(label.conversion.source, label.conversion.time, "conversion")
    for feature in config.features:
        for column, encoding in _dates_of(feature):
            if origin := _find_origin(dict(config), column):
                key = f"features.{feature.name}.encoding"
                yield TimeColumn(*origin, encoding.unit or "ms", "feature", key)
    for rule in config.contract.rules:
        if rule.kind == "freshness":
            yield declared(str(rule.source), rule.columns[0], "rule")


def _dates_of(feature: FeatureConfig) -> list[tuple[str, DatePartConfig | CyclicalConfig]]:
    encoding = feature.encoding
    if isinstance(encoding, DatePartConfig | CyclicalConfig):
        return [(feature.column, encoding)]
    prepared = encoding.prepared.items() if isinstance(encoding, CrossConfig) else ()
    return [(column, part) for column, part in prepared if isinstance(part, DatePartConfig)]


def check_time_units(config: BuildConfig) -> None:
    """Refuses two units of one time: of a column and an encoding, or of the log and given events.

    Raises:
        ValueError: Names the column, and both units.
    """
    events = config.events
    for time in find_time_columns(config):
        source = config.sources[time.source]
        column, unit = source.column(time.column), source.time_unit(time.column)
        is_said = column is not None and (column.unit or column.element_type == "timestamp")
        if time.use == "event" and events.time is not None:
            unit, is_said = config.sources[events.source].time_unit(events.time), True
        if is_said and time.unit != unit:
            raise ValueError(f"{time.key}: {time.name} is in {time.unit} here, and in {unit} else")
