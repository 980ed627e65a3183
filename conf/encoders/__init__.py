"""Encoder definitions: one description, executed by Arrow in the ETL and by TensorFlow in serving.

`encoders.json` of a dataset version holds an `EncoderPlan`. Vocabularies stand beside it as
Parquet files (`token`, `id`, `count`, and for one that grows from version to version `last_seen`
and `is_retired`), ids ascending; tables of statistics as Parquet files of float32 columns.

Format version 1 knows identity and plain vocabularies alone. A plan that needs no more is still
written as version 1: its bytes and its fingerprint stay what they were.
What an encoder computes is declared in the files beside this one; a new one starts there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from conf.encoders.declaration import Operation, operation_from_json
from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, fingerprint

ENCODERS_DIR = "encoders"
"""Folder of a dataset version that holds them."""
ENCODERS_FILE = "encoders.json"
ENCODERS_FORMAT_VERSIONS = (1, 2)
IDENTITY = "identity"
"""Encoder of values that are read as they are."""
KEY_PREFIX = "key:"
"""Starts the encoder of 64-bit keys that are read as they are, `key:<feature>`: never numbers."""

RAW_PREFIX = "raw_"
"""Starts the name of a feature that holds a raw column as it came, in rows that are not trained on.

Where fitted encoders would lose the value, a model of other encoders can still be measured on such
rows. The feature is a list: `[value]`, empty where there is none. A float64 is written as text.
"""

TokenDType = Literal["int64", "string"]
RawDType = Literal["int64", "float32", "float64", "string", "bytes"]


def _compact(item: Any) -> dict[str, Any]:
    """Fields of a dataclass without those that have their default."""
    defaults = {field.name: field.default for field in fields(item)}
    return {name: value for name, value in asdict(item).items() if value != defaults[name]}


@dataclass(frozen=True)
class VocabularySpec:
    """A fitted vocabulary: 0 pad, 1 null and OOV, then the OOV buckets, then the tokens.

    Attributes:
        name: Name that `FeatureSpec.encoding` refers to.
        token_dtype: Type of the raw tokens.
        file: Parquet file, relative to `encoders.json`.
        size: Number of ids, pad, OOV and buckets included.
        file_crc32c: Checksum of that file, 8 hex digits.
        oov_buckets: Buckets that unknown tokens are hashed to, or None: all of them are id 1.
        incremental: Whether the next version grows out of it: the file then says when each token
            was last seen, and which are retired.
        version: 1 for a vocabulary fitted from nothing, one more for each that grew out of it.
        parent_crc32c: Checksum of the file that it grew out of, or None.
        pad_token: Token that pads lists in the raw data, itself without an id; None: none does.
    """

    name: str
    token_dtype: TokenDType
    file: str
    size: int
    file_crc32c: str
    oov_buckets: int | None = None
    incremental: bool = False
    version: int = 1
    parent_crc32c: str | None = None
    pad_token: int | None = None

    @property
    def first_token_id(self) -> int:
        """The id of the first token."""
        return FIRST_TOKEN_ID + (self.oov_buckets or 0)


@dataclass(frozen=True)
class TableSpec:
    """A fitted table of statistics, one row per id of a vocabulary.

    Attributes:
        name: Name that an operation refers to.
        file: Parquet file, relative to `encoders.json`: `all`, `fold_0`, `fold_1`, …, float32.
        rows: Number of rows.
        file_crc32c: Checksum of that file, 8 hex digits.
    """

    name: str
    file: str
    rows: int
    file_crc32c: str


@dataclass(frozen=True)
class RawColumn:
    """A raw column that an operation reads.

    Attributes:
        name: Its name.
        dtype: Declared type of its values.
        is_list: Whether it holds lists.
        is_served: False for a column that exists at ETL time alone.
    """

    name: str
    dtype: RawDType
    is_list: bool = False
    is_served: bool = True


@dataclass(frozen=True)
class ColumnEncoding:
    """The plan by which raw columns become one feature: same position as the feature in the schema.

    Attributes:
        feature: The feature.
        column: The raw column, the first of `inputs` where there are several.
        raw_dtype: Declared type of its values.
        encoder: `identity`, the name of a vocabulary, `key:<feature>`, or `<kind>:<feature>` of an
            operation.
        operation: Operation on the values; None for identity and plain vocabularies.
        inputs: The columns that an operation reads.
    """

    feature: str
    column: str
    raw_dtype: RawDType
    encoder: str = IDENTITY
    operation: Operation | None = None
    inputs: tuple[RawColumn, ...] = ()

    @property
    def vocabulary(self) -> str | None:
        """Name of the vocabulary that it looks tokens up in, or None."""
        if self.operation is not None:
            return getattr(self.operation, "vocabulary", None)
        is_plain = self.encoder == IDENTITY or self.encoder.startswith(KEY_PREFIX)
        return None if is_plain else self.encoder

    @property
    def raw_columns(self) -> set[str]:
        """Names of the raw columns that the feature is made from."""
        return {self.column, *(raw.name for raw in self.inputs)}

    def to_json(self) -> dict[str, Any]:
        """Returns the encoding as a JSON object."""
        data: dict[str, Any] = {
            "feature": self.feature,
            "column": self.column,
            "raw_dtype": self.raw_dtype,
            "encoder": self.encoder,
        }
        if self.operation is not None:
            data["operation"] = self.operation.to_json()
            data["inputs"] = [_compact(column) for column in self.inputs]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ColumnEncoding:
        """Builds the encoding from its JSON object."""
        known = dict(data)
        operation = known.pop("operation", None)
        inputs = known.pop("inputs", ())
        return cls(
            **known,
            operation=None if operation is None else operation_from_json(operation),
            inputs=tuple(RawColumn(**item) for item in inputs),
        )


@dataclass(frozen=True)
class EncoderPlan:
    """Everything that is needed to turn raw columns into features, at ETL or at serving time."""

    schema: FeatureSchema
    columns: tuple[ColumnEncoding, ...]
    vocabularies: tuple[VocabularySpec, ...]
    tables: tuple[TableSpec, ...] = ()

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
        columns = [column.to_json() for column in self.columns]
        vocabularies = [_compact(vocabulary) for vocabulary in self.vocabularies]
        is_plain = all("operation" not in column for column in columns) and all(
            spec.oov_buckets is None and not spec.incremental and spec.pad_token is None
            for spec in self.vocabularies
        )
        data: dict[str, Any] = {
            "format_version": 1 if is_plain else 2,
            "features": self.schema.to_json(),
            "columns": columns,
            "vocabularies": vocabularies,
        }
        if self.tables:
            data["tables"] = [asdict(table) for table in self.tables]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EncoderPlan:
        """Builds the plan from its JSON object.

        Raises:
            InputDataError: The format version is a later one, or a key does not fit.
        """
        version = data.get("format_version")
        if version not in ENCODERS_FORMAT_VERSIONS:
            raise InputDataError(
                f"{ENCODERS_FILE} has another format version",
                received=version,
                allowed=", ".join(map(str, ENCODERS_FORMAT_VERSIONS)),
                fix="rebuild the dataset with this version of Sluice, or read it with its own",
            )
        try:
            return cls(
                schema=FeatureSchema.from_json(data["features"]),
                columns=tuple(ColumnEncoding.from_json(item) for item in data["columns"]),
                vocabularies=tuple(VocabularySpec(**item) for item in data["vocabularies"]),
                tables=tuple(TableSpec(**item) for item in data.get("tables", ())),
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
