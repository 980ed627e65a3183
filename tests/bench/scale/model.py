"""The cost model: each quantity is a line in what its law says that it grows by.

    value(size) = fixed + slope * law(size)

The two numbers of a line come from two records. A size is predicted from the two sizes below it,
so a record that comes later checks what was said before; beyond all records speaks the line
through the two largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.scale.records import Records, ScaleRecord

NUMBER_BYTES, KEY_BYTES = 4, 8
SLOT_BYTES = 16
"""Of the index of keys and of a vocabulary: key and row, token and id."""
INDEX_LOAD, VOCABULARY_LOAD = 5 / 8, 1 / 2
"""The most of a hash table's slots that are filled."""

Law = Callable[[float], float]


def by_size(size: float) -> float:
    """Grows by what is counted: work and bytes for each event, key or item."""
    return size


def by_decade(size: float) -> float:
    """Grows by a step for each factor of ten: fewer of the rows that are read are in the cache."""
    return math.log10(size)


def by_share(size: float) -> float:
    """Falls with the number of workers: each holds a part."""
    return 1 / size


def count_slots(entries: float, load: float) -> int:
    """Slots of a hash table that doubles: the least power of two that is not too full."""
    return 1 << max(10, math.ceil(math.log2(entries / load)))


def index_bytes(keys: float) -> float:
    """Bytes of the index of a dynamic table: slots, and the keys in the order of their rows."""
    return count_slots(keys, INDEX_LOAD) * SLOT_BYTES + keys * KEY_BYTES


def vocabulary_bytes(tokens: float) -> float:
    """Bytes of a vocabulary of whole numbers that is looked up: slots, and tokens by id."""
    return count_slots(tokens, VOCABULARY_LOAD) * SLOT_BYTES + tokens * KEY_BYTES


def row_bytes(dim: int, state: int) -> int:
    """Bytes of a row.

    Args:
        dim: Its numbers.
        state: Numbers that the optimizer keeps for each: 0 of SGD, 1 of Adagrad, 2 of Adam.
    """
    return dim * (1 + state) * NUMBER_BYTES


def table_law(dim: int, state: int) -> Law:
    """Grows by the bytes of rows and index, which doubles."""
    return lambda keys: keys * row_bytes(dim, state) + index_bytes(keys)


@dataclass(frozen=True)
class Line:
    """How a quantity grows.

    Attributes:
        fixed: What it is at a law of 0.
        slope: What it gains for each 1 of the law.
        law: What it grows by.
    """

    fixed: float
    slope: float
    law: Law = by_size

    def at(self, size: float) -> float:
        """Returns what it says for a size."""
        return self.fixed + self.slope * self.law(size)


def fit_line(points: Sequence[tuple[float, float]], law: Law) -> Line:
    """Returns the line through two points; through one, the line without a fixed part.

    Args:
        points: Size and value of one or two records.
        law: What the value grows by.
    """
    (size, value) = points[-1]
    if len(points) == 1:
        return Line(0.0, value / law(size), law)
    (below, least) = points[-2]
    slope = (value - least) / (law(size) - law(below))
    return Line(value - slope * law(size), slope, law)


@dataclass(frozen=True)
class Quantity:
    """One thing that is predicted.

    Attributes:
        series: Of records.
        figure: Its name there.
        title: Its name for readers.
        unit: That readers see: a key of `UNITS`.
        law: What it grows by.
    """

    series: str
    figure: str
    title: str
    unit: str
    law: Law = by_size

    def points(self, records: Records) -> list[tuple[float, float]]:
        """Returns size and value of each record that has the figure."""
        found: Sequence[ScaleRecord] = records.get(self.series, ())
        return [(one.size, one.figures[self.figure]) for one in found if self.figure in one.figures]

    def line(self, records: Records) -> Line:
        """Returns the line that speaks for sizes beyond all records.

        Raises:
            LookupError: There is no record.
        """
        if not (points := self.points(records)):
            raise LookupError(f"no record of {self.series} has {self.figure}: measure it first")
        return fit_line(points[-2:], self.law)


UNITS = {"s": 1.0, "ms": 1e-3, "MB": 1e6, "GB": 1e9, "rows": 1.0}
"""What one of the unit is in the unit of the records."""


@dataclass(frozen=True)
class Check:
    """A size, what was measured there, and what the two sizes below it said.

    Attributes:
        size: Of the record.
        measured: The figure.
        predicted: None: there are no two sizes below it.
    """

    size: float
    measured: float
    predicted: float | None

    @property
    def error(self) -> float | None:
        """Share by which the prediction is above what was measured; negative: below."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def check(quantity: Quantity, records: Records) -> list[Check]:
    """Holds each record of a quantity against the two sizes below it."""
    points = quantity.points(records)
    return [
        Check(size, value, _predict(points[max(0, number - 2) : number], quantity.law, size))
        for number, (size, value) in enumerate(points)
    ]


def _predict(points: Sequence[tuple[float, float]], law: Law, size: float) -> float | None:
    return fit_line(points, law).at(size) if len(points) == 2 else None
