"""Base classes of the configs of both sides, and the field types that they share."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlparse

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.paths import WRITABLE_STORES

COLUMN_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*$"
Name = Annotated[str, Field(pattern=COLUMN_NAME_PATTERN, max_length=100)]
"""Name of a source, column or feature: plain, since it becomes a path, a key or an identifier."""
OWN_CODE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""`package.module:function` of one's own."""


class Strict(BaseModel):
    """Base of all configs: frozen, unknown keys refused, a truth value is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_number(cls, data: Any) -> Any:
        """Refuses `true` (and `yes`, `on`) where a number belongs: it would be read as 1."""
        for name, value in data.items() if isinstance(data, Mapping) else ():
            values = value if isinstance(value, list | tuple) else [value]
            truth = next((one for one in values if isinstance(one, bool)), None)
            if truth is not None and _is_number_alone(cls, name):
                raise ValueError(
                    f"{name} must be a number, not a truth value; received {truth}: YAML reads "
                    "yes, no, on and off so; quote them where they are words"
                )
        return data


@cache
def _is_number_alone(model: type[BaseModel], name: str) -> bool:
    """Whether a field takes numbers, and no truth value."""
    field = model.model_fields.get(name)
    if field is None or any(isinstance(part, BeforeValidator) for part in field.metadata):
        return False  # What reads a value before its type is checked may know truth values.
    kinds = set(_list_kinds(field.annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, Any}


def _list_kinds(annotation: Any) -> Iterator[Any]:
    """The types that a value may have, of the members of unions and literals too."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType, tuple):
        for member in get_args(annotation):
            yield from _list_kinds(member)
    elif origin is Annotated:
        yield from _list_kinds(get_args(annotation)[0])
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    else:
        yield annotation


def _check_published_root(root: str) -> str:
    if urlparse(root).scheme.lower() in WRITABLE_STORES:
        return root
    try:
        local_path(root)
    except ConfigError as error:
        raise ValueError(
            "it must lie on a file system, local or mounted, or in a store with conditional puts: "
            + ", ".join(f"{scheme}://" for scheme in WRITABLE_STORES)
        ) from error
    return root


PublishedRoot = Annotated[str, AfterValidator(_check_published_root)]


class Named(Strict):
    """What makes or declares a column or feature."""

    name: Name = Field(description="Name of the column or feature.")


class StrictFinite(Strict):
    """Strict, and every number is finite: the training configs, bounds of columns, labels."""

    model_config = ConfigDict(allow_inf_nan=False)


def default_tag(tag: str, default: str, *, alone: bool = False) -> BeforeValidator:
    """Lets a union's keys be given without its tag: they are those of the default member.

    Args:
        tag: Key that tells the members apart.
        default: Its value where it is left out.
        alone: Whether a member may also be given by its tag alone, as in `learning_rate: cosine`.
    """

    def add_tag(value: Any) -> Any:
        if alone and isinstance(value, str):
            return {tag: value}
        named = not isinstance(value, Mapping) or tag in value
        return value if named else {tag: default, **value}

    return BeforeValidator(add_tag)


def keep_apart(params: dict[str, Any], *given: str) -> dict[str, Any]:
    """Returns the parameters of user code; refuses those that Sluice sets."""
    if taken := sorted(set(given) & set(params)):
        raise ValueError(f"{', '.join(taken)}: Sluice sets it; leave it out of params")
    return params
