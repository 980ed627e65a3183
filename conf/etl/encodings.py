"""Features and their encodings, as a config states them.

What each kind of encoding takes is declared in `conf/encoders/`, without pydantic. Here the models
are made that read and check it: subclasses of what is declared there, of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_type_hints

from pydantic import Field, create_model, model_validator

from conf.config_base import Name, Strict
from conf.encoders.declaration import ENCODINGS, Encoding, Options, load_families
from conf.encoders.tokens import TokensConfig
from conf.schema import Role


class _Model(Strict, Options):
    """What all models of declared options do."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        return cls.complete(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self


def _build_models() -> dict[str, Any]:
    """Makes the model of each class of options, by its name."""
    load_families()
    models: dict[str, Any] = {}
    for declared in Options.declared:
        if issubclass(declared, Encoding) and declared not in ENCODINGS.values():
            continue  # what several kinds have in common
        # Names of declared classes stand for their models.
        types = get_type_hints(
            declared, localns={"Field": Field, "Name": Name, **models}, include_extras=True
        )
        keys: dict[str, Any] = {}
        for key in fields(declared):  # type: ignore[arg-type]
            default = key.default if key.default_factory is MISSING else key.default_factory()
            default = ... if default is MISSING else default
            keys[key.name] = (types[key.name], Field(default, **key.metadata))
        models[declared.__name__] = create_model(
            declared.__name__,
            __base__=(_Model, declared),
            __doc__=declared.__doc__,
            __module__=__name__,
            **keys,
        )
    return models


_MODELS = _build_models()
_BY_KIND = {kind: _MODELS[declared.__name__] for kind, declared in sorted(ENCODINGS.items())}

if TYPE_CHECKING:
    EncodingConfig = Encoding
else:
    _Encodings = Union[tuple(_BY_KIND.values())]  # noqa: UP007 - known at run time alone
    EncodingConfig = Annotated[_Encodings, Field(discriminator="kind")]


def build_encoding(kind: str, **keys: Any) -> Encoding:
    """Returns an encoding of a kind with some keys, as a config would state it."""
    encoding: Encoding = _BY_KIND[kind](**keys)
    return encoding


class FeatureConfig(Strict):
    """One feature of the record: which column, which side of the model, which encoding."""

    name: Name = Field(description="Name of the feature in the records.")
    column: str = Field(description="Column of the events that it is made of.")
    role: Role = Field(
        description="Which side of a model reads it; `id` is carried along and read by none."
    )
    encoding: EncodingConfig = Field(
        build_encoding("vocabulary"), description="How the column's value becomes the feature's."
    )
    max_len: int | None = Field(None, ge=1, description="List features: values kept.")
    length: int | None = Field(None, ge=1, description="Lists of exactly this many values.")

    @model_validator(mode="after")
    def _one_length(self) -> FeatureConfig:
        if self.length is not None and self.max_len is not None:
            raise ValueError(f"feature {self.name!r} has both `length` and `max_len`")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads by name, its own first."""
        return (self.column, *self.encoding.further_columns)

    @property
    def vocabulary(self) -> str | None:
        """Name of the vocabulary that its tokens are looked up in, or None."""
        if isinstance(self.encoding, TokensConfig):
            return self.encoding.name or self.name
        return None

    @property
    def fitted_columns(self) -> tuple[str, ...]:
        """The columns that a model reads through what was fitted, so that values are lost."""
        is_read = self.role in ("user", "item", "context")
        return self.columns if is_read and self.encoding.loses_values else ()


def find_counted_lists(features: Any) -> Any:
    """Gives each feature of kind `length` the column and `max_len` of the list that it counts.

    Args:
        features: The features of a config as they are given, before they are checked.
    """
    if not isinstance(features, list | tuple):
        return features
    named = {
        feature["name"]: feature
        for feature in features
        if isinstance(feature, Mapping) and isinstance(feature.get("name"), str)
    }
    return [_find_counted_list(feature, named) for feature in features]


def _find_counted_list(feature: Any, named: Mapping[Any, Any]) -> Any:
    encoding = feature.get("encoding") if isinstance(feature, Mapping) else None
    if not isinstance(encoding, Mapping) or encoding.get("kind") != "length":
        return feature
    of = encoding.get("of")
    counted = named.get(of, {}) if isinstance(of, str) else {}
    found = {"column": counted.get("column", of), "max_len": counted.get("max_len")}
    return {**{name: value for name, value in found.items() if value is not None}, **feature}
