"""Train counts: how often users and items occur in the train records, and what is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

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
