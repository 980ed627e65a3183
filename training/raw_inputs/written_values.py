"""Values as the source of a build writes them: times, lists in one text, entries of two values.

A build declares of each column how its text is read. Raw inputs are read in the same way: what the
log writes can be sent to a model as it is. Like `training.raw_inputs.raw_columns` this is shipped
to executors without TensorFlow and Sluice.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import floor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import FIRST_DATE_S, LAST_DATE_S, UNIT_WORDS, UNITS_PER_SECOND
from conf.number_text import SPACES, bare_real, parse_real, parse_whole

ISO = "iso"
"""Times as ISO 8601 writes them, UTC where no zone is written."""
EPOCHS = {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}
Scalar = int | float | str


@dataclass(frozen=True)
class WrittenForm:
    """How the source writes the column that an input is made of.

    Attributes:
        column: Column of the source whose text holds the values.
        time: How its times are written: `iso`, `epoch_s`, `epoch_ms`, `epoch_us`, or a pattern of
            Java's; None: they are no timestamps.
        separator: Between the values of a list; None: no list comes as text.
        pair_separator: Between the two values of an entry; None: an entry is a value.
        is_second: Whether the input's values are the second ones of their entries.
        default: Second value of an entry that has none; None: nothing is.
        is_oldest_first: Whether a list has the latest value last, and the model reads it first.
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
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False
        }


def find_forms(config: Mapping[str, Any]) -> dict[str, WrittenForm]:
    """Returns how each column of the events is written, by the resolved config of a build.

    Args:
        config: As the manifest holds it; of imported records it says nothing of columns.
    """
    events, sources = config.get("events") or {}, config.get("sources") or {}
    brought = events.get("history") if events.get("history_order") == "oldest_first" else None
    joined = [join["source"] for join in config.get("joins") or ()]
    forms: dict[str, WrittenForm] = {}
    for name in (events.get("source"), *joined):
        for column in (sources.get(name) or {}).get("columns") or ():
            for form_name, form in _forms_of(column, is_reversed=column["name"] == brought).items():
                forms.setdefault(form_name, form)
    return forms


def _forms_of(column: Mapping[str, Any], *, is_reversed: bool) -> dict[str, WrittenForm]:
    name, pair = column["name"], column.get("pair")
    if column["type"] == "timestamp":
        return {name: WrittenForm(name, time=column.get("timestamp_format") or ISO)}
    separator = column.get("separator") if column["type"].startswith("list<") else None
    common: dict[str, Any] = {"separator": separator, "is_oldest_first": is_reversed}
    if pair is None:
        return {name: WrittenForm(name, **common)} if separator is not None else {}
    common["pair_separator"] = pair["separator"]
    second = WrittenForm(name, is_second=True, default=pair.get("default"), **common)
    return {name: WrittenForm(name, **common), pair["name"]: second}


def parse_entries(text: str, form: WrittenForm, dtype: str) -> list[Scalar]:
    """Reads the text of a list; the latest value stands first.

    Raises:
        ValueError: An entry is none of the declared form, or a value is not of the type.
    """
    if not text:
        return []
    entries = [parse_entry(entry, form, dtype) for entry in text.split(form.separator)]
    if any(value is None for value in entries):
        raise ValueError(f"an entry of {text!r} has no second value")
    values = [value for value in entries if value is not None]
    return values[::-1] if form.is_oldest_first else values


def parse_entry(entry: str, form: WrittenForm, dtype: str) -> Scalar | None:
    """Reads an entry: a value, or one of two; None: the second one is not there.

    Raises:
        ValueError: It is none of the declared form, or the value is not of the type.
    """
    if form.pair_separator is None:
        return parse_value(entry, dtype)
    parts = entry.split(form.pair_separator)
    if len(parts) > 2 or not all(parts):
        raise ValueError(f"{entry!r} is no `value` or `value{form.pair_separator}second`")
    parse_value(parts[0], "string" if form.is_second else dtype)
    if not form.is_second:
        return parse_value(parts[0], dtype)
    return parse_value(parts[1], dtype) if len(parts) == 2 else form.default


def parse_value(text: str, dtype: str) -> Scalar:
    """Reads one value of a type: `int64`, `float32`, `float64` or `string`.

    Raises:
        ValueError: It is none.
    """
    if dtype == "string":
        return text
    return parse_whole(text) if dtype == "int64" else parse_real(text)


_ISO = re.compile(
    r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T ](?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{1,9}))?"
    r"\s*(?P<zone>Z|UTC|[+-]\d{1,2}(?::\d{2})?|[+-]\d{4})?)?)?",
    re.ASCII,
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_LETTERS = {
    "yyyy": r"(?P<year>\d{4})", "uuuu": r"(?P<year>\d{4})", "y": r"(?P<year>\d{4})",
    "yy": r"(?P<year>\d{2})", "uu": r"(?P<year>\d{2})",
    "MM": r"(?P<month>\d{2})", "M": r"(?P<month>\d{1,2})",
    "MMM": r"(?P<month>[A-Z][a-z]{2})",
    "dd": r"(?P<day>\d{2})", "d": r"(?P<day>\d{1,2})",
    "HH": r"(?P<hour>\d{2})", "H": r"(?P<hour>\d{1,2})",
    "mm": r"(?P<minute>\d{2})", "m": r"(?P<minute>\d{1,2})",
    "ss": r"(?P<second>\d{2})", "s": r"(?P<second>\d{1,2})",
    **{"S" * n: rf"(?P<part>\d{{{n}}})" for n in range(1, 10)},
    "X": r"(?P<zone>Z|[+-]\d{2}(?:\d{2})?)", "XX": r"(?P<zone>Z|[+-]\d{4})",
    "XXX": r"(?P<zone>Z|[+-]\d{2}:\d{2})", "x": r"(?P<zone>[+-]\d{2}(?:\d{2})?)",
    "xx": r"(?P<zone>[+-]\d{4})", "xxx": r"(?P<zone>[+-]\d{2}:\d{2})", "Z": r"(?P<zone>[+-]\d{4})",
}  # fmt: skip
"""What letters of Java's patterns stand for, as far as logs write them."""
_TOKENS = re.compile(r"'((?:[^']|'')*)'|(([A-Za-z])\3*)|(.)", re.DOTALL)


def compile_pattern(written: str) -> re.Pattern[str] | None:
    """Returns a pattern of Java's as a regular expression; None: it has a letter beyond ours."""
    parts = []
    for quoted, letters, _, other in _TOKENS.findall(written):
        if letters and letters not in _LETTERS:
            return None
        if letters:
            parts.append(_LETTERS[letters])
        elif other:
            parts.append(re.escape(other))
        else:
            parts.append(re.escape(quoted.replace("''", "'") or "'"))
    try:
        return re.compile("".join(parts), re.ASCII)
    except re.error:  # A part stands twice.
        return None


def parse_time(text: str, written: str, unit: str) -> int:
    """Reads a time.

    Args:
        text: As the source writes it, or a whole number, which is one of the unit; of epochs a
            fraction too, which is rounded down.
        written: As in `WrittenForm.time`.
        unit: `s`, `ms` or `us`.

    Raises:
        ValueError: It is none.
    """
    stripped = text.strip(SPACES)
    if written in EPOCHS:
        return _parse_epoch(stripped, EPOCHS[written], unit)
    pattern = _ISO if written == ISO else compile_pattern(written)
    match = pattern and pattern.fullmatch(stripped if written == ISO else text)
    if match is not None:
        return _count_micros(match.groupdict()) // (1_000_000 // UNITS_PER_SECOND[unit])
    # Of digits alone a pattern such as yyyyMMdd is made too: a part of one is no number.
    has_digits_alone = pattern is not None and written != ISO and written.isalpha()
    is_part = has_digits_alone and len(stripped) <= len(written)
    if is_part or not re.fullmatch(r"[+-]?[0-9]+(?:\.0*)?", stripped):
        raise ValueError(f"{text!r} is no time")
    return int(stripped.partition(".")[0])


def _parse_epoch(text: str, own: str, unit: str) -> int:
    number = Decimal(bare_real(text))
    if number.copy_abs() >= 1 << 63:
        raise ValueError(f"{text!r} is no time")
    per = UNITS_PER_SECOND[own]
    is_date = FIRST_DATE_S * per <= number < LAST_DATE_S * per
    return floor(number * UNITS_PER_SECOND[unit] / per if is_date else number)


def _count_micros(parts: Mapping[str, str | None]) -> int:
    """Microseconds since 1970, UTC.

    Raises:
        ValueError: There is no such day, or no such time of day.
    """
    year = int(parts.get("year") or 1970)
    if len(parts.get("year") or "") == 2:
        year += 2000
    month = parts.get("month") or "1"
    number = _MONTHS.index(month.lower()) + 1 if month.isalpha() else int(month)
    day, hour, minute, second = (
        int(parts.get(name) or default)
        for name, default in (("day", 1), ("hour", 0), ("minute", 0), ("second", 0))
    )
    micros = int((parts.get("part") or "0").ljust(6, "0")[:6])
    moment = datetime.datetime(year, number, day, hour, minute, second, micros)
    since = moment - datetime.datetime(1970, 1, 1) - _read_offset(parts.get("zone"))
    return since // datetime.timedelta(microseconds=1)


_MOST_OFFSET = datetime.timedelta(hours=18)


def _read_offset(zone: str | None) -> datetime.timedelta:
    if zone is None or zone in ("Z", "UTC"):
        return datetime.timedelta()
    digits = zone[1:].replace(":", "")
    hours, minutes = (int(digits[:-2]), int(digits[-2:])) if len(digits) > 2 else (int(digits), 0)
    offset = datetime.timedelta(hours=hours, minutes=minutes)
    if minutes > 59 or offset > _MOST_OFFSET:
        raise ValueError(f"{zone} is no zone")
    return -offset if zone[0] == "-" else offset


def describe_time(written: str, unit: str) -> str:
    """Returns in words how a time may be written."""
    whole = "" if written in EPOCHS else "whole "
    number = f"a {whole}number of {UNIT_WORDS[unit]} since 1970"
    if written == ISO:
        return f"ISO 8601, such as 2026-01-31 or 2026-01-31T10:00:00Z, in UTC unless a zone is " \
               f"written; or {number}"  # fmt: skip
    if written in EPOCHS:
        own = EPOCHS[written]
        also = "" if own == unit else f", or of {UNIT_WORDS[own]}, as the source writes them"
        return f"{number}{also}"
    if compile_pattern(written) is None:
        return f"{number}: texts of the pattern {written!r} are read by the build alone"
    return f"text of the pattern {written!r}, as the build reads it; or {number}"


def convert_times(values: pa.Array, unit: str) -> pa.Array:
    """Returns Arrow's timestamps or dates as whole numbers of a unit; without a zone they are UTC.

    Raises:
        pa.ArrowException: They are times of a day, or durations.
    """
    zone = getattr(values.type, "tz", None)
    micros = values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
    divisor = 1_000_000 // UNITS_PER_SECOND[unit]
    whole = np.floor_divide(micros.fill_null(0).to_numpy(zero_copy_only=False), divisor)
    return pa.array(whole, pa.int64(), mask=values.is_null().to_numpy(zero_copy_only=False))


def scale_epochs(values: np.ndarray, written: str, unit: str) -> np.ndarray:
    """Returns times in a unit, of which those that are dates in the source's unit are turned.

    Args:
        values: Whole numbers of any shape, tokens among them.
        written: As in `WrittenForm.time`.
        unit: What the model reads.
    """
    own = EPOCHS.get(written)
    if own is None or own == unit:
        return values
    per, target = UNITS_PER_SECOND[own], UNITS_PER_SECOND[unit]
    is_date = (values >= FIRST_DATE_S * per) & (values < LAST_DATE_S * per)
    turned = values * (target // per) if target > per else values // (per // target)
    return np.where(is_date, turned, values)


def parse_texts(
    texts: pa.Array, parse: Callable[[str], Scalar | None], target: pa.DataType
) -> pa.Array:
    """Returns texts as values; each different text is parsed once.

    Raises:
        ValueError or pa.ArrowException: One cannot be.
    """
    encoded = texts.dictionary_encode()
    parsed = [None if text is None else parse(text) for text in encoded.dictionary.to_pylist()]
    return pa.array(parsed, target).take(encoded.indices)


def parse_lists(texts: pa.Array, form: WrittenForm, dtype: str, target: pa.DataType) -> pa.Array:
    """Returns the texts of lists as lists of a type; null and empty text are null.

    Raises:
        ValueError or pa.ArrowException: An entry is none of the declared form.
    """
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
    split = pc.split_pattern(texts, form.separator)
    entries = parse_texts(split.flatten(), lambda entry: parse_entry(entry, form, dtype), target)
    if entries.null_count:
        raise ValueError("an entry has no second value")
    lengths = pc.list_value_length(split).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    if form.is_oldest_first and len(entries):
        places = np.arange(len(entries))
        starts, last = np.repeat(ends[:-1], lengths), np.repeat(ends[1:] - 1, lengths)
        entries = entries.take(pa.array(last - (places - starts)))
    mask = texts.is_null()
    return pa.ListArray.from_arrays(pa.array(ends), entries, mask=mask)
