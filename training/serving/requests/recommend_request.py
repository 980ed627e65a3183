"""What a request for a list says, held against its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
)

from training.index.item_columns import Token
from training.raw_inputs.raw_value_errors import show
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


def _read_key(value: Any, number: str = "a whole number") -> Token:
    if type(value) is int:
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be text or {number}; received {show(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{value[:100]!r} holds half of a character") from error
    if size > KEY_BYTES:
        raise ValueError(f"a key may have {KEY_BYTES} bytes; received {size}")
    return value


def _read_value(value: Any) -> Value:
    if type(value) is float and math.isfinite(value):
        return value
    return _read_key(value, "a finite number")


def _read_conditions(conditions: Mapping[str, Any]) -> dict[str, list[Value]]:
    listed = {name: one if isinstance(one, list) else [one] for name, one in conditions.items()}
    if (count := sum(map(len, listed.values()))) > FILTERED_VALUES:
        raise ValueError(f"a filter may have {FILTERED_VALUES} values; received {count}")
    return {name: [_read_value(one) for one in wanted] for name, wanted in listed.items()}


def _read_whole(value: Any) -> Any:
    """A whole number may be written 10.0."""
    return int(value) if type(value) is float and value.is_integer() else value


Key = Annotated[Token, PlainValidator(lambda value: _read_key(value))]
Count = Annotated[int, BeforeValidator(_read_whole)]


class RecommendRequest(BaseModel):
    """A request for a list.

    Attributes:
        user: The user's raw key; None: `features` say all.
        features: Raw values by input name; what is left out is missing.
        k: Length of the list.
        candidates: Items that are retrieved for the ranking model.
        exclude: Keys of items that are left out.
        filter: Values of which an item must have one, by column.
        seen: Whether items that the user has met may be in the list.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    user: Key | None = None
    features: dict[str, Any] = {}
    k: Count = Field(10, ge=1, le=LENGTH)
    candidates: Count = Field(200, ge=1, le=CANDIDATES)
    exclude: Annotated[list[Key], Field(max_length=EXCLUDED), FailFast()] = []
    filter: Annotated[
        dict[str, Any], Field(max_length=FILTERED_COLUMNS), AfterValidator(_read_conditions)
    ] = {}
    seen: bool = False


def parse_recommend(data: Mapping[str, Any]) -> RecommendRequest:
    """Reads a request; the first thing that is wrong ends it.

    Raises:
        RequestError: A key is unknown, or its value is not of its type or longer than it may be.
    """
    allowed = RecommendRequest.model_fields
    if (unknown := next((name for name in data if name not in allowed), None)) is not None:
        raise RequestError(f"{cut(unknown, 100)}: unknown; allowed: {', '.join(allowed)}")
    try:
        return RecommendRequest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        said = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{first['loc'][0]}: {said}") from error
