"""Raw inputs of a model as `export.json` describes them: types, written forms, names of columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import pyarrow as pa

EPOCHS = {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}
"""Units of the epochs that a source may write."""
TYPES = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.binary(),
}


@dataclass(frozen=True)
class WrittenForm:
    """How the source writes the column that an input is made of.

    Attributes:
        column: Column of the source whose text holds the values.
        time: How its timestamps are written: `iso`, `epoch_s`, `epoch_ms`, `epoch_us`, or a
            pattern of Java's, which Spark alone reads; None: they are no timestamps.
        separator: Between the values of a list; None: no list comes as text.
        pair_separator: Between the two values of an entry; None: an entry is a value.
        is_second: Whether the input's values are the second ones of their entries.
        default: Second value of an entry that has none; None: nothing is.
        is_oldest_first: Whether a list has the latest value last; the model reads it first.
    """

    column: str
    time: str | None = None
    separator: str | None = None
    pair_separator: str | None = None
    is_second: bool = False
    default: int | str | None = None
    is_oldest_first: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns what differs from the defaults."""
        values = vars(self).items()
        return {name: value for name, value in values if value is not None and value is not False}


def find_forms(config: Mapping[str, Any]) -> dict[str, WrittenForm]:
    """Returns how each column of the events is written, by the resolved config of a build.

    That of imported records says nothing of columns.
    """
    events, sources = config.get("events") or {}, config.get("sources") or {}
    brought = events.get("history") if events.get("history_order") == "oldest_first" else None
    joined = [join["source"] for join in config.get("joins") or ()]
    forms: dict[str, WrittenForm] = {}
    for name in (events.get("source"), *joined):
        for column in (sources.get(name) or {}).get("columns") or ():
            found = _find_column_forms(column, is_reversed=column["name"] == brought)
            forms = {**found, **forms}
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
    """One raw input of a model.

    Attributes:
        name: Name of the input: the feature's, where TensorFlow allows it in a signature.
        feature: Name of the feature.
        column: Raw column that the feature was made from.
        dtype: `int64`, `float32`, `float64` or `string`.
        is_list: Whether it is `[batch, length]` rather than `[batch]`.
        length: The fixed length of a list, None where any length will do.
        max_len: Values that are read of a longer list, None for all.
        pad_token: Fills a list that is shorter than others in the batch.
        null_token: Means a missing value; None: of floats, NaN does.
        is_required: Whether each row must have a value: the feature has no pad_value.
        time_unit: Unit of the times that the feature's date is made of; None: it is no date.
        time_kind: `event` where they are the times of the log, all of them dates since 1980,
            `date` where they are others of such a log; None: the log's times count from
            anywhere, or are not known.
        written: How the source writes its column; None: values come as they are.
        per: `candidate` or `row` in a signature that takes several items of a row.
    """

    name: str
    feature: str
    column: str
    dtype: str
    is_list: bool
    length: int | None
    max_len: int | None
    pad_token: int | float | str | None
    null_token: int | float | str | None = None
    is_required: bool = False
    time_unit: str | None = None
    time_kind: str | None = None
    written: WrittenForm | None = None
    per: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the input as a JSON object."""
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
        """Type of the values in Arrow; text is binary."""
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
        """Separates the values of a list in a text; None: no list comes as text."""
        return None if self.written is None else self.written.separator

    @property
    def is_parsed(self) -> bool:
        """Whether text of a source is parsed for it: a list, a pair of values, or a time."""
        if self.is_list:
            return self.separator is not None
        is_pair = self.written is not None and self.written.pair_separator is not None
        return is_pair or self.read_unit is not None

    @property
    def padding(self) -> int | float | bytes:
        """What fills a list that is shorter than others."""
        padding = _encode(self.pad_token)
        if padding is None:
            return b"" if self.dtype == "string" else 0
        return padding

    @property
    def missing(self) -> int | float | bytes | None:
        """What stands for a missing value; None: it must be there."""
        if self.null_token is not None:
            return _encode(self.null_token)
        is_number = self.dtype in ("float32", "float64")
        return float("nan") if is_number and not self.is_required else None


def _encode(token: int | float | str | None) -> int | float | bytes | None:
    return token.encode() if isinstance(token, str) else token


class Choice(NamedTuple):
    """Given columns that stand for an input.

    Attributes:
        names: Their names; a row takes the first of them that has a value there.
        paired: Those whose text has the values as second ones of its entries.
        twin: One that holds the same as that of the input's own name, or is refused.
    """

    names: list[str]
    paired: Collection[str] = ()
    twin: str | None = None


@dataclass(frozen=True)
class SourceNames:
    """Which given column stands for which input, in files and requests alike."""

    inputs: tuple[InputColumn, ...]

    @cached_property
    def by_name(self) -> dict[str, InputColumn]:
        """The inputs by their names."""
        return {item.name: item for item in self.inputs}

    @cached_property
    def sources(self) -> dict[str, str]:
        """The source's column of each input that has one, by the input's name.

        A column that names an input made of another column stands for that input alone.
        """
        columns = {item.name: item.column for item in self.inputs}
        return {n: column for n, column in columns.items() if columns.get(column, column) == column}

    @cached_property
    def _pairs(self) -> dict[str, list[str]]:
        return {item.name: _find_paired(item, self.inputs) for item in self.inputs}

    @cached_property
    def _all(self) -> dict[str, list[str]]:
        return {item.name: self._find_names(item) for item in self.inputs}

    def _find_names(self, item: InputColumn) -> list[str]:
        def kind(one: InputColumn) -> tuple[Any, ...]:
            return one.column, one.dtype, one.is_list, one.per

        alike = [other.name for other in self.inputs if kind(other) == kind(item)]
        own = [item.name, self.sources.get(item.name, item.name)]
        return list(dict.fromkeys([*own, *alike, *self._pairs[item.name]]))

    def list_names(self, name: str) -> list[str]:
        """Returns the names that the values of an input may have, the first choice first."""
        return self._all.get(name, [name])

    def choose(self, name: str, found: Collection[str]) -> Choice:
        """Returns which of the columns that are there stand for an input."""
        names, source = [n for n in self.list_names(name) if n in found], self.sources.get(name)
        has_twin = name in found and source in found and source not in self._all
        return Choice(names, self._pairs.get(name, ()), source if has_twin else None)

    def find_given(self, row: Mapping[str, Any]) -> set[str]:
        """Returns the inputs that a row says something of."""

        def says(name: str, other: str) -> bool:
            return other in row and (other not in self._pairs[name] or isinstance(row[other], str))

        return {name for name, names in self._all.items() if any(says(name, n) for n in names)}


def _find_paired(item: InputColumn, inputs: Sequence[InputColumn]) -> list[str]:
    """Returns the columns whose text has the values of an input as second ones of its entries."""
    if item.written is None or not item.written.is_second:
        return []
    first = item.written.column
    return [*(other.name for other in inputs if other.column == first), first]
