"""Hashes of one value and of several: buckets, 64-bit keys, crosses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.encoders.declaration import (
    NUMBERS,
    TEXT,
    Operation,
    OperationOutput,
    operation_from_json,
)
from conf.schema import FIRST_TOKEN_ID

CROSS_SEPARATOR = "\x1f"
"""Stands between the fields of a cross: ASCII's unit separator, which text does not hold."""


class Hash(Operation):
    """FarmHash Fingerprint64 of a value's text, as `tf.strings.to_hash_bucket_fast` computes it.

    Attributes:
        buckets: Ids are 2 + fingerprint mod buckets; None keeps all 64 bits as a key.
    """

    kind = "hash"
    accepts = ("int64", *TEXT)
    buckets: int | None

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput(
            "int64", None if self.buckets is None else FIRST_TOKEN_ID + self.buckets
        )


class Cross(Operation):
    """Hash of several fields joined by `CROSS_SEPARATOR`; missing where one of them is.

    Where fields are lists, every combination of their values is crossed, the last list's varying
    fastest; the feature keeps its first `max_len`.

    Attributes:
        buckets: Ids are 2 + fingerprint mod buckets.
        prepared: By field, what is done to it before: the field is then the id that comes out, a
            missing one where that is 1; None where the field is the value itself. Empty: no field
            is prepared.
    """

    kind = "cross"
    accepts = (*NUMBERS, *TEXT)
    written_where_set = ("prepared",)
    buckets: int
    prepared: tuple[Operation | None, ...] = ()

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + self.buckets)

    def preparation(self, field: int) -> Operation | None:
        """Operation on a field before it is hashed, or None."""
        return self.prepared[field] if self.prepared else None

    def to_json(self) -> dict[str, Any]:
        """Returns the operation as a JSON object."""
        data = super().to_json()
        if self.prepared:
            data["prepared"] = [None if own is None else own.to_json() for own in self.prepared]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Operation:
        """Builds the operation from the fields of its JSON object."""
        parts = data.get("prepared", ())
        prepared = [None if own is None else operation_from_json(own) for own in parts]
        return super().from_json({**data, "prepared": prepared})
