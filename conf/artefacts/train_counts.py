"""Train counts: how often users and items occur in the train records.

Builds count the records that they write, imports those that they read, runs those that their input
leaves: all by `TrainCounter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from conf.manifest import DatasetKeys, find_histories, has_sequences
from conf.schema import FeatureSchema

TRAIN_COUNTS_DIR = "train_counts"
"""How often users and items occur in the train split: a Parquet file each, its ids ascending.

A vocabulary counts the tokens of the log that it was fitted on. These files count the records: what
conditions, samples, splits and drawn negatives have left of the log, and added to it.
"""
COUNT_COLUMNS = ("id", "rows", "events", "positives")
"""`rows`: train rows of the id, drawn negatives too. `events`: of these, events of the log; where
rows are sequences, the items of their histories too. `positives`: events with a label above 0;
all where there is no label."""

KeyPart = Literal["user", "item"]


def counts_path(part: KeyPart) -> str:
    """Path of a key's file, relative to the version."""
    return f"{TRAIN_COUNTS_DIR}/{part}.parquet"


@dataclass(frozen=True)
class CountedKeys:
    """What is counted of a version's train rows, and what tells events and positives.

    Attributes:
        user: Feature of the user's id; None: not counted.
        item: Feature of the item's id; None: not counted.
        label: Feature whose values above 0 make a positive; None: all rows are.
        history: Feature of the items before the row's own, latest first, where a row stands for
            its sequence: the first of its histories; None: a row stands for its own event.
        has_drawn: Whether train holds drawn negatives. Then no row of label 0 is an event: nothing
            in a record tells those of the log apart.
        past_events: Items of the history that count, the latest, as the user's row before has the
            others; None: all.
    """

    user: str | None
    item: str | None
    label: str | None = None
    history: str | None = None
    has_drawn: bool = False
    past_events: int | None = None

    @property
    def features(self) -> dict[KeyPart, str]:
        """The keys that are counted."""
        parts: dict[KeyPart, str | None] = {"user": self.user, "item": self.item}
        return {part: name for part, name in parts.items() if name is not None}

    def cut(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cuts histories to the items that count.

        Args:
            ids: `[values]`, those of all rows one after the other.
            lengths: `[rows]`.

        Returns:
            Ids and lengths of what is left.
        """
        if self.past_events is None:
            return ids, lengths
        ends = np.cumsum(lengths)
        places = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
        return ids[places < self.past_events], np.minimum(lengths, self.past_events)


def find_counted(
    keys: DatasetKeys, schema: FeatureSchema, config: Mapping[str, Any]
) -> CountedKeys:
    """Finds what is counted of a version.

    Args:
        keys: Its keys.
        schema: Its features.
        config: The resolved config that made it.
    """

    def find(name: str | None, *, is_list: bool = False) -> str | None:
        if name is None or name not in schema:
            return None
        spec = schema[name]
        return name if spec.dtype == "int64" and spec.is_list == is_list else None

    label = keys.label if keys.label in schema else None
    is_number = label is not None and not schema[label].is_list and schema[label].dtype != "bytes"
    negatives = config.get("negatives") or {}
    histories = find_histories(keys, schema) if has_sequences(config) else ()
    history = find(histories[0], is_list=True) if histories else None
    samples = config.get("train_samples")
    # Of a history that leaves events out nothing tells which ones the row before has.
    is_whole = history is not None and history == keys.history
    return CountedKeys(
        user=find(keys.user),
        item=find(keys.item),
        label=label if is_number else None,
        history=history,
        has_drawn=negatives.get("strategy", "exposure") != "exposure"
        and "train" in negatives.get("splits", ("train",)),
        past_events=samples - 1 if is_whole and isinstance(samples, int) else None,
    )


_PENDING_IDS = 1 << 20
_DENSE_IDS = 1 << 16
"""Ids below this are counted in an array, however few there are."""


def _no_ids() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class IdCounts:
    """How often ids occur, int64 `[ids]` each: the columns of a file, `COUNT_COLUMNS`."""

    ids: np.ndarray = field(default_factory=_no_ids)
    rows: np.ndarray = field(default_factory=_no_ids)
    events: np.ndarray = field(default_factory=_no_ids)
    positives: np.ndarray = field(default_factory=_no_ids)

    @classmethod
    def from_table(cls, table: pa.Table) -> IdCounts:
        """Takes the columns of a file."""
        return cls(*(table[name].to_numpy() for name in COUNT_COLUMNS))

    def to_table(self) -> pa.Table:
        """Returns the columns of a file."""
        return pa.table(dict(zip(COUNT_COLUMNS, self.columns, strict=True)))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """The ids, and their counts."""
        return self.ids, self.rows, self.events, self.positives

    def place(self, counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The counts (one of the attributes) of other ids, int64 `[n]`; 0 where there is none."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int64)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, counts[places], 0)


def add_up(parts: Sequence[IdCounts]) -> IdCounts:
    """Adds up what several counts, in any order, say of the same ids; ids ascend."""
    if not parts:
        return IdCounts()
    ids, *counts = (
        np.concatenate(columns) for columns in zip(*(part.columns for part in parts), strict=True)
    )
    if not len(ids):
        return IdCounts()
    if ids.min() >= 0 and ids.max() < max(_DENSE_IDS, 4 * len(ids)):
        distinct, places = np.flatnonzero(np.bincount(ids)), ids
    else:
        distinct, places = np.unique(ids, return_inverse=True)
    # Sums are exact: no count reaches 2**53.
    sums = [np.bincount(places, column).astype(np.int64) for column in counts]
    if places is ids:
        sums = [column[distinct] for column in sums]
    return IdCounts(distinct, *sums)


class IdCounter:
    """Adds counts up; holds about as much as the result, however many parts there are."""

    def __init__(self) -> None:
        self._parts: list[IdCounts] = []

    def add(self, part: IdCounts) -> None:
        """Adds counts; an id may come several times."""
        self._parts.append(part)
        known, *pending = (len(part.ids) for part in self._parts)
        if sum(pending) > max(known, _PENDING_IDS):
            self.result()

    def add_ids(self, ids: np.ndarray) -> None:
        """Adds a row, an event and a positive for each id, int64 `[n]`."""
        self.add(IdCounts(ids, *[np.ones(len(ids), np.int64)] * 3))

    def result(self) -> IdCounts:
        """Returns the counts so far."""
        self._parts = [add_up(self._parts)]
        return self._parts[0]


KeyCounts = Mapping[KeyPart, IdCounts]


@dataclass(frozen=True)
class TrainRows:
    """What is counted of some train rows.

    Attributes:
        ids: By key, int64 `[rows]`.
        label: `[rows]`; None: every row is positive.
        history: Items of all histories one after the other, int64 `[values]`, and the length of
            each, `[rows]`; None: a row stands for its own event.
    """

    ids: Mapping[KeyPart, np.ndarray]
    label: np.ndarray | None = None
    history: tuple[np.ndarray, np.ndarray] | None = None


def find_events(keys: CountedKeys, rows: TrainRows) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are events of the log, and which have a label above 0; bool `[rows]` each."""
    count = len(next(iter(rows.ids.values())))
    positive = np.ones(count, bool) if rows.label is None else rows.label > 0
    return (positive if keys.has_drawn else np.ones(count, bool)), positive


class TrainCounter:
    """Counts the keys of train rows."""

    def __init__(self, keys: CountedKeys) -> None:
        self.keys = keys
        self._counters: dict[KeyPart, IdCounter] = {part: IdCounter() for part in keys.features}

    def add(self, rows: TrainRows) -> None:
        """Adds rows."""
        if not self._counters:
            return
        event, positive = (mask.astype(np.int64) for mask in find_events(self.keys, rows))
        for part, counter in self._counters.items():
            ids = rows.ids[part].astype(np.int64)  # a copy: a reader may use its memory again
            counter.add(IdCounts(ids, np.ones(len(ids), np.int64), event, positive))
        if rows.history is None:
            return
        values, lengths = self.keys.cut(*rows.history)
        of_events = np.repeat((event | positive).astype(bool), lengths)
        for part, counter in self._counters.items():
            ids = values if part == "item" else np.repeat(rows.ids[part], lengths)
            counts = (
                np.zeros_like(values),
                np.repeat(event, lengths),
                np.repeat(positive, lengths),
            )
            counter.add(IdCounts(*(column[of_events] for column in (ids, *counts))))

    def add_counts(self, counts: KeyCounts) -> None:
        """Adds what was counted elsewhere."""
        for part, found in counts.items():
            self._counters[part].add(found)

    def result(self) -> dict[KeyPart, IdCounts]:
        """Returns the counts by key."""
        return {part: counter.result() for part, counter in self._counters.items()}
