"""Time columns of a build: which columns hold times, and in which unit.

A unit that the config leaves out follows the column: a timestamp is read as milliseconds since
1970, a column that another part of the config names has that part's unit, and a whole number has
the default that the key documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from conf.dates import UNITS_PER_SECOND
from conf.etl.contract import ContractConfig, FreshnessRule
from conf.etl.encodings import CrossConfig, CyclicalConfig, DatePartConfig, FeatureConfig
from conf.etl.events import EventsConfig, JoinConfig
from conf.etl.labels import LabelConfig
from conf.etl.sources import EPOCH_UNITS, ColumnConfig
from conf.etl.split import SplitConfig

if TYPE_CHECKING:
    from conf.etl.build import BuildConfig

TIMESTAMP_UNIT = "ms"
"""Unit that timestamps are read in."""

SPLIT_BOUNDS = ("validation_from_ts", "test_from_ts")
"""Keys of `split` that hold times of the log."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

TimeUse = Literal["event", "conversion", "entry", "end", "feature", "rule"]
_Parts = Mapping[str, Any]
"""The validated parts of a build config by key; one that is wrong is missing."""


def ms_per_unit(unit: str | None) -> int:
    """Returns the milliseconds of a unit; None is seconds, the default of whole numbers."""
    return 1000 // UNITS_PER_SECOND[unit or "s"]


@dataclass(frozen=True)
class TimeColumn:
    """A column of a source that a part of the config reads as times.

    Attributes:
        key: Key of the config that says the unit.
        source: The source.
        column: The column, by the name that the source declares.
        unit: `s`, `ms` or `us`.
        use: `event`, `conversion`, `entry` (from when a dictionary's entry counts), `end` (of its
            validity), `feature` or `rule` of the contract.
    """

    key: str
    source: str
    column: str
    unit: str
    use: TimeUse

    @property
    def name(self) -> str:
        """The column with its source, as messages name it."""
        return f"{self.source}.{self.column}"


def settle_time_units(key: str, part: Any, known: _Parts) -> Any:
    """Returns a part of a build config with the units filled in that it leaves out.

    Args:
        key: The part's key in the config.
        part: The part.
        known: The parts that stand before it.
    """
    if "sources" not in known:
        return part
    match part:
        case EventsConfig():
            return _settle(part, "time_unit", known, [(part.source, part.time)], "s")
        case LabelConfig():
            return _settle_label(part, known)
        case SplitConfig():
            return _settle_split(part, known)
        case ContractConfig():
            rules = tuple(_settle_rule(rule, known) for rule in part.rules)
            return part.model_copy(update={"rules": rules})
        case tuple():
            return tuple(_SETTLE[key](element, known) for element in part)
    return part


def _settle(
    part: Any, key: str, known: _Parts, columns: Iterable[tuple[str, str | None]], default: str
) -> Any:
    """Fills in the unit of a part that reads some columns of sources."""
    if getattr(part, key) is not None:
        return part
    units = [_known_unit(known, source, column) for source, column in columns if column]
    return part.model_copy(update={key: next((unit for unit in units if unit), default)})


def _known_unit(known: _Parts, source: str, column: str) -> str | None:
    """The unit that a column's type or an earlier part of the config gives it."""
    declared = _find_column(known, source, column)
    if declared is None or declared.element_type == "timestamp":
        return None if declared is None else TIMESTAMP_UNIT
    units = [t.unit for t in _declared_times(known) if (t.source, t.column) == (source, column)]
    return units[0] if units else None


def _find_column(known: _Parts, source: str, column: str) -> ColumnConfig | None:
    return known["sources"][source].column(column) if source in known["sources"] else None


def _settle_join(join: JoinConfig, known: _Parts) -> JoinConfig:
    if join.as_of is None:
        return join
    columns = [(join.source, column) for column in join.as_of.columns]
    as_of = _settle(join.as_of, "time_unit", known, columns, "s")
    return join.model_copy(update={"as_of": as_of})


def _settle_label(label: LabelConfig, known: _Parts) -> LabelConfig:
    conversion = label.conversion
    if conversion is None:
        return label
    columns = [(conversion.source, conversion.time)]
    settled = _settle(conversion, "time_unit", known, columns, "s")
    return label.model_copy(update={"conversion": settled})


def _settle_split(split: SplitConfig, known: _Parts) -> SplitConfig:
    """Writes dates and timestamps as numbers in the unit of the log, which they are compared in."""
    events = known.get("events")
    if events is None:
        return split
    given = {key: getattr(split, key) for key in SPLIT_BOUNDS}
    unit = timedelta(milliseconds=ms_per_unit(events.time_unit))
    numbers = {
        # Rounded up: what a coarser unit cannot say begins with its next number.
        key: -((_EPOCH - _in_utc(bound)) // unit)
        for key, bound in given.items()
        if isinstance(bound, datetime)
    }
    return split.model_copy(update=numbers)


def _in_utc(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _settle_rule(rule: Any, known: _Parts) -> Any:
    if not isinstance(rule, FreshnessRule):
        return rule
    return _settle(rule, "unit", known, [(rule.source, rule.column)], "s")


def _settle_feature(feature: FeatureConfig, known: _Parts) -> FeatureConfig:
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


_SETTLE: Mapping[str, Callable[[Any, _Parts], Any]] = {
    "joins": _settle_join,
    "labels": _settle_label,
    "features": _settle_feature,
}
"""What settles an element of a part that is a list."""


def _settle_date(encoding: Any, column: str, known: _Parts) -> Any:
    origin = _find_origin(known, column)
    return _settle(encoding, "unit", known, [origin] if origin else [], TIMESTAMP_UNIT)


def _find_origin(known: _Parts, column: str) -> tuple[str, str] | None:
    """The source and column that a column of the samples has its values of; None: it is made."""
    events = known.get("events")
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
    return next(((s, column) for s in named if _find_column(known, s, column)), None)


def _declared_times(known: _Parts) -> Iterator[TimeColumn]:
    """The time columns of events, dictionaries and conversions."""
    events, split = known.get("events"), known.get("split")
    if events is not None and events.time is not None:
        given = (split.validation_source, split.test_source) if split is not None else ()
        for source in (events.source, *given):
            if source and _find_column(known, source, events.time):
                unit = events.time_unit or "s"
                yield TimeColumn("events.time_unit", source, events.time, unit, "event")
    for join in known.get("joins", ()):
        as_of = join.as_of
        for column in as_of.columns if as_of is not None else ():
            use: TimeUse = "end" if column == as_of.valid_to else "entry"
            key = f"joins.{join.source}.as_of.time_unit"
            yield TimeColumn(key, join.source, column, as_of.time_unit or "s", use)
    labels = {f"labels.{label.name}": label for label in known.get("labels", ())}
    for key, label in {"label": known.get("label"), **labels}.items():
        conversion = label.conversion if label is not None else None
        if conversion is not None:
            key, unit = f"{key}.conversion.time_unit", conversion.time_unit or "s"
            yield TimeColumn(key, conversion.source, conversion.time, unit, "conversion")


def find_time_columns(config: BuildConfig) -> tuple[TimeColumn, ...]:
    """Lists every column of a source that the build reads as times, once for each reader."""
    known = dict(config)
    found = [*_declared_times(known)]
    for feature in config.features:
        for column, encoding in _dates_of(feature):
            origin = _find_origin(known, column)
            if origin is not None:
                key = f"features.{feature.name}.encoding.unit"
                unit = encoding.unit or TIMESTAMP_UNIT
                found.append(TimeColumn(key, *origin, unit, "feature"))
    for number, rule in enumerate(config.contract.rules):
        if isinstance(rule, FreshnessRule):
            key = f"contract.rules[{number}].unit"
            found.append(TimeColumn(key, rule.source, rule.column, rule.unit or "s", "rule"))
    return tuple(found)


def _dates_of(feature: FeatureConfig) -> list[tuple[str, DatePartConfig | CyclicalConfig]]:
    encoding = feature.encoding
    if isinstance(encoding, DatePartConfig | CyclicalConfig):
        return [(feature.column, encoding)]
    prepared = encoding.prepared.items() if isinstance(encoding, CrossConfig) else ()
    return [(column, part) for column, part in prepared if isinstance(part, DatePartConfig)]


def check_time_units(config: BuildConfig) -> None:
    """Refuses a unit other than milliseconds for a timestamp.

    Raises:
        ValueError: Names the key, the column and the unit.
    """
    for time in find_time_columns(config):
        column = config.sources[time.source].column(time.column)
        if column is None or column.element_type != "timestamp" or time.unit == TIMESTAMP_UNIT:
            continue
        raise ValueError(
            f"{time.key}: timestamps such as {time.name} are read as milliseconds; leave the unit "
            f"out, or set `{time.key}: ms`"
        )


def has_certain_unit(column: ColumnConfig) -> bool:
    """Whether the input says what a time means: it is a date, not a number."""
    return column.element_type == "timestamp" and column.timestamp_format not in EPOCH_UNITS
