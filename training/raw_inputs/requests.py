"""Raw values of a request: JSON, under names of inputs or of the source, as inputs of a signature.

Errors name the input, with rows counted from 0, as TensorFlow Serving counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from training.raw_inputs.converter import WrongValueError, build_input, describe, merge_columns
from training.raw_inputs.inputs import Choice, InputColumn, SourceNames
from training.raw_inputs.json_columns import show
from training.raw_inputs.times import find_wrong_times

if TYPE_CHECKING:
    import tensorflow as tf

FoundT = TypeVar("FoundT")
_KEPT = 4096


class RawValueError(Exception):
    """A value, or the name of one, is not what a model reads; the message names the input."""


def once_per_object(find: Callable[[Any], FoundT]) -> Callable[[Any], FoundT]:
    """Keeps what a function found of a part of `export.json`, by identity.

    A part is read once and never changed, and each request needs it in another form.
    """
    known: dict[int, tuple[Any, FoundT]] = {}

    @wraps(find)
    def found(part: Any) -> FoundT:
        kept = known.get(id(part))
        if kept is None or kept[0] is not part:
            if len(known) >= _KEPT:
                known.clear()
            kept = known[id(part)] = part, find(part)
        return kept[1]

    return found


@once_per_object
def read_column(item: Mapping[str, Any]) -> InputColumn:
    """Returns an input as `export.json` describes it; encoded ones hold what is never missing."""
    if "column" in item:
        return InputColumn.from_json(item)
    name, dtype = item["name"], "string" if item["dtype"] == "bytes" else item["dtype"]
    is_list = item.get("is_list", False)
    return InputColumn(name, name, name, dtype, is_list, None, None, None, is_required=True)


@once_per_object
def read_names(about: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> SourceNames:
    """Returns the inputs of a signature that are features, and the columns that stand for them.

    Args:
        about: What `export.json` says of the inputs, by name or as a list.
    """
    said = about.values() if isinstance(about, Mapping) else about
    return SourceNames(tuple(read_column(item) for item in said if "is_list" in item))


def gather_rows(
    rows: Sequence[Any], specs: Collection[str], names: SourceNames
) -> dict[str, list[Any]]:
    """Returns rows as columns, null where a row has no value.

    Args:
        rows: Values by name.
        specs: Names of the inputs, each of which a row must have, by a name that stands for it.
        names: The columns that stand for them.

    Raises:
        RawValueError: A row is no object, lacks an input, or has an unknown one.
    """
    firsts: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RawValueError(f"instance {number} is no object, as others are: {show(row)}")
        firsts.setdefault(tuple(row), number)
    for given, number in firsts.items():
        check_names(given, specs, names, f"instance {number}: ")
    return {name: [row.get(name) for row in rows] for name in chain.from_iterable(firsts)}


def check_names(
    given: Collection[str], specs: Collection[str], names: SourceNames, where: str = ""
) -> None:
    """Refuses names that are not those of a signature's inputs, and inputs that are left out.

    Raises:
        RawValueError: There is one.
    """
    stand = {name: names.list_names(name) for name in specs}
    missing = sorted(name for name in specs if not any(one in given for one in stand[name]))
    known = set(chain.from_iterable(stand.values()))
    unknown = next((name for name in given if name not in known), None)
    if missing or unknown is not None:
        raise RawValueError(
            f"{where}inputs do not match the signature; missing: "
            f"{', '.join(missing)[:300] or 'none'}; unknown: {(unknown or 'none')[:100]}"
        )


def build_inputs(
    given: Mapping[str, Any],
    specs: Mapping[str, tf.TensorSpec],
    names: SourceNames,
    most: int | None = None,
) -> dict[str, np.ndarray]:
    """Returns inputs of a signature.

    Args:
        given: Values of all rows as JSON has them, nested lists, by a name that stands for an
            input; null where one is missing. Of each input one is there.
        specs: Shape and type of each input.
        names: The inputs that are features, and the columns that stand for them.
        most: Values that lists may have in place of which null or text stands; None: any number.

    Raises:
        RawValueError: A value has another type, shape or unit, or is missing and must be there.
    """
    found = {}
    for name, spec in specs.items():
        item = names.by_name.get(name) or _describe_spec(name, spec)
        found[name] = _build(item, spec, (names.choose(name, given), given), most)
    return found


def build_array(
    name: str,
    value: Any,
    spec: tf.TensorSpec,
    about: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> np.ndarray:
    """Returns an input of its own values; arguments and what is raised are as of `build_inputs`."""
    item = read_column(about) if about and "is_list" in about else _describe_spec(name, spec)
    return _build(item, spec, (Choice([name]), {name: value}), most)


def _describe_spec(name: str, spec: tf.TensorSpec) -> InputColumn:
    """Describes an input that is no feature: keys of items, Examples, lengths."""
    return read_column({"name": name, "dtype": spec.dtype.name})


def _build(
    item: InputColumn,
    spec: tf.TensorSpec,
    given: tuple[Choice, Mapping[str, Any]],
    most: int | None,
) -> np.ndarray:
    """Builds an input whose rows stand in as many lists as its specification says."""
    choice, values = given
    columns, sizes = {}, [0]
    for name in choice.names:
        columns[name], sizes = _flatten(item, values[name], spec)
        if item.is_list:
            _check_lists(item, columns[name], most)
    try:
        array = build_input(item, choice, columns)
    except WrongValueError as error:
        raise _name_input(item, error, sizes) from error
    array = array.reshape(*sizes, *array.shape[1:])
    if not spec.shape.is_compatible_with(array.shape):
        raise _refuse_shape(item, spec, f"shape {list(array.shape)}")
    return array


def _flatten(item: InputColumn, value: Any, spec: tf.TensorSpec) -> tuple[list[Any], list[int]]:
    """Returns the values of all rows, or of all their items, and how many there are of each."""
    if not isinstance(value, list):
        raise _refuse_shape(item, spec, show(value))
    sizes = [len(value)]
    for _ in range(spec.shape.rank - item.is_list - 1):
        if set(map(type, value)) - {list} or len(set(map(len, value))) > 1:
            raise _refuse_shape(item, spec, show(value))
        sizes.append(len(value[0]) if value else 0)
        value = list(chain.from_iterable(value))
    return value, sizes


def _refuse_shape(item: InputColumn, spec: tf.TensorSpec, received: str) -> RawValueError:
    shape = [-1 if size is None else size for size in spec.shape]
    return RawValueError(
        f"input {item.name} must be {describe(item)} ({spec.dtype.name}) of shape {shape}, lists "
        f"of one length; received {received}"
    )


def _name_input(item: InputColumn, error: WrongValueError, sizes: list[int]) -> RawValueError:
    place, received = "", error.received
    if error.place:
        row, *position = (*np.unravel_index(error.place[0], sizes), *error.place[1:])
        position = [int(one) for one in position]
        place = f" in row {row} (from 0)" + (f", position {position}" if position else "")
    what = f"must be {error.allowed}" if error.problem is None else error.problem
    allowed = "" if error.problem is None or error.place else f"; allowed: {error.allowed}"
    return RawValueError(f"input {item.name} {what}; received {received}{place}{allowed}")


def _check_lists(item: InputColumn, rows: Sequence[Any], most: int | None) -> None:
    """Refuses lists of several lengths, and padding of which a few bytes could ask for any number.

    Lists are padded where null or text stands in the place of others.
    """
    kinds = set(map(type, rows))
    separator = item.separator
    if str in kinds and separator is not None:
        lengths = {
            row.count(separator) + 1 if isinstance(row, str) else len(row)
            for row in rows
            if isinstance(row, str | list)
        }
    else:
        lengths = {len(row) for row in rows if isinstance(row, list)}
        if len(lengths) > 1:
            raise RawValueError(
                f"input {item.name} must be lists of one length; received lists of "
                f"{min(lengths)} and {max(lengths)} values"
            )
    width = item.length or max(lengths, default=1)
    if most is not None and kinds != {list} and width * len(rows) > most:
        raise RawValueError(
            f"input {item.name} has null or text in place of a list beside lists of {width:,} "
            f"values: with {len(rows):,} rows more than {most:,} values; ask for fewer rows"
        )


def read_list(
    name: str, row: Mapping[str, Any], names: SourceNames, most: int | None = None
) -> list[Any]:
    """Returns the values that a row of a request has in the list of an input, the latest first.

    Raises:
        RawValueError: It is none, or holds too many values.
    """
    item, choice = names.by_name[name], names.choose(name, row)
    columns = {one: [row[one]] for one in choice.names}
    for values in columns.values():
        _check_lists(item, values, most)
    try:
        [found] = merge_columns(item, choice, columns).to_pylist()
    except WrongValueError as error:
        raise _name_input(item, error, [1]) from error
    kept = (value for value in found or () if value is not None)
    return [v.decode(errors="replace") if isinstance(v, bytes) else v for v in kept]


def check_times(name: str, values: np.ndarray, about: Mapping[str, Any]) -> None:
    """Refuses times in another unit than the model reads.

    Args:
        name: Name of the input.
        values: Of any shape, missing ones and padding as tokens.
        about: What `export.json` says of the input.

    Raises:
        RawValueError: There is one.
    """
    if (fault := find_wrong_times(read_column(about), values)) is not None:
        raise RawValueError(
            f"input {name} {fault.problem}; received {fault.received}; allowed: {fault.allowed}"
        )
