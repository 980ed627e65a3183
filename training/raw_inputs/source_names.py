"""Names that raw values may have: those of the inputs, and of the source's columns.

Like `training.raw_inputs.raw_columns` it is shipped to executors without TensorFlow and Sluice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.raw_inputs.input_columns import InputColumn
from training.raw_inputs.raw_value_errors import RawValueError


def find_sources(inputs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the column of the source that stands for an input, by the input's name.

    It is one that names no input that is made of another column.

    Args:
        inputs: What `export.json` says of them.
    """
    columns = {item["name"]: item["column"] for item in inputs if "column" in item}
    return {n: column for n, column in columns.items() if columns.get(column, column) == column}


def find_paired(item: InputColumn, inputs: Sequence[InputColumn]) -> list[str]:
    """Returns the columns whose text has the values of an input as second ones of its entries."""
    if item.written is None or not item.written.is_second:
        return []
    first = item.written.column
    return [*(other.name for other in inputs if other.column == first), first]


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
        inputs = [InputColumn.from_json(item) for item in said]
        pairs = {item.name: find_paired(item, inputs) for item in inputs}
        paired = {name: columns for name, columns in pairs.items() if columns}
        return cls(find_sources(said), paired, alike)

    def list_names(self, name: str) -> list[str]:
        """Returns the names that the values of an input may have, the first choice first."""
        own = [name, self.sources.get(name, name)]
        return [*own, *self.alike.get(name, ()), *self.paired.get(name, ())]


def _find_alike(said: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns by name the other inputs that hold the same values, such as parts of crosses."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for item in said:
        key = tuple(item.get(part) for part in ("column", "dtype", "is_list", "per"))
        groups.setdefault(key, []).append(item["name"])
    return {
        name: [other for other in names if other != name]
        for names in groups.values()
        if len(names) > 1
        for name in names
    }


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
        RawValueError: An input and its column are given, and differ.
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
            raise RawValueError(
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
