"""Features of the record, and the encoding of each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conf.etl.base import Name, Strict
from conf.schema import Role


class VocabularyConfig(Strict):
    """A vocabulary fitted on the train split: 0 pad, 1 OOV, then by falling frequency."""

    kind: Literal["vocabulary"] = "vocabulary"
    name: Name | None = Field(None, description="Vocabulary to share; None: one of its own.")
    min_count: int = Field(1, ge=1)
    max_size: int | None = Field(None, ge=1, description="Most frequent tokens kept.")


class IdentityConfig(Strict):
    """The value as it is, cast to the feature's type."""

    kind: Literal["identity"] = "identity"


EncodingConfig = Annotated[VocabularyConfig | IdentityConfig, Field(discriminator="kind")]


class FeatureConfig(Strict):
    """One feature of the record: which column, which side of the model, which encoding."""

    name: Name
    column: str
    role: Role
    encoding: EncodingConfig = VocabularyConfig()
    max_len: int | None = Field(None, ge=1, description="List features: values kept.")
