"""Raw inputs of a model as `export.json` describes them: types, written forms, names, times.

Times are ISO 8601 or epochs, in the unit that the build was given.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from functools import cached_property
from math import floor
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import (
    FIRST_DATE_S,
    LAST_DATE_S,
    UNIT_WORDS,
    UNITS_PER_SECOND,
    find_date_unit,
    show_time,
)
from conf.etl.sources import PAIR_SEPARATOR
from conf.number_text import SPACES, bare_real

Token = int | float | str
EPOCHS = {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}
NUMBERS = ("int32", "int64", "float32", "float64")
TYPES = {**{name: pa.type_for_alias(name) for name in NUMBERS}, "string": pa.binary()}
_ISO = re.compile(
    r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T ](?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{1,9}))?"
    r"\s*(?P<zone>Z|UTC|[+-]\d{1,2}(?::\d{2})?|[+-]\d{4})?)?)?",
    re.ASCII,
)
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_WHOLE = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
_EPOCH = datetime.datetime(1970, 1, 1)
_MOST_OFFSET = 1800  # hours and minutes
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class WrittenForm:
    """How the source writes the column that an input is made of."""

    column: str  # of the source, whose text holds the values
    time: str | None = None  # timestamps: `iso`, `epoch_s`, …, or a pattern that Spark alone reads
    separator: str | None = None  # between the values of a list; None: no list comes as text
    pair_separator: str | None = None  # between the two values of an entry
    is_second: bool = False  # whether the input's values are the second ones of their entries
    default: int | str | None = None  # second value of an entry that has none
    is_oldest_first: bool = False  # whether a list has the latest value last; models read it first

    def to_json(self) -> dict[str, Any]:
        """Returns what differs from the defaults."""
        values = vars(self).items()
        return {name: value for name, value in values if value is not None and value is not False}


def find_forms(config: Mapping[str, Any]) -> dict[str, WrittenForm]:
    """Returns how each column of the events is written, by the resolved config of a build."""
    events, sources = config.get("events") or {}, config.get("sources") or {}
    brought = events.get("history") if events.get("history_order") == "oldest_first" else None
    forms: dict[str, WrittenForm] = {}
    for name in (events.get("source"), *(join["source"] for join in config.get("joins") or ())):
        for column in (sources.get(name) or {}).get("columns") or ():
            forms = _find_column_forms(column, is_reversed=column["name"] == brought) | forms
    return forms


def _find_column_forms(column: Mapping[str, Any], *, is_reversed: bool) -> dict[str, WrittenForm]:
    name, pair = column["name"], column.get("pair")
    if column["type"] == "timestamp":
        return {name: WrittenForm(name, time=column.get("timestamp_format") or "iso")}
    separator = column.get("separator") if column["type"].startswith("list<") else None
    common: dict[str, Any] = {"separator": separator, "is_oldest_first": is_reversed}
    if pair is None:
        return {name: WrittenForm(name, **common)} if separator is not None else {}
    common["pair_separator"] = PAIR_SEPARATOR
    second = WrittenForm(name, is_second=True, default=column.get("pair_default"), **common)
    return {name: WrittenForm(name, **common), pair: second}


@dataclass(frozen=True)
class InputColumn:
    """One raw input of a model, `[batch]` or `[batch, length]`."""

    name: str  # of the input: the feature's, where TensorFlow allows it in a signature
    feature: str
    column: str  # of the source, that the feature was made from
    dtype: str  # `int64`, `float32`, `float64` or `string`
    is_list: bool
    length: int | None  # the fixed length of a list
    max_len: int | None  # values that are read of a longer list; None: all
    pad_token: Token | None  # fills a list that is shorter than others in the batch
    null_token: Token | None = None  # means a missing value; None: of floats, NaN does
    is_required: bool = False  # whether each row must have a value: there is no pad_value
    time_unit: str | None = None  # of the times that a date is made of; None: it is no date
    # `event`: the times of the log, all of them dates since 1980; `date`: others of such a log.
    time_kind: str | None = None
    written: WrittenForm | None = None  # None: values come as they are
    per: str | None = None  # `candidate` or `row`, in a signature that takes items of a row

    def to_json(self) -> dict[str, Any]:
        optional = ("time_unit", "time_kind", "written", "per")
        content = {n: v for n, v in asdict(self).items() if n not in optional or v is not None}
        return content if self.written is None else {**content, "written": self.written.to_json()}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Self:
        """Builds an input from what `export.json` says of it; what it does not know is passed."""
        known = {field.name for field in fields(cls)} - {"written"}
        written = None if item.get("written") is None else WrittenForm(**item["written"])
        return cls(**{n: value for n, value in item.items() if n in known}, written=written)

    @cached_property
    def arrow_type(self) -> pa.DataType:
        dtype = TYPES[self.dtype]
        return pa.list_(dtype) if self.is_list else dtype

    @property
    def read_unit(self) -> str | None:
        """Unit of the times that the model reads; None: it reads no times."""
        if self.written is not None and self.written.time is not None:
            return "ms"
        return self.time_unit if self.dtype != "string" else None

    @property
    def epoch_unit(self) -> str | None:
        """Unit of the epochs that the source writes; None: it writes none."""
        return None if self.written is None else EPOCHS.get(self.written.time or "")

    @property
    def separator(self) -> str | None:
        return None if self.written is None else self.written.separator

    @property
    def is_parsed(self) -> bool:
        """Whether text is taken apart for it: a list, a pair of values, or a time."""
        if self.is_list:
            return self.separator is not None
        is_pair = self.written is not None and self.written.pair_separator is not None
        return is_pair or self.read_unit is not None

    @property
    def padding(self) -> int | float | bytes:
        padding = _encode(self.pad_token)
        return padding if padding is not None else b"" if self.dtype == "string" else 0

    @property
    def missing(self) -> int | float | bytes | None:
        """What stands for a missing value; None: it must be there."""
        if self.null_token is None and self.dtype.startswith("float") and not self.is_required:
            return float("nan")
        return _encode(self.null_token)

    def read_times(self, values: pa.Array) -> pa.Array:
        """Returns text, times and epochs as whole numbers of the unit that the model reads.

        Without a zone, times are UTC; numbers of a source that writes no epochs stay as they are.
        """
        unit, own = self.read_unit or "ms", self.epoch_unit
        if pa.types.is_temporal(values.type):
            return _convert_timestamps(values, unit)
        if own is not None and pa.types.is_integer(values.type):
            return _scale_epochs(values.cast(pa.int64()), own)
        if own is not None and not pa.types.is_null(values.type):
            values = values.cast(pa.string())  # A fraction is read to the digit.
        if not pa.types.is_string(values.type):
            return values
        encoded = values.dictionary_encode()
        times = [parse_time(text, own, unit) for text in encoded.dictionary.to_pylist()]
        return pa.array(times, pa.int64()).take(encoded.indices)

    def describe_time(self) -> str:
        unit = UNIT_WORDS[self.epoch_unit or self.read_unit or "ms"]
        if self.epoch_unit is not None:
            return f"a number of {unit} since 1970"
        iso = "ISO 8601, such as 2026-01-31T10:00:00Z, in UTC unless a zone is written"
        return f"{iso}; or a whole number of {unit} since 1970"

    def find_wrong_times(self, values: np.ndarray) -> str | None:
        """Returns what is wrong with the times that a date is made of; None: nothing is.

        Dates of one unit are none in another one, as 1980 to 2100 is another range of numbers in
        each. Values have any shape; missing ones and padding are tokens.
        """
        if (unit := self.time_unit) is None or values.dtype == object:
            return None
        tokens = [t for t in (self.null_token, self.pad_token) if isinstance(t, int | float)]
        times = values[np.isfinite(values) & ~np.isin(values, np.array(tokens, values.dtype))]
        if not times.size:
            return None
        low, high = times.min().item(), times.max().item()
        likely, own = find_date_unit(low), UNIT_WORDS[unit]
        if likely is None or likely != find_date_unit(high):
            is_bad = _find_no_times(times, self.time_kind, UNITS_PER_SECOND[unit])
            bad = times[is_bad.argmax()].item()
            said = f"holds what is no time in {own}; received {bad}, {show_time(bad, unit)}"
            said = f"{said}: the model reads times, not a part of them such as the hour"
            return said if is_bad.any() else None
        # One early date in milliseconds may be a date of January 1970 indeed, if not of the log.
        if likely == unit or (likely == "s" and low == high and self.time_kind != "event"):
            return None
        days = f"{show_time(low, likely)} to {show_time(high, likely)}"
        said = f"holds times in {UNIT_WORDS[likely]}, and the model reads {own}"
        return f"{said}; received {low} to {high}, {days}"


def _encode(token: Token | None) -> int | float | bytes | None:
    return token.encode() if isinstance(token, str) else token


class Choice(NamedTuple):
    """Given columns that stand for an input: of each row the first that has a value there."""

    names: list[str]
    paired: Collection[str] = ()  # those whose text has the values as second ones of its entries
    twin: str | None = None  # the source's beside the input's own: both must say the same


@dataclass(frozen=True)
class SourceNames:
    """Which given column stands for which input, in files and requests alike."""

    inputs: tuple[InputColumn, ...]

    @cached_property
    def by_name(self) -> dict[str, InputColumn]:
        return {item.name: item for item in self.inputs}

    @cached_property
    def sources(self) -> dict[str, str]:
        """The source's column of each input, but one that names an input of another column."""
        columns = {item.name: item.column for item in self.inputs}
        return {n: column for n, column in columns.items() if columns.get(column, column) == column}

    @cached_property
    def _pairs(self) -> dict[str, list[str]]:
        """By input the columns whose text has its values as second ones of its entries."""
        forms = {item.name: item.written for item in self.inputs if item.written is not None}
        seconds = {name: form.column for name, form in forms.items() if form.is_second}
        return {name: [*self._list_made(first), first] for name, first in seconds.items()}

    def _list_made(self, column: str) -> list[str]:
        return [item.name for item in self.inputs if item.column == column]

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        kinds = {item.name: (item.dtype, item.is_list, item.per) for item in self.inputs}
        found = {}
        for name, item in self.by_name.items():
            alike = [n for n in self._list_made(item.column) if kinds[n] == kinds[name]]
            names = [name, self.sources.get(name, name), *alike, *self._pairs.get(name, ())]
            found[name] = list(dict.fromkeys(names))
        return found

    def list_names(self, name: str) -> list[str]:
        return self._names.get(name, [name])

    def choose(self, name: str, found: Collection[str]) -> Choice:
        names, source = [n for n in self.list_names(name) if n in found], self.sources.get(name)
        has_twin = name in found and source in found and source not in self.by_name
        return Choice(names, self._pairs.get(name, ()), source if has_twin else None)

    def find_given(self, row: Collection[str]) -> set[str]:
        return {name for name, names in self._names.items() if any(one in row for one in names)}


def _convert_timestamps(values: pa.Array, unit: str) -> pa.Array:
    zone = getattr(values.type, "tz", None)
    micros = values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
    divisor = 1_000_000 // UNITS_PER_SECOND[unit]
    whole = np.floor_divide(micros.fill_null(0).to_numpy(zero_copy_only=False), divisor)
    return pa.array(whole, pa.int64(), mask=values.is_null().to_numpy(zero_copy_only=False))


def parse_time(text: str, epoch_unit: str | None, unit: str) -> int:
    """Reads ISO 8601, or a whole number of `unit`, in which the time is returned.

    Where the source writes epochs a number, rounded down: of their unit if it is a date there.
    """
    bare = text.strip(SPACES)
    if epoch_unit is not None:
        number, per = Decimal(bare_real(bare)), UNITS_PER_SECOND[epoch_unit]
        if number.copy_abs() < 1 << 63:
            is_date = FIRST_DATE_S * per <= number < LAST_DATE_S * per
            return floor(number * UNITS_PER_SECOND[unit] / per if is_date else number)
    elif (match := _ISO.fullmatch(bare)) is not None:
        return _count_micros(match.groupdict("0")) // (1_000_000 // UNITS_PER_SECOND[unit])
    elif (match := _WHOLE.fullmatch(bare)) is not None:
        return int(match[1])
    raise ValueError(f"{text!r} is no time")


def _count_micros(parts: Mapping[str, str]) -> int:
    year, month, day, hour, minute, second = (int(parts[name]) for name in _PARTS)
    micros, zone = int(parts["part"].ljust(6, "0")[:6]), parts["zone"].replace(":", "")
    offset = 0 if zone in ("0", "Z", "UTC") else int(zone) * (1 if len(zone) > 3 else 100)
    hours, minutes = divmod(abs(offset), 100)
    if minutes > 59 or abs(offset) > _MOST_OFFSET:
        raise ValueError(f"{zone} is no zone")
    shift = datetime.timedelta(hours=hours, minutes=minutes) * (-1 if offset < 0 else 1)
    moment = datetime.datetime(year, month, day, hour, minute, second, micros) - shift
    return (moment - _EPOCH) // datetime.timedelta(microseconds=1)


def _scale_epochs(values: pa.Array, own: str) -> pa.Array:
    """Turns whole numbers that are dates in the unit of the source's epochs into milliseconds."""
    if own == "ms":
        return values
    per = UNITS_PER_SECOND[own]
    is_date = pc.and_(
        pc.greater_equal(values, FIRST_DATE_S * per), pc.less(values, LAST_DATE_S * per)
    )
    turned = pc.multiply(values, 1000) if own == "s" else pc.divide(values, 1000)
    return pc.if_else(is_date, turned, values)


def _find_no_times(times: np.ndarray, kind: str | None, per: int) -> np.ndarray:
    """Returns which times cannot be: those of events are dates; small ones are hours, but for 0."""
    if kind == "event":
        return (times < FIRST_DATE_S * per) | (times >= LAST_DATE_S * per)
    return (np.abs(times) < _SECONDS_PER_DAY * per) & (times != 0) & (kind == "date")
