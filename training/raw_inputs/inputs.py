"""Raw inputs of a model as `export.json` describes them: types, written forms, names of columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import pyarrow as pa

Token = int | float | str
EPOCHS = {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}
NUMBERS = ("int32", "int64", "float32", "float64")
TYPES = {**{name: pa.type_for_alias(name) for name in NUMBERS}, "string": pa.binary()}


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
    common["pair_separator"] = pair["separator"]
    second = WrittenForm(name, is_second=True, default=pair.get("default"), **common)
    return {name: WrittenForm(name, **common), pair["name"]: second}


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
        """Returns the names that the values of an input may have, the first choice first."""
        return self._names.get(name, [name])

    def choose(self, name: str, found: Collection[str]) -> Choice:
        """Returns which of the columns that are there stand for an input."""
        names, source = [n for n in self.list_names(name) if n in found], self.sources.get(name)
        has_twin = name in found and source in found and source not in self.by_name
        return Choice(names, self._pairs.get(name, ()), source if has_twin else None)

    def find_given(self, row: Collection[str]) -> set[str]:
        return {name for name, names in self._names.items() if any(one in row for one in names)}
