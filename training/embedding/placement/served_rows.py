"""Rows of all workers, read by the chief outside of steps, for validation.

While the chief computes, the others wait for what it asks of them:

    chief     number of the matrix and how many rows; the rows; adds up what comes
    others    the rows that they own, zeros in place of the others; until the chief is done

Each message is a sum over the workers, of one of a few lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import tensorflow as tf

from training.distribution.workers import Workers

T = TypeVar("T")

_LEAST_ROWS, _MOST_ROWS = 1 << 8, 1 << 16
_END = 0


@runtime_checkable
class OwnedRows(Protocol):
    """A matrix of which each worker owns some rows.

    Attributes:
        dim: Length of a row.
        variable: The rows of this worker.
        read_remote: Reads rows of all workers; None: nobody serves them.
    """

    dim: int
    variable: tf.Variable
    read_remote: Callable[[np.ndarray], np.ndarray] | None

    def read_own(self, rows: np.ndarray) -> np.ndarray:
        """Returns those rows that this worker owns, and zeros in place of the others."""
        ...


class HasRows(Protocol):
    """A table."""

    @property
    def rows(self) -> Any:
        """Its matrix; of others than `OwnedRows` each process has all rows."""
        ...


class ServedRows:
    """The rows of some tables, which the workers serve to their chief.

    Args:
        workers: The processes of the run.
        tables: All tables by name.
    """

    def __init__(self, workers: Workers, tables: Mapping[str, HasRows]) -> None:
        rows = {name: tables[name].rows for name in sorted(tables)}
        owned = {name: found for name, found in rows.items() if isinstance(found, OwnedRows)}
        self._workers, self._names, self._matrices = workers, list(owned), list(owned.values())

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The rows that this worker owns, by the table's name."""
        pairs = zip(self._names, self._matrices, strict=True)
        return {f"table {name}": matrix.variable for name, matrix in pairs}

    def share(self, decide: Callable[[], T]) -> T:
        """As `Workers.share`, for what reads rows of all workers.

        Args:
            decide: Called by the chief alone; returns what JSON holds.
        """
        if not self._matrices:
            return self._workers.share(decide)

        def decide_served() -> T:
            with self._asking():
                return decide()

        if not self._workers.is_chief:
            self._serve()
        return self._workers.share(decide_served)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        # A signal may end the block at any time, and a question must be brought to its end.
        with ThreadPoolExecutor(1, thread_name_prefix="rows of workers") as asking:
            for number, matrix in enumerate(self._matrices):
                matrix.read_remote = self._build_reader(asking, number)
            try:
                yield
            finally:
                for matrix in self._matrices:
                    matrix.read_remote = None
                asking.submit(self._tell, _END, 0).result()

    def _build_reader(
        self, asking: ThreadPoolExecutor, number: int
    ) -> Callable[[np.ndarray], np.ndarray]:
        dim = self._matrices[number].dim

        def read(rows: np.ndarray) -> np.ndarray:
            pieces = np.split(rows, range(_MOST_ROWS, len(rows), _MOST_ROWS))
            found = [asking.submit(self._ask, number, piece).result() for piece in pieces]
            return np.concatenate([np.empty((0, dim), np.float32), *found])

        return read

    def _ask(self, number: int, rows: np.ndarray) -> np.ndarray:
        self._tell(1 + number, len(rows))
        return self._answer(number, rows)[: len(rows)]

    def _tell(self, question: int, count: int) -> tuple[int, int]:
        """Returns the chief's question and how many rows it is about."""
        own = [question, count] if self._workers.is_chief else [0, 0]
        told = self._workers.sum(tf.constant(own, tf.int64)).numpy()
        return int(told[0]), int(told[1])

    def _serve(self) -> None:
        while True:
            question, count = self._tell(_END, 0)
            if question == _END:
                return
            self._answer(question - 1, np.zeros(count, np.int64))

    def _answer(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Returns rows, padded; the chief alone knows which ones."""
        length = max(_LEAST_ROWS, 1 << max(0, len(rows) - 1).bit_length())
        asked = np.zeros(length, np.int64)
        asked[: len(rows)] = rows
        asked = self._workers.sum(tf.constant(asked)).numpy()
        own = self._matrices[number].read_own(asked)
        return np.asarray(self._workers.sum(tf.constant(own)))
