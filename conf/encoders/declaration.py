"""How encoders are declared: operations as data.

What a user sets of them stands in `conf/etl/encodings.py`; `etl/encoders/` executes them on Arrow,
`training/encoders/operations.py` on tensors. Executors load these files: they need no pydantic.

Ids follow the rule of the vocabularies: 0 pads, 1 stands for a missing value, real values start
at 2. Missing is null, and NaN where values are floats. `encoders.json` holds operations as JSON
objects.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform

from conf.errors import InputDataError
from conf.schema import DType

TEXT = ("string", "bytes")
NUMBERS = ("int64", "float32", "float64")
"""Raw types that are numbers."""
MAX_BUCKETS = 2**31 - 1

OPERATIONS: dict[str, type[Operation]] = {}
"""Every operation that was declared, by kind; complete after `load_families`."""


@dataclass(frozen=True)
class OperationOutput:
    """Type and shape of the result of an operation.

    Attributes:
        dtype: Type on the wire.
        vocabulary_size: Number of ids, or None for plain values.
        shape: Shape of the feature; None: that of the raw column.
    """

    dtype: DType
    vocabulary_size: int | None = None
    shape: tuple[int | None, ...] | None = None

    @property
    def pad_value(self) -> int | float | str:
        """Value in place of a missing one, and of a missing position."""
        if self.dtype == "bytes":
            return ""
        return 0 if self.dtype == "int64" else 0.0


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Operation:
    """What an encoder computes, as data: the same is executed by Arrow and by TensorFlow.

    Each class of them becomes a frozen dataclass.

    Attributes:
        kind: Its name in `encoders.json`.
        accepts: Types of the raw values that it reads.
        output: Type and shape of the result.
        raw_values: What a version knows of a feature's raw values. `counted`: how many are missing,
            as the results tell the rest. `kept`: their statistics too, as the results do not tell
            them. `compared`: drift goes by these statistics besides, as each build fits anew what
            the values become.
        written_where_set: Fields that were added later: they stand in the JSON object only where
            they are used, so what was written before keeps its bytes and its fingerprint.
    """

    kind: ClassVar[str]
    accepts: ClassVar[tuple[str, ...]]
    raw_values: ClassVar[Literal["counted", "kept", "compared"]] = "counted"
    written_where_set: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)
        OPERATIONS[cls.kind] = cls

    if TYPE_CHECKING:

        @property
        def output(self) -> OperationOutput:
            """Type and shape of the result."""

    def to_json(self) -> dict[str, Any]:
        """Returns the operation as a JSON object."""
        data = {"kind": self.kind, **asdict(self)}
        return {n: value for n, value in data.items() if n not in self.written_where_set or value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Operation:
        """Builds the operation from the fields of its JSON object."""
        return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in data.items()})


@cache
def load_families() -> None:
    """Imports every family, so that all that is declared is known."""
    package = sys.modules[__package__]
    for module in pkgutil.iter_modules(package.__path__, f"{__package__}."):
        import_module(module.name)


def operation_from_json(data: Mapping[str, Any]) -> Operation:
    """Builds an operation from its JSON object.

    Raises:
        InputDataError: It is of no known kind.
        TypeError: A field is missing or unknown.
    """
    load_families()
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in OPERATIONS:
        raise InputDataError(
            "an encoder is of an unknown kind",
            received=kind,
            allowed=", ".join(sorted(OPERATIONS)),
            fix="read the dataset with the version of Sluice that wrote it",
        )
    return OPERATIONS[kind].from_json(fields)
