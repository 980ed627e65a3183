"""Base classes of the configs of both sides, and the field types that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlparse

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from conf.errors import ConfigError
from conf.paths import WRITABLE_STORES, local_path

COLUMN_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*$"
Name = Annotated[str, Field(pattern=COLUMN_NAME_PATTERN, max_length=100)]
"""Name of a source, column or feature: plain, since it becomes a path, a key or an identifier."""


class Strict(BaseModel):
    """Base of all configs: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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


class StrictFinite(Strict):
    """Base of the training configs: strict, and every number is finite."""

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
