"""The schema of a dataset: a frozen spec per feature, JSON in and out, with a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from conf.errors import InputDataError

DType = Literal["int64", "float32", "bytes"]
Role = Literal["user", "item", "context", "label", "weight", "id"]
INPUT_ROLES: tuple[Role, ...] = ("user", "item", "context")  # Known when a row is scored.

PAD_ID = 0
"""The id that fills padded positions; never a token."""
OOV_ID = 1
"""The id of every token outside the vocabulary, and of null."""
FIRST_TOKEN_ID = 2
"""The id of the most frequent token."""
MOST_VALUES = 2**31
"""Values of one list: a record is a message of less than 2 GiB."""


@dataclass(frozen=True)
class FeatureSpec:
    """One feature as it stands in the records.

    Attributes:
        name: Key of the feature in `tf.train.Example`.
        dtype: Type on the wire.
        role: Which side of the model reads it; `id` is carried along and never a model input.
        shape: `()` scalar, `(n,)` fixed length, `(None,)` ragged.
        max_len: Longest list of a ragged feature, or None where it is not bounded.
        encoding: Name of the encoder that made it (a key of `encoders.json`), or `identity`.
        vocabulary_size: Number of ids, pad and OOV included, or None for plain values.
        shared_embedding: Name of the embedding table; features naming the same table share it.
        pad_value: Value of a missing position in a padded batch.
    """

    name: str
    dtype: DType
    role: Role
    shape: tuple[int | None, ...] = ()
    max_len: int | None = None
    encoding: str = "identity"
    vocabulary_size: int | None = None
    shared_embedding: str | None = None
    pad_value: int | float | str | None = None

    def __post_init__(self) -> None:
        """Refuses values outside the contract.

        Raises:
            InputDataError: dtype, role or shape is not one of the allowed values.
        """
        for field, value, allowed in (
            ("dtype", self.dtype, get_args(DType)),
            ("role", self.role, get_args(Role)),
        ):
            if value not in allowed:
                raise InputDataError(
                    f"feature {self.name!r} has an unknown {field}",
                    received=value,
                    allowed=", ".join(allowed),
                )
        if len(self.shape) > 1:
            raise InputDataError(
                f"feature {self.name!r} has more than one dimension",
                received=self.shape,
                allowed="(), (n,) or (None,)",
            )
        lengths = [("max_len", self.max_len), *(("shape", length) for length in self.shape)]
        for field, length in lengths:
            if length is not None and not (type(length) is int and 0 < length <= MOST_VALUES):
                raise InputDataError(
                    f"feature {self.name!r} has a {field} that no list can have",
                    received=length,
                    allowed=f"a whole number from 1 to {MOST_VALUES:,}",
                )

    @property
    def is_list(self) -> bool:
        """Whether a record holds a list of values."""
        return len(self.shape) == 1

    @property
    def is_ragged(self) -> bool:
        """Whether the list's length varies between records."""
        return self.shape == (None,)

    @property
    def table(self) -> str:
        """Name of the embedding table that this feature reads."""
        return self.shared_embedding or self.name

    def shares_ids(self, other: FeatureSpec) -> bool:
        """Whether an id means the same in another feature: they share a vocabulary or a table."""
        if self.dtype != "int64" or other.dtype != "int64":
            return False
        has_vocabulary = self.encoding == other.encoding and self.encoding != "identity"
        return has_vocabulary or self.table == other.table

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as a JSON object."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FeatureSpec:
        """Builds the spec from its JSON object.

        Raises:
            InputDataError: A key is unknown or missing.
        """
        try:
            return cls(**{**data, "shape": tuple(data.get("shape", ()))})
        except TypeError as error:
            raise InputDataError(
                "a feature spec does not fit this version's contract",
                received=json.dumps(dict(data), default=str),
                fix="rebuild the dataset, or read it with the version that wrote it",
            ) from error


@dataclass(frozen=True)
class FeatureSchema:
    """All features of a dataset, in the order of the records."""

    features: tuple[FeatureSpec, ...]

    def __getitem__(self, name: str) -> FeatureSpec:
        for spec in self.features:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(spec.name == name for spec in self.features)

    @property
    def names(self) -> tuple[str, ...]:
        """Feature names in record order."""
        return tuple(spec.name for spec in self.features)

    def by_role(self, *roles: Role) -> tuple[FeatureSpec, ...]:
        """Returns the features that have one of the given roles, in record order."""
        return tuple(spec for spec in self.features if spec.role in roles)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the schema as a JSON list."""
        return [spec.to_json() for spec in self.features]

    @classmethod
    def from_json(cls, data: Iterable[Mapping[str, Any]]) -> FeatureSchema:
        """Builds the schema from its JSON list."""
        return cls(tuple(FeatureSpec.from_json(item) for item in data))

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the canonical JSON: equal schemas, equal fingerprints."""
        return fingerprint(self.to_json())


def canonical_json(data: Any) -> str:
    """Returns JSON with sorted keys and no white space: the form that is hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(data: Any) -> str:
    """Returns the hex SHA-256 of a JSON value's canonical form."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


@dataclass(frozen=True)
class PackedSlot:
    """The place of a scalar in a list that holds several, as records that others wrote have them.

    Attributes:
        feature: The feature.
        packed: The list feature that holds it.
        offset: Its position in each record's list, from 0.
    """

    feature: str
    packed: str
    offset: int
