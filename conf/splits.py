"""Names of a dataset's splits."""

from __future__ import annotations

from typing import Literal

TRAIN, VALIDATION, TEST = "train", "validation", "test"
CATALOG, USERS = "catalog", "users"
"""One row for each item, and for each user."""
EVENT_SPLITS = (TRAIN, VALIDATION, TEST)
ALL_SPLITS = (*EVENT_SPLITS, CATALOG, USERS)
EventSplit = Literal["train", "validation", "test"]
