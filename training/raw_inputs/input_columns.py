"""One raw input of a model: its type, what is missing or pads, and which values are refused.

Like `training.raw_inputs.raw_columns` it is shipped to executors without TensorFlow and Sluice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from conf.dates import UNIT_WORDS, UNITS_PER_SECOND, find_date_unit, show_time
from training.raw_inputs.written_values import ISO, WrittenForm

FINITE = "finite numbers up to 3.4e38, the largest float32"
"""What a model takes of numbers, in words."""
SECONDS_PER_DAY = 86_400


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
        time_kind: `event` where they are the times of the log, all of them dates since 1980, `date`
            where they are others of such a log; None: the log's times count from anywhere, or are
            not known.
        written: How the source writes its column; None: values come as they are.
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

    def to_json(self) -> dict[str, Any]:
        """Returns the input as a JSON object."""
        found = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("time_unit", "time_kind", "written") or value is not None
        }
        return found if self.written is None else {**found, "written": self.written.to_json()}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Self:
        """Builds an input from what `export.json` says of it; what it does not know is passed."""
        known = {field.name for field in fields(cls)} - {"written"}
        written = None if item.get("written") is None else WrittenForm(**item["written"])
        return cls(**{n: value for n, value in item.items() if n in known}, written=written)

    @property
    def read_unit(self) -> str | None:
        """Unit of the times that the model reads; None: it reads no times."""
        if self.written is not None and self.written.time is not None:
            return "ms"
        return self.time_unit if self.dtype != "string" else None

    @property
    def time_form(self) -> str:
        """How the source writes the times: text of a column of numbers is read as ISO 8601."""
        return ISO if self.written is None or self.written.time is None else self.written.time


def find_bad_number(values: np.ndarray) -> int | None:
    """Returns where the first number stands that no model can read; None: there is none.

    Refused are NaN, infinities, and what overflows float32, the type that models compute in.

    Args:
        values: Floats of any shape.

    Returns:
        Its position in the flattened array.
    """
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(np.float32, copy=False))
    return None if is_finite.all() else int(is_finite.argmin())


@dataclass(frozen=True)
class WrongTimes:
    """What is wrong with some times, in words."""

    problem: str
    received: str
    allowed: str


def find_wrong_times(item: InputColumn, values: np.ndarray) -> WrongTimes | None:
    """Returns what is wrong with the times that a date is made of; None: nothing is.

    Dates of one unit are no dates in another one, as 1980 to 2100 is another range of numbers in
    each. Times of a log that holds dates are dates in its unit, each of them. Of other times of
    such a log none is a small number such as an hour of the day; 0 may mean that there is none. All
    of some times are dates in another unit only where the unit is wrong.

    Args:
        item: The input.
        values: Of any shape, missing ones and padding as tokens.
    """
    unit = item.time_unit
    if unit is None or values.dtype.kind not in "iuf":
        return None
    is_time = np.isfinite(values)
    for token in (item.null_token, item.pad_token):
        if isinstance(token, int | float):
            is_time &= values != values.dtype.type(token)
    times = values[is_time]
    if not times.size:
        return None
    low, high = times.min().item(), times.max().item()
    found = find_date_unit(low)
    has_one = found == find_date_unit(high)
    if found == unit and has_one:
        return None
    if has_one and found is not None:
        # One early date in milliseconds may be a date of January 1970 indeed, if not of the log.
        if item.time_kind != "event" and found == "s" and low == high:
            return None
        return WrongTimes(
            f"holds times in {UNIT_WORDS[found]}, and the model reads {UNIT_WORDS[unit]}",
            f"{low} to {high}: in {UNIT_WORDS[unit]} {show_time(low, unit)} to "
            f"{show_time(high, unit)}, in {UNIT_WORDS[found]} {show_time(low, found)} to "
            f"{show_time(high, found)}",
            f"{UNIT_WORDS[unit]} since 1970, as the build had them",
        )
    bad = _find_no_time(times, unit, item.time_kind)
    if bad is None:
        return None
    return WrongTimes(
        f"holds what is no time in {UNIT_WORDS[unit]}: the model reads the times of "
        f"{item.column!r}, as the build had them, not a part of them such as the hour",
        f"{bad}: in {UNIT_WORDS[unit]} {show_time(bad, unit)}",
        f"dates from 1980 to 2100 in {UNIT_WORDS[unit]} since 1970"
        if item.time_kind == "event"
        else f"dates in {UNIT_WORDS[unit]} since 1970",
    )


def _find_no_time(times: np.ndarray, unit: str, kind: str | None) -> int | float | None:
    """Returns the first number that is no time of a log with dates; None: there is none."""
    is_bad: np.ndarray
    if kind == "event":
        is_bad = np.fromiter((find_date_unit(t) != unit for t in times.tolist()), bool, times.size)
    elif kind == "date":
        is_bad = (np.abs(times) < SECONDS_PER_DAY * UNITS_PER_SECOND[unit]) & (times != 0)
    else:
        return None
    found: int | float = times[is_bad.argmax()].item()
    return found if is_bad.any() else None


def find_padding(dtype: str, pad_token: int | float | str | None) -> int | float | bytes:
    """Returns what fills a list of an input; arguments are those of `InputColumn`."""
    padding = _encode(pad_token)
    if padding is None:
        return b"" if dtype in ("string", "bytes") else 0
    return padding


def find_sources(inputs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the column of the source that stands for an input, by the input's name.

    It is one that names no input that is made of another column.

    Args:
        inputs: What `export.json` says of them.
    """
    columns = {item["name"]: item["column"] for item in inputs if "column" in item}
    return {n: column for n, column in columns.items() if columns.get(column, column) == column}


def find_missing(
    dtype: str, null_token: int | float | str | None, is_required: bool
) -> int | float | bytes | None:
    """Returns what stands for a missing value of an input; None: it must be there.

    Arguments are those of `InputColumn`.
    """
    if null_token is not None:
        return _encode(null_token)
    is_number = dtype in ("float32", "float64")
    return float("nan") if is_number and not is_required else None


def _encode(token: int | float | str | None) -> int | float | bytes | None:
    return token.encode() if isinstance(token, str) else token
