"""Each user as things stood at the end of a split: the first of the user's later records.

A record of `validation` or `test` shows its user just before its event, one of `users` at the end
of the log. So a user at the end of `train` is found in the user's first record of `validation`,
where there is none in that of `test`, and else in that of `users`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.splits import TEST, TRAIN, USERS, VALIDATION
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.metrics import IntArray
from training.input.batches import Batch, build_eval_dataset, read_batches

LATER_SPLITS = {TRAIN: (VALIDATION, TEST), VALIDATION: (TEST,), TEST: ()}
"""Splits of events behind each split, in order of time."""
BEFORE = {VALIDATION: TRAIN, TEST: VALIDATION}
"""As of which split users are ranked that a split evaluates."""


@dataclass(frozen=True)
class UserRows:
    """Records of a split, one per user.

    Attributes:
        split: Name of the split.
        rows: Their numbers in the order of the split's shards, from 0, ascending.
        users: Id of the user of each.
    """

    split: str
    rows: IntArray
    users: IntArray


def find_user_rows(
    version_dir: ReadablePath, manifest: Manifest, as_of: str, batch_size: int
) -> tuple[UserRows, ...]:
    """Finds the record that shows each user at the end of a split.

    The first of a user's records is the one with the lowest number of its event; in a version
    without these numbers that with the fewest seen items. Users outside the vocabulary are left
    out of the splits of events: nothing tells their rows apart.

    Args:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        as_of: `train`, `validation` or `test`.
        batch_size: Records read at a time.

    Raises:
        ConfigError: The dataset has no users, or no seen items that tell which record is the first.
        InputDataError: A record is damaged.
    """
    parts: list[UserRows] = []
    for split in (*LATER_SPLITS[as_of], USERS):
        if manifest.has_split(split):
            taken = [part.users for part in parts]
            first = find_first_rows(version_dir, manifest, split, batch_size)
            new = ~np.isin(first.users, np.concatenate([np.zeros(0, np.int64), *taken]))
            parts.append(UserRows(split, first.rows[new], first.users[new]))
    if not parts:
        raise ConfigError(
            "nothing in this dataset shows users as of the end of that split",
            received=as_of,
            allowed=f"a dataset with the split {USERS}, or an earlier split",
        )
    return tuple(parts)


def find_first_rows(
    version_dir: ReadablePath, manifest: Manifest, split: str, batch_size: int
) -> UserRows:
    """Finds the first record of each user in a split, or all of `users`; else as above."""
    user, number = manifest.require_key("user"), manifest.keys.event_number
    seen = None if number is not None else manifest.keys.seen
    named = find_named_ids(version_dir, manifest, user)
    is_event = split != USERS
    if is_event and seen is None and number is None:
        raise ConfigError(
            "no seen items tell which of a user's records is the first",
            received="keys.seen = None",
            fix="build the dataset with `seen: true`",
        )
    ragged = (seen,) if is_event and seen is not None else ()
    numbers = (number,) if is_event and number is not None else ()
    names = (user, *numbers, *ragged)
    dataset = build_eval_dataset(version_dir, manifest, split, batch_size, names, ragged)
    ids, met = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in read_batches(dataset, version_dir, manifest, split):
        ids.append(np.asarray(batch[user], np.int64))
        if numbers:
            met.append(np.asarray(batch[numbers[0]], np.int64))
        else:
            lengths = batch[ragged[0]].row_lengths() if ragged else np.zeros_like(ids[-1])
            met.append(np.asarray(lengths))
    users = np.concatenate(ids)
    if not is_event:
        return UserRows(split, np.arange(len(users)), users)
    order = np.lexsort((np.concatenate(met), users))
    new = np.concatenate(([True], users[order][1:] != users[order][:-1]))[: len(order)]
    rows = np.sort(order[new])
    rows = rows[is_named(users[rows], named)]
    return UserRows(split, rows, users[rows])


def read_user_rows(
    version_dir: ReadablePath,
    manifest: Manifest,
    chosen: UserRows,
    names: Sequence[str],
    ragged: Sequence[str],
    batch_size: int,
) -> Iterator[Batch]:
    """Yields batches of the chosen records; names and ragged as for `build_eval_dataset`."""
    dataset = build_eval_dataset(
        version_dir, manifest, chosen.split, batch_size, names, tuple(ragged)
    )
    first = 0
    for batch in read_batches(dataset, version_dir, manifest, chosen.split):
        count = count_rows(batch)
        low, high = np.searchsorted(chosen.rows, (first, first + count))
        if high > low:
            yield take_rows(batch, chosen.rows[low:high] - first)
        first += count


def take_rows(batch: Mapping[str, Any], rows: IntArray) -> Batch:
    """Returns some rows of a batch, `rows` being their numbers in it."""
    return {name: tf.gather(value, rows) for name, value in batch.items()}


def count_rows(batch: Mapping[str, Any]) -> int:
    """Returns the number of rows of a batch."""
    value = next(iter(batch.values()))
    return int(value.nrows() if isinstance(value, tf.RaggedTensor) else value.shape[0])
