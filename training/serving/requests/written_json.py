"""JSON as the source of a build writes values: names of its columns, times and lists as text."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeVar

from training.raw_inputs.column_values import ColumnReader, find_paired
from training.raw_inputs.input_columns import InputColumn, find_padding, find_sources
from training.raw_inputs.written_values import parse_entries, parse_entry, parse_time
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import RequestLimits

FoundT = TypeVar("FoundT")

KEPT = 4096
"""Objects of `export.json` of which something is kept."""


class _Same:
    """A key that is equal where it is of the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def once_per_object(find: Callable[[Any], FoundT]) -> Callable[[Any], FoundT]:
    """Wraps a function of a part of `export.json`, whose answers are kept by the part itself.

    What `export.json` says is read once and never changed, and each request needs it in another
    form.
    """

    @lru_cache(KEPT)
    def find_once(key: _Same) -> FoundT:
        return find(key.value)

    @wraps(find)
    def found(value: Any) -> FoundT:
        return find_once(_Same(value))

    return found


@once_per_object
def read_column(item: Mapping[str, Any]) -> InputColumn:
    """Returns an input as `export.json` describes it."""
    return InputColumn.from_json(item)


@dataclass(frozen=True)
class SourceNames:
    """Columns of the source that stand for inputs.

    Attributes:
        sources: The column of each input, by the input's name (`find_sources`).
        paired: By the name of an input the columns whose text has its values as second ones.
        alike: By the name of an input the others that are the same values of the same column.
    """

    sources: Mapping[str, str]
    paired: Mapping[str, Sequence[str]]
    alike: Mapping[str, Sequence[str]]

    @classmethod
    def build(cls, about: Iterable[Mapping[str, Any]]) -> SourceNames:
        """Builds them of what `export.json` says of the inputs."""
        said = [item for item in about if "column" in item]
        alike = _find_alike(said)
        if not any(item.get("written") for item in said):
            return cls(find_sources(said), {}, alike)
        inputs = [read_column(item) for item in said]
        found = {item.name: find_paired(item, inputs) for item in inputs}
        paired = {name: columns for name, columns in found.items() if columns}
        return cls(find_sources(said), paired, alike)


def _find_alike(said: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns by name the other inputs that hold the same values, such as parts of crosses."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for item in said:
        key = tuple(item.get(part) for part in ("column", "dtype", "is_list", "length", "per"))
        groups.setdefault(key, []).append(item["name"])
    return {
        name: [other for other in names if other != name]
        for names in groups.values()
        if len(names) > 1
        for name in names
    }


@once_per_object
def name_items(items: Sequence[Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Returns what `export.json` says of inputs by their names."""
    return {item["name"]: item for item in items}


@once_per_object
def find_source_names(about: Mapping[str, Mapping[str, Any]]) -> SourceNames:
    """Returns the columns that stand for inputs, by what `export.json` says of each."""
    return SourceNames.build(about.values())


def name_inputs(
    given: Mapping[str, Any], names: Collection[str], columns: SourceNames, where: str = ""
) -> Mapping[str, Any]:
    """Returns values by the names of inputs, which may have those of the source's columns.

    Args:
        given: Values by name, of a row or of all.
        names: Names of the inputs.
        columns: Columns that stand for them.
        where: Begins the message.

    Raises:
        RequestError: An input and its column are given, and differ.
    """
    if given.keys() == set(names):
        return given
    sources = columns.sources
    found = {name: value for name, value in given.items() if name not in sources.values()}
    found |= {name: value for name, value in given.items() if name in names}
    for name in names:
        column = sources.get(name, name)
        if column not in given:
            continue
        if column not in names and name in given and given[name] != given[column]:
            raise RequestError(
                f"{where}input {name} is made of {column}, and both are given and differ: give one"
            )
        found.setdefault(name, given[column])
    for name in names:
        if name not in found:
            same = next((other for other in columns.alike.get(name, ()) if other in given), None)
            if same is not None and same in names:
                found[name] = given[same]
    for name in names:
        for column in columns.paired.get(name, ()):
            if name not in found and _is_text(given.get(column)):
                found[name] = given[column]
    used = {column for name in names for column in columns.paired.get(name, ())}
    return {name: value for name, value in found.items() if name in names or name not in used}


def _is_text(value: Any) -> bool:
    """Whether a value is text, or those of all rows are, as far as they are there."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, str) or one is None for one in value)
    return isinstance(value, str)


def read_written(
    value: Any, depth: int, about: Mapping[str, Any] | None, most: int = RequestLimits.values
) -> Any:
    """Returns JSON values of which text is read as the build reads it.

    Args:
        value: The values of rows stand in it `depth` lists deep.
        depth: 1 for `[rows]` and `[rows, length]`, 0 for the value of one row.
        about: What `export.json` says of the input; None: it is of no source.
        most: Values that lists of text may have, padded.

    Raises:
        RequestError: Text is not what the build reads, or holds more values.
    """
    if not about or "column" not in about:
        return value
    item = read_column(about)
    form = item.written
    if item.is_list:
        has_form = form is not None and form.separator is not None
        return _read_lists(value, depth, item, most) if has_form else value
    if item.read_unit is None and (form is None or form.pair_separator is None):
        return value
    return _map_rows(value, depth, lambda one: _read_scalar(one, item))


def _read_scalar(value: Any, item: InputColumn) -> Any:
    if not isinstance(value, str):
        return value
    form, unit = item.written, item.read_unit
    try:
        if form is not None and form.pair_separator is not None:
            return parse_entry(value, form, item.dtype) if value else None
        return parse_time(value, item.time_form, unit) if value and unit is not None else None
    except (ValueError, OverflowError) as error:
        raise _refuse(value, item) from error


def _read_lists(value: Any, depth: int, item: InputColumn, most: int) -> Any:
    """Returns lists of one length, where some of them came as text."""
    rows = list(_list_rows(value, depth))
    if item.written is None or not any(isinstance(row, str) for row in rows):
        return value
    form, lists = item.written, []
    # Before it is taken apart: a text of a few bytes per entry becomes far more.
    longest = max(row.count(form.separator or "") + 1 for row in rows if isinstance(row, str))
    check_padding(item.name, longest, len(rows), most)
    for row in rows:
        try:
            lists.append(parse_entries(row, form, item.dtype) if isinstance(row, str) else row)
        except (ValueError, OverflowError) as error:
            raise _refuse(row, item) from error
    width = item.length or max((len(one) for one in lists if isinstance(one, list)), default=1) or 1
    check_padding(item.name, width, len(rows), most)
    filler = build_filler(item.dtype, item.pad_token)
    filled = iter(lists)

    def fill(_: Any) -> Any:
        own = next(filled)
        own = [] if own is None else own
        return own + [filler] * (width - len(own)) if isinstance(own, list) else own

    return _map_rows(value, depth, fill)


def check_padding(name: str, width: int, rows: int, most: int) -> None:
    """Refuses lists in place of which null or text stands: a few bytes could ask for any number.

    Args:
        name: Name of the input.
        width: Values of the longest list, which all others are padded to.
        rows: Lists.
        most: Values that all of them may have.

    Raises:
        RequestError: They would have more.
    """
    if width * rows > most:
        raise RequestError(
            f"input {name} has null or text in place of a list beside lists of {width:,} values: "
            f"with {rows:,} rows more than {most:,} values; ask for fewer rows"
        )


def build_filler(dtype: str, pad_token: int | float | str | None) -> Any:
    """Returns what pads a list of JSON."""
    padding = find_padding(dtype, pad_token)
    return {"b64": base64.b64encode(padding).decode()} if isinstance(padding, bytes) else padding


def _list_rows(value: Any, depth: int) -> Iterator[Any]:
    if depth and isinstance(value, list):
        for one in value:
            yield from _list_rows(one, depth - 1)
    else:
        yield value


def _map_rows(value: Any, depth: int, change: Any) -> Any:
    if depth and isinstance(value, list):
        return [_map_rows(one, depth - 1, change) for one in value]
    return change(value)


def _refuse(value: str, item: InputColumn) -> RequestError:
    allowed = ColumnReader(item, is_paired=bool(item.written and item.written.is_second)).describe()
    shown = repr(value) if len(value) <= 100 else f"{value[:100]!r}…"
    return RequestError(f"input {item.name} must be {allowed}; received {shown}")
