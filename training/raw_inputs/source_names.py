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
        shared: Inputs whose values may stand under the name of another input.
    """

    sources: Mapping[str, str]
    paired: Mapping[str, Sequence[str]]
    alike: Mapping[str, Sequence[str]]
    shared: Sequence[str]

    @classmethod
    def build(cls, about: Iterable[Mapping[str, Any]]) -> SourceNames:
        """Builds them of what `export.json` says of the inputs."""
        said = [item for item in about if "column" in item]
        sources, alike, paired = find_sources(said), _find_alike(said), {}
        if any(item.get("written") for item in said):
            inputs = [InputColumn.from_json(item) for item in said]
            pairs = {item.name: find_paired(item, inputs) for item in inputs}
            paired = {name: columns for name, columns in pairs.items() if columns}
        renamed = [name for name, own in sources.items() if own != name and own in sources]
        return cls(sources, paired, alike, tuple(dict.fromkeys((*renamed, *alike, *paired))))

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
    """Returns the values of a row by the names of inputs, which may have those of the source's.

    Of several names that stand for an input the first one counts that has a value.

    Args:
        given: Values by name.
        names: Names of the inputs.
        columns: Columns that stand for them.
        where: Begins the message.

    Raises:
        RawValueError: An input and its column are given, and differ.
    """
    if given.keys() == set(names) and all(given.get(n, n) is not None for n in columns.shared):
        return given
    rows = name_columns({name: [value] for name, value in given.items()}, names, columns, where)
    return {name: value for name, [value] in rows.items()}


def name_columns(
    given: Mapping[str, Any], names: Collection[str], columns: SourceNames, where: str = ""
) -> Mapping[str, Any]:
    """Returns the values of all rows by the names of inputs: each row decides for itself.

    Arguments and what is raised are those of `name_inputs`.
    """
    if given.keys() == set(names) and not any(_has_null(given.get(n)) for n in columns.shared):
        return given
    found: dict[str, Any] = {}
    for name in names:
        source = columns.sources.get(name, name)
        are_both = source not in names and name in given and source in given
        if are_both and _differ(given[name], given[source]):
            raise RawValueError(
                f"{where}input {name} is made of {source}, and both are given and differ: give one"
            )
        for other in (name, source, *columns.alike.get(name, ())):
            if other in given and (other in names or other == source):
                _add(found, name, given[other])
        for other in columns.paired.get(name, ()):
            if other in given and (name in found or _is_text(given[other])):
                _add(found, name, _keep_text(given[other]))
    passed = {column for name in names for column in columns.paired.get(name, ())}
    passed |= {*columns.sources.values(), *names}
    return found | {name: value for name, value in given.items() if name not in passed}


def _add(found: dict[str, Any], name: str, column: Any) -> None:
    """Takes a column for an input, or what it has where the columns before have nothing."""
    own = found.setdefault(name, column)
    if own is not column and _has_null(own) and _are_rows(own, column):
        filled = zip(own, column, strict=True)
        found[name] = [other if one is None else one for one, other in filled]


def _has_null(column: Any) -> bool:
    return isinstance(column, list) and None in column


def _are_rows(*columns: Any) -> bool:
    """Whether these are as many values each, one of a row."""
    return all(isinstance(one, list) and len(one) == len(columns[0]) for one in columns)


def _differ(one: Any, other: Any) -> bool:
    """Whether a row has both of two columns, and not alike."""
    if not _are_rows(one, other):
        return bool(one != other)
    pairs = zip(one, other, strict=True)
    return any(left is not None and right is not None and left != right for left, right in pairs)


def _is_text(column: Any) -> bool:
    """Whether all rows are text, as far as they are there."""
    return _are_rows(column) and bool(column) and _keep_text(column) == column


def _keep_text(column: Any) -> Any:
    if not _are_rows(column):
        return column
    return [one if isinstance(one, str) else None for one in column]
