"""Encoder definitions: one description, executed by Arrow in the ETL and by TensorFlow in serving.

`encoders.json` of a dataset version holds an `EncoderPlan`. Vocabularies stand beside it as
Parquet files (`token`, `id`, `count`), ids ascending.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from conf.errors import InputDataError
from conf.schema import FeatureSchema, fingerprint

ENCODERS_FILE = "encoders.json"
ENCODERS_FORMAT_VERSION = 1
IDENTITY = "identity"

TokenDType = Literal["int64", "string"]


@dataclass(frozen=True)
class VocabularySpec:
    """A fitted vocabulary: 0 pad, 1 OOV and null, from 2 tokens by falling frequency, then token.

    Attributes:
        name: Name that `FeatureSpec.encoding` refers to.
        token_dtype: Type of the raw tokens.
        file: Parquet file, relative to `encoders.json`.
        size: Number of ids, pad and OOV included.
        file_crc32c: Checksum of that file, 8 hex digits.
    """

    name: str
    token_dtype: TokenDType
    file: str
    size: int
    file_crc32c: str


@dataclass(frozen=True)
class ColumnEncoding:
    """How one raw column becomes one feature: same position as the feature in the schema."""

    feature: str
    column: str
    raw_dtype: Literal["int64", "float32", "string", "bytes"]
    encoder: str = IDENTITY


@dataclass(frozen=True)
class EncoderPlan:
    """Everything that is needed to turn raw columns into features, at ETL or at serving time."""

    schema: FeatureSchema
    columns: tuple[ColumnEncoding, ...]
    vocabularies: tuple[VocabularySpec, ...]

    def vocabulary(self, name: str) -> VocabularySpec:
        """Returns the vocabulary of that name.

        Raises:
            KeyError: There is none.
        """
        for spec in self.vocabularies:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def column(self, feature: str) -> ColumnEncoding:
        """Returns the encoding of a feature.

        Raises:
            KeyError: The plan does not make that feature.
        """
        for spec in self.columns:
            if spec.feature == feature:
                return spec
        raise KeyError(feature)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as a JSON object."""
        return {
            "format_version": ENCODERS_FORMAT_VERSION,
            "features": self.schema.to_json(),
            "columns": [asdict(column) for column in self.columns],
            "vocabularies": [asdict(vocabulary) for vocabulary in self.vocabularies],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EncoderPlan:
        """Builds the plan from its JSON object.

        Raises:
            InputDataError: The format version is not this one, or a key does not fit.
        """
        version = data.get("format_version")
        if version != ENCODERS_FORMAT_VERSION:
            raise InputDataError(
                f"{ENCODERS_FILE} has another format version",
                received=version,
                allowed=ENCODERS_FORMAT_VERSION,
                fix="rebuild the dataset with this version of Sluice",
            )
        try:
            return cls(
                schema=FeatureSchema.from_json(data["features"]),
                columns=tuple(ColumnEncoding(**item) for item in data["columns"]),
                vocabularies=tuple(VocabularySpec(**item) for item in data["vocabularies"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise InputDataError(
                f"{ENCODERS_FILE} is not complete", received=repr(error)
            ) from error

    def dumps(self) -> str:
        """Returns the text of `encoders.json`."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the plan, vocabulary checksums included."""
        return fingerprint(self.to_json())
