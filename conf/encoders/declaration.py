"""How encoders are declared: operations as data, what a user may set of them, what executes them.

A family of encoders is a file of this package. It holds the operations, and beside each what a
user writes in a config. What is declared here is executed in the file of the same name of
`etl/encoders/` and of `training/encoders/`. Executors load these files too, so nothing here needs
pydantic: options are frozen dataclasses, and `conf/etl/encodings.py` makes the models that read
them. Their types are never evaluated before.

Ids follow the rule of the vocabularies: 0 pads, 1 stands for a missing value, real values start
at 2. Missing is null, and NaN where values are floats. `encoders.json` holds operations as JSON
objects.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform

from conf.errors import InputDataError
from conf.schema import DType

TEXT = ("string", "bytes")
NUMBERS = ("int64", "float32", "float64")
"""Raw types that are numbers."""
MAX_BUCKETS = 2**31 - 1

OPERATIONS: dict[str, type[Operation]] = {}
"""Every operation that was declared, by kind; complete after `load_families`."""
ENCODINGS: dict[str, type[Encoding]] = {}
"""Every encoding that a config may name, by kind; complete after `load_families`."""


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
        family: Name of the file that declares it, and of those that execute it.
    """

    kind: ClassVar[str]
    accepts: ClassVar[tuple[str, ...]]
    raw_values: ClassVar[Literal["counted", "kept", "compared"]] = "counted"
    written_where_set: ClassVar[tuple[str, ...]] = ()
    family: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)
        _declare(cls, OPERATIONS)

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


def key(default: Any = MISSING, *, description: str, **limits: Any) -> Any:
    """Returns a key of a config, as pydantic's `Field` declares it.

    Args:
        default: Its value where it is left out; none: it must be given.
        description: What it means.
        limits: What values it may have, in the words of `Field`.
    """
    metadata = {"description": description, **limits}
    if isinstance(default, dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(key,))
class Options:
    """Keys of a config that an encoder's file declares: each class becomes a frozen dataclass.

    Attributes:
        declared: All such classes, each after those that it names.
    """

    declared: ClassVar[list[type[Options]]] = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if type(cls) is type:  # The models that pydantic makes of them have a type of its own.
            dataclass(frozen=True, kw_only=True)(cls)
            Options.declared.append(cls)

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the keys with those that follow from others.

        Args:
            given: The keys as they stand in a config, before they are checked.

        Raises:
            ValueError: Keys contradict each other.
        """
        return given

    def check(self) -> None:
        """Checks the keys against each other.

        Raises:
            ValueError: They contradict each other.
        """


class Encoding(Options):
    """What is declared of each kind of encoding; `kind` is its name in a config.

    Attributes:
        operation: The operation that executes it; None: it needs none.
        is_stated: Whether its keys are the operation's fields; else `state` says what it is.
        takes: Whether its column holds a value of each row, a list, or either.
        sets_length: Whether it says itself how long the feature is.
        further_columns_key: The key that names what it reads beside its feature's column.
        family: Name of the file that declares it, and of the one that fits it.
    """

    if TYPE_CHECKING:
        kind: str
    operation: ClassVar[type[Operation] | None] = None
    is_stated: ClassVar[bool] = False
    takes: ClassVar[Literal["values", "lists", "either"]] = "either"
    sets_length: ClassVar[bool] = False
    further_columns_key: ClassVar[str | None] = None
    family: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if type(cls) is type and "kind" in vars(cls):
            _declare(cls, ENCODINGS)

    @property
    def accepts(self) -> tuple[str, ...]:
        """Types of raw values that its column may have; empty: any."""
        return () if self.operation is None else self.operation.accepts

    @property
    def further_columns(self) -> tuple[str, ...]:
        """Columns that it reads by name beside its feature's own."""
        named = (
            None if self.further_columns_key is None else getattr(self, self.further_columns_key)
        )
        return (named,) if isinstance(named, str) else named or ()

    @property
    def fits_numbers(self) -> bool:
        """Whether numbers are fitted for it on the train split; ids of tokens are none."""
        return False

    @property
    def loses_values(self) -> bool:
        """Whether values cannot be told from what a model reads, and what they become is fitted."""
        return self.fits_numbers

    def state(self) -> Operation | None:
        """Returns the operation, where it follows from the config; None: it is fitted."""
        if self.operation is None or not self.is_stated:
            return None
        given = {own.name: getattr(self, own.name) for own in fields(self.operation)}
        return self.operation(**{name: own for name, own in given.items() if own is not None})


_Declared = TypeVar("_Declared", type[Operation], type[Encoding])


def _declare(cls: _Declared, known: dict[str, _Declared]) -> None:
    if cls.kind in known:
        raise TypeError(f"{cls.kind!r} is declared twice: {known[cls.kind]}, {cls}")
    cls.family = cls.__module__.rpartition(".")[2]
    known[cls.kind] = cls


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


_Execution = TypeVar("_Execution")
_Own = TypeVar("_Own", bound=Callable[..., Any])


class Executions(Generic[_Execution]):
    """What one side does for each kind: declared there.

    Args:
        module: Where; `{family}` stands for the name of the file that declares the kind here.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._known: dict[str, Any] = {}

    def declare(self, *kinds: type[Operation] | type[Encoding]) -> Callable[[_Own], _Own]:
        """Declares what is done for some kinds: decorates it.

        Args:
            kinds: The operations or encodings.
        """

        def add(execution: _Own) -> _Own:
            self._known |= dict.fromkeys((declared.kind for declared in kinds), execution)
            return execution

        return add

    def find(self, declared: Operation | Encoding) -> _Execution | None:
        """Returns what is done for an operation or an encoding, or None."""
        import_module(self._module.format(family=declared.family))
        found: _Execution | None = self._known.get(declared.kind)
        return found

    def __getitem__(self, declared: Operation | Encoding) -> _Execution:
        """Returns what is done for an operation or an encoding.

        Raises:
            NotImplementedError: Nothing was declared.
        """
        found = self.find(declared)
        if found is None:
            place = self._module.format(family=declared.family).replace(".", "/")
            raise NotImplementedError(f"{place}.py declares nothing for {declared.kind!r}")
        return found
