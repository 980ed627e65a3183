"""Raw values of a request: JSON, under names of inputs or of the source, as inputs of a signature.

Errors name the input, with rows counted from 0, as TensorFlow Serving counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from training.raw_inputs.converter import (
    WrongValueError,
    build_input,
    describe,
    find_bad_number,
    merge_columns,
    show,
)
from training.raw_inputs.inputs import Choice, InputColumn, SourceNames

if TYPE_CHECKING:
    import tensorflow as tf

_PLAIN: dict[str, set[type]] = {"i": {int}, "f": {int, float}, "O": {str}}


class RawValueError(Exception):
    """A value, or the name of one, is not what a model reads; the message names the input."""


def read_names(about: Iterable[Mapping[str, Any]]) -> SourceNames:
    return SourceNames(tuple(read_column(item) for item in about if "is_list" in item))


def read_column(item: Mapping[str, Any]) -> InputColumn:
    if "column" in item:
        return InputColumn.from_json(item)
    return _describe_plain(item["name"], item["dtype"], is_list=item["is_list"])


def _describe_plain(name: str, dtype: str, *, is_list: bool = False) -> InputColumn:
    """Describes encoded features, keys of items, Examples and lengths: none may be missing."""
    dtype = "string" if dtype == "bytes" else dtype
    return InputColumn(name, name, name, dtype, is_list, None, None, None, is_required=True)


def gather_rows(
    rows: Sequence[Any], specs: Collection[str], names: SourceNames
) -> dict[str, list[Any]]:
    """Returns rows, values by name, as columns; null is where a row has no value."""
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
    """Refuses names that stand for no input of a signature, and inputs that are left out."""
    if set(given) == set(specs):
        return
    missing = sorted(name for name in specs if not names.choose(name, given).names)
    known = set(chain.from_iterable(map(names.list_names, specs)))
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
    """Returns inputs of a signature, in the shapes and types of its specifications.

    `given` are nested lists by names that stand for inputs, null is a missing value; `most` is how
    many values may stand for null and text in place of lists.
    """
    return {
        name: _build(names.by_name.get(name), spec, names.choose(name, given), given, most)
        for name, spec in specs.items()
    }


def build_array(
    name: str, value: Any, spec: tf.TensorSpec, about: Mapping[str, Any] | None = None
) -> np.ndarray:
    names = SourceNames((read_column(about),) if about else ())
    return build_inputs({name: value}, {name: spec}, names)[name]


def _build(
    item: InputColumn | None,
    spec: tf.TensorSpec,
    choice: Choice,
    given: Mapping[str, Any],
    most: int | None,
) -> np.ndarray:
    item = item or _describe_plain(choice.names[0], spec.dtype.name)
    dims = spec.shape.as_list()
    if len(choice.names) == 1 and choice.names[0] not in choice.paired:
        plain = _build_plain(item, given[choice.names[0]], spec)
        if plain is not None and _fits(plain.shape, dims):
            return plain
    flat = [_flatten(given[name], len(dims) - item.is_list) for name in choice.names]
    columns = {name: values for name, (values, _) in zip(choice.names, flat, strict=True)}
    sizes = flat[0][1]
    if sizes and all(other == sizes for _, other in flat):
        for values in columns.values() if item.is_list else ():
            _check_lists(item, values, most)
        try:
            array = build_input(item, choice, columns)
        except WrongValueError as error:
            raise _name_input(item, error, sizes) from error
        if _fits(shape := (*sizes, *array.shape[1:]), dims):
            return array.reshape(shape)
    wanted = [-1 if size is None else size for size in dims]
    raise RawValueError(
        f"input {item.name} must be {describe(item)} ({spec.dtype.name}) of shape {wanted}, lists "
        f"of one length; received {show(given[choice.names[0]])}"
    )


def _build_plain(item: InputColumn, value: Any, spec: tf.TensorSpec) -> np.ndarray | None:
    """Builds values that need no reading, in a fifth of the time; None: they do, or are wrong."""
    if item.time_unit is not None or (item.is_parsed and not item.is_list):
        return None
    leaves, shape = _flatten(value, spec.shape.rank)
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    if not leaves or not set(map(type, leaves)) <= _PLAIN[dtype.kind]:
        return None
    try:
        leaves = [one.encode() for one in leaves] if dtype.kind == "O" else leaves
        with np.errstate(over="ignore"):
            array = np.array(leaves, dtype)
    except (OverflowError, UnicodeEncodeError):
        return None
    is_wrong = dtype.kind == "f" and find_bad_number(array) is not None
    return None if is_wrong else array.reshape(shape)


def _flatten(value: Any, depth: int) -> tuple[list[Any], list[int]]:
    """Returns what stands in so many lists, and how long these are; nothing where they differ."""
    values, sizes = [value], list[int]()
    for _ in range(depth):
        if set(map(type, values)) - {list} or len(set(map(len, values))) > 1:
            return [], []
        sizes.append(len(values[0]) if values else 0)
        values = list(chain.from_iterable(values))
    return values, sizes


def _fits(shape: Sequence[int], dims: Sequence[int | None]) -> bool:
    return all(wanted in (None, size) for size, wanted in zip(shape, dims, strict=True))


def _name_input(item: InputColumn, error: WrongValueError, sizes: list[int]) -> RawValueError:
    where = ""
    if error.place:
        outer = np.unravel_index(error.place[0], sizes)
        row, *position = np.array([*outer, *error.place[1:]]).tolist()
        where = f" in row {row} (from 0)" + (f", position {position}" if position else "")
    return RawValueError(f"input {item.name} {error.said}{where}")


def _check_lists(item: InputColumn, rows: Sequence[Any], most: int | None) -> None:
    """Refuses lists of several lengths, and padding that a few bytes of null or text ask for."""
    texts = [row for row in rows if isinstance(row, str)] if item.separator is not None else []
    lengths = {len(row) for row in rows if isinstance(row, list)}
    if len(lengths) > 1 and not texts:
        received = f"lists of {min(lengths)} and {max(lengths)} values"
        raise RawValueError(f"input {item.name} must be lists of one length; received {received}")
    lengths |= {text.count(item.separator or "") + 1 for text in texts}
    width = item.length or max(lengths, default=1)
    if most is not None and width * len(rows) > most and (texts or None in rows):
        said = f"has null or text in place of a list beside lists of {width:,} values"
        many = f"with {len(rows):,} rows more than {most:,} values; ask for fewer rows"
        raise RawValueError(f"input {item.name} {said}: {many}")


def read_list(
    name: str, row: Mapping[str, Any], names: SourceNames, most: int | None = None
) -> list[Any]:
    """Returns the values that a row of a request has in the list of an input, the latest first."""
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
    if (said := read_column(about).find_wrong_times(values)) is not None:
        raise RawValueError(f"input {name} {said}")
