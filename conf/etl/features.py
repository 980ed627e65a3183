"""Features of the record, and the encoding of each."""

from __future__ import annotations

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict
from conf.etl.encodings import (
    BagWeightsConfig,
    CrossConfig,
    EncodingConfig,
    MultiHotConfig,
    SparseIndicesConfig,
    TokensConfig,
    VocabularyConfig,
)
from conf.schema import Role


class FeatureConfig(Strict):
    """One feature of the record: which column, which side of the model, which encoding."""

    name: Name
    column: str
    role: Role
    encoding: EncodingConfig = VocabularyConfig()
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
        if isinstance(self.encoding, CrossConfig):
            return (self.column, *self.encoding.crossed_with)
        if isinstance(self.encoding, MultiHotConfig) and self.encoding.weights is not None:
            return (self.column, self.encoding.weights)
        if isinstance(self.encoding, SparseIndicesConfig | BagWeightsConfig):
            return (self.column, *self.encoding.merged_with)
        return (self.column,)

    @property
    def vocabulary(self) -> str | None:
        """Name of the vocabulary that its tokens are looked up in, or None."""
        if isinstance(self.encoding, TokensConfig):
            return self.encoding.name or self.name
        return None
