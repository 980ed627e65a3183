"""Base of the configs of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, ConfigDict

from conf.etl import Strict


class Finite(Strict):
    """Base of the training configs: strict, and every number is finite."""

    model_config = ConfigDict(allow_inf_nan=False)


def default_tag(tag: str, default: str) -> BeforeValidator:
    """Lets a union's keys be given without its tag: they are those of the default member."""

    def add_tag(value: Any) -> Any:
        named = not isinstance(value, Mapping) or tag in value
        return value if named else {tag: default, **value}

    return BeforeValidator(add_tag)


def kind_alone(default: str) -> BeforeValidator:
    """Lets a union's member be given by its `kind` alone; keys without one are the default's."""

    def add_kind(value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, Mapping) and "kind" not in value:
            return {"kind": default, **value}
        return value

    return BeforeValidator(add_kind)
