"""What a request for a list says, read and held against its limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from training.index.item_columns import Token
from training.raw_inputs.json_columns import show
from training.serving.requests.errors import RequestError, cut
from training.serving.requests.limits import (
    CANDIDATES,
    EXCLUDED,
    FILTERED_COLUMNS,
    FILTERED_VALUES,
    KEY_BYTES,
    LENGTH,
)

Value = int | float | str


@dataclass(frozen=True)
class RecommendRequest:
    """A request for a list.

    Attributes:
        user: The user's raw key; None: `features` say all.
        features: Raw values by input name; what is left out is missing.
        k: Length of the list.
        candidates: Items that are retrieved for the ranking model.
        exclude: Items that are left out.
        filter: Values of which an item must have one, by column.
        seen: Whether items that the user has met may be in the list.
    """

    user: Token | None = None
    features: Mapping[str, Any] = field(default_factory=dict)
    k: int = 10
    candidates: int = 200
    exclude: Sequence[Token] = ()
    filter: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    seen: bool = False


def parse_recommend(data: Mapping[str, Any]) -> RecommendRequest:
    """Reads a request; the first thing that is wrong ends it.

    Raises:
        RequestError: A key is unknown, or its value is not of its type or longer than it may be.
    """
    for name in data:
        if name not in _READERS:
            raise RequestError(f"{cut(name, 100)}: unknown; allowed: {', '.join(_READERS)}")
    return RecommendRequest(**{name: _READERS[name](name, value) for name, value in data.items()})


def _read_user(name: str, value: Any) -> Token | None:
    return None if value is None else _read_keys(name, [value])[0]


def _read_keys(name: str, value: Any) -> list[Token]:
    if not isinstance(value, list) or len(value) > EXCLUDED:
        _refuse(name, f"a list of {EXCLUDED} keys at most", value)
    for key in value:
        if type(key) is not int and not isinstance(key, str):
            _refuse(name, "text or a whole number", key)
        if isinstance(key, str):
            _check_text(name, key)
    return value


def _check_text(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: {value[:100]!r} holds half of a character") from error
    if size > KEY_BYTES:
        raise RequestError(f"{name}: a key may have {KEY_BYTES} bytes; received {size}")


def _read_features(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(name, "an object of raw values", value)
    return value


def _read_count(name: str, value: Any) -> int:
    most = LENGTH if name == "k" else CANDIDATES
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or not 1 <= value <= most:
        _refuse(name, f"a whole number from 1 to {most}", value)
    return int(value)


def _read_filter(name: str, value: Any) -> Mapping[str, Sequence[Value]]:
    if not isinstance(value, dict) or len(value) > FILTERED_COLUMNS:
        _refuse(name, f"an object of {FILTERED_COLUMNS} columns at most", value)
    conditions = {
        column: wanted if isinstance(wanted, list) else [wanted] for column, wanted in value.items()
    }
    if (count := sum(map(len, conditions.values()))) > FILTERED_VALUES:
        raise RequestError(f"{name}: a filter may have {FILTERED_VALUES} values; received {count}")
    for column, wanted in conditions.items():
        for one in wanted:
            is_number = type(one) is int or (type(one) is float and math.isfinite(one))
            if isinstance(one, str):
                _check_text(name, one)
            elif not is_number:
                _refuse(f"{name}.{cut(column, 100)}", "text, finite numbers or a list of them", one)
    return conditions


def _read_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, "true or false", value)
    return value


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "user": _read_user,
    "features": _read_features,
    "k": _read_count,
    "candidates": _read_count,
    "exclude": _read_keys,
    "filter": _read_filter,
    "seen": _read_flag,
}


def _refuse(name: str, allowed: str, value: Any) -> NoReturn:
    raise RequestError(f"{name}: must be {allowed}; received {show(value)}")
