"""The features that a decoder wants, as the compiled code takes them, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from etl.tfrecord import decode_kernels_keys as k
from etl.tfrecord.decode_columns import Arena, Column, Scratch, check_totals, expect_rooms
from etl.tfrecord.decode_kernels import NO_ROOM, decode
from etl.tfrecord.features import KIND_CODES, WireFeature
from etl.tfrecord.key_table import KeyTable

# Records are decoded in runs of about this size, with what is noted of them: they stay in the
# cache between the two halves of the work.
_RUN_BYTES = 192 << 10
_LEAST_RUN = 8

_FILLED, _ROOMS = slice(k.COUNT, k.LISTS + 1), slice(k.COUNT_ROOM, k.LIST_ROOM + 1)
_NEEDS = slice(k.COUNT_NEED, k.LIST_NEED + 1)


class _Part:
    """The wanted features of one map: their keys and how they tend to follow each other."""

    def __init__(self, features: Sequence[WireFeature]) -> None:
        self.keys = KeyTable([feature.name.encode() for feature in features])
        self.table = self.keys.table
        self.successors = (np.arange(len(features) + 1) + 1) % max(1, len(features))
        self.successors[-1] = 0


class FeatureTable:
    """The features of an Example, or those of a SequenceExample's context and its feature lists.

    It learns the order of the features, and what a record takes, as it goes.
    """

    def __init__(self, features: Sequence[WireFeature]) -> None:
        is_sequence = [feature.is_sequence for feature in features]
        self._order = np.argsort(is_sequence, kind="stable")  # feature lists last
        self._split = len(features) - sum(is_sequence)
        self._features = [features[number] for number in self._order]
        parts = self._features[: self._split], self._features[self._split :]
        self._context, self._lists = (_Part(part) for part in parts)
        self._fixed = np.zeros((len(features), k.FEATURE_FIELDS), np.int64)
        places = [*self._context.keys.places, *self._lists.keys.places]
        for row, feature, (key, key_bytes) in zip(self._fixed, self._features, places, strict=True):
            row[k.KIND], row[k.HEAD], row[k.KEY_BYTES] = KIND_CODES[feature.kind], key, key_bytes
            row[k.DEPTH] = 2 if feature.is_sequence else int(feature.is_list)
        self._noted = sum(f.kind == "bytes" or f.is_list or f.is_sequence for f in features)
        self._per_row = np.zeros((len(features), 3))
        self._scratch = Scratch()

    def decode(
        self, data: np.ndarray, index: np.ndarray, outcomes: np.ndarray
    ) -> tuple[int, int, int, list[pa.Array]]:
        """Decodes records.

        Args:
            data: Buffer that holds them, uint8 `[bytes]`.
            index: Start and length of each, int64 `[rows, 2]`, within the buffer.
            outcomes: As for `decode_kernels.decode`.

        Returns:
            Outcome, record and feature, as `decode_kernels.decode` does; and the columns, where
            the outcome is `OK` and none were asked for.

        Raises:
            InputDataError: More values than Arrow's offsets reach.
        """
        rows, arena = len(index), Arena()
        columns = [Column(feature, rows, arena) for feature in self._features]
        run_rows = self._run_rows(index)
        table, valid = self.lay_out(rows, run_rows)
        self._reserve(columns, table, expect_rooms(self._per_row, rows, data.size))
        outcome, record, feature = self._run(data, index, columns, table, run_rows, outcomes)
        if feature >= 0:
            feature = int(self._order[feature])
        known = outcomes[:, 1] >= 0
        outcomes[known, 1] = self._order[outcomes[known, 1]]
        if outcome != k.OK or len(outcomes):
            return outcome, record, feature, []
        self._per_row = table[:, _FILLED] / max(1, rows)
        arrays = [c.build(*args) for c, *args in zip(columns, table, valid, strict=True)]
        return outcome, record, feature, [arrays[i] for i in np.argsort(self._order)]

    def _run_rows(self, index: np.ndarray) -> int:
        row_bytes = int(index[:, 1].sum()) // max(1, len(index)) + k.PLACE_BYTES * self._noted
        return min(max(_LEAST_RUN, _RUN_BYTES // max(1, row_bytes)), max(1, len(index)))

    def lay_out(self, rows: int, run_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Lays out what belongs to no column alone.

        Args:
            rows: Records to decode.
            run_rows: Records per run.

        Returns:
            A feature table without outputs, int64 `[features, FEATURE_FIELDS]`, and which rows
            hold which feature, uint8 `[features, rows]`, all zero; until the next call.
        """
        numbers = np.arange(len(self._features))
        # An odd number of places: columns do not compete for the same sets of the cache.
        place_bytes = k.PLACE_BYTES * (run_rows | 1)
        memory = self._scratch.take(len(numbers) * (place_bytes + rows))
        valid = memory[len(numbers) * place_bytes :].reshape(len(numbers), rows)
        valid.fill(0)
        table = self._fixed.copy()
        table[:, k.PLACES] = memory.ctypes.data + place_bytes * numbers
        table[:, k.VALID] = valid.ctypes.data + rows * numbers
        return table, valid

    def parts(self, table: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Splits a table that `lay_out` has made, as the kernel takes it.

        Returns:
            Rows, hash table and successors: of the context's features, and of the feature lists.
        """
        context, lists = self._context, self._lists
        return (
            (table[: self._split], context.table, context.successors),
            (table[self._split :], lists.table, lists.successors),
        )

    def _reserve(self, columns: list[Column], table: np.ndarray, rooms: np.ndarray) -> None:
        for column, fields, room in zip(columns, table, rooms.tolist(), strict=True):
            column.reserve(fields, tuple(room))

    def _run(
        self, data: np.ndarray, index: np.ndarray, columns: list[Column], table: np.ndarray,
        run_rows: int, outcomes: np.ndarray,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Runs the kernel, making room as it asks for it."""
        base, limit = data.ctypes.data, data.ctypes.data + data.size
        context, lists = self.parts(table)
        first = 0
        while True:
            outcome, record, feature = decode(
                base, index, limit, *context, *lists, first, run_rows, outcomes
            )
            if outcome != NO_ROOM:
                return int(outcome), int(record), int(feature)
            first, done = int(record), min(int(record) + run_rows, len(index))
            check_totals(int(table[:, _NEEDS].max()))
            left = int(index[done:, 1].sum())
            needs = table[:, _NEEDS]
            rooms = needs + expect_rooms(needs / done, len(index) - done, left)
            rooms = np.where(needs > table[:, _ROOMS], rooms, table[:, _ROOMS])
            self._reserve(columns, table, rooms)
