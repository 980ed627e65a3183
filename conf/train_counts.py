"""Train counts: how often each user and item occurs in the rows of a version's train split.

A vocabulary counts the tokens of the log that it was fitted on. These files count the records: what
conditions, samples, splits and drawn negatives have left of the log, and added to it. One Parquet
file a key, its ids ascending, columns `COUNT_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conf.manifest import DatasetKeys
from conf.schema import FeatureSchema

TRAIN_COUNTS_DIR = "train_counts"
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
        history: Feature of the items before the row's own, where a row stands for its sequence;
            None: a row stands for its own event.
        has_drawn: Whether train holds drawn negatives. Then no row of label 0 is an event: nothing
            in a record tells those of the log apart.
    """

    user: str | None
    item: str | None
    label: str | None = None
    history: str | None = None
    has_drawn: bool = False

    @property
    def features(self) -> dict[KeyPart, str]:
        """The keys that are counted."""
        parts: dict[KeyPart, str | None] = {"user": self.user, "item": self.item}
        return {part: name for part, name in parts.items() if name is not None}


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

    label = keys.label
    is_number = label is not None and not schema[label].is_list and schema[label].dtype != "bytes"
    has_sequences = config.get("train_samples", "all") != "all"
    negatives = config.get("negatives") or {}
    return CountedKeys(
        user=find(keys.user),
        item=find(keys.item),
        label=label if is_number else None,
        history=find(keys.history, is_list=True) if has_sequences else None,
        has_drawn=negatives.get("strategy", "exposure") != "exposure"
        and "train" in negatives.get("splits", ("train",)),
    )
