"""Train counts: how often users and items occur in the rows that a run trains on.

The version's files have them, unless the input leaves rows out: those are read and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from conf.artefacts.counted_keys import COUNT_COLUMNS, CountedKeys, KeyPart, find_counted
from conf.errors import InputDataError
from conf.manifest import FileInfo, Manifest
from conf.paths import ReadablePath
from conf.schema import canonical_json
from conf.storage.table_files import read_parquet
from conf.training.input import InputConfig
from etl.tfrecord.codec.crc32c import crc32c
from training.reader.feature_columns import plan_columns
from training.reader.rows import DecodedRows
from training.reader.shuffle_buffer import read_epoch
from training.reader.training_data import WHICH_ROWS, SplitSource

_log = logging.getLogger("sluice.training.input")


@dataclass(frozen=True)
class TrainCounts:
    """How often each id of a key occurs in the rows that train; int64 `[ids]` each."""

    ids: np.ndarray  # ascending
    rows: np.ndarray  # what batches hold
    # Of these, events of the log: no drawn negatives; of sequences, items of histories too.
    events: np.ndarray
    positives: np.ndarray  # events with a label above 0; all where there is no label

    def place(self, counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The counts (one of the attributes) of other ids, int64 `[n]`; 0 where there is none."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int64)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, counts[places], 0)


def read_train_counts(
    version_dir: ReadablePath, manifest: Manifest, part: KeyPart, config: InputConfig | None = None
) -> TrainCounts:
    """Reads how often the users or items (`part`) occur in the rows that the config leaves."""
    keys = require_counted_keys(manifest, part)
    if config is None or config.is_exact:
        if part in manifest.train_counts:
            return _read_file(version_dir, manifest.train_counts[part])
        config = InputConfig()
    return _count(version_dir, manifest, keys, config)[part]


def find_counted_keys(manifest: Manifest) -> CountedKeys:
    """Finds the keys that are counted, and what tells events and positives."""
    return find_counted(manifest.keys, manifest.schema, manifest.source.config)


def require_counted_keys(manifest: Manifest, *parts: KeyPart) -> CountedKeys:
    """As `find_counted_keys`, where some must be among them."""
    keys = find_counted_keys(manifest)
    for part in parts:
        feature = manifest.require_key(part)
        if part not in keys.features:
            spec = manifest.schema[feature]
            raise InputDataError(
                f"feature {feature!r} is the {part}'s id, and cannot be counted",
                received=f"{spec.dtype} of shape {spec.shape}",
                allowed="one int64 per row",
                fix=f"encode the {part} by a vocabulary or a hash and build the dataset again",
            )
    return keys


def _read_file(version_dir: ReadablePath, info: FileInfo) -> TrainCounts:
    file = version_dir / info.path
    content = file.read_bytes()
    found = f"{crc32c(content):08x}"
    if found != info.crc32c:
        raise InputDataError(
            f"the train counts {file} are not those that the manifest lists",
            received=f"checksum {found}",
            allowed=info.crc32c,
            fix="restore the file, roll back to an earlier version, or build again",
        )
    table = read_parquet(pa.BufferReader(content), COUNT_COLUMNS)
    return TrainCounts(*(table[name].to_numpy() for name in COUNT_COLUMNS))


_COUNTED: dict[str, dict[KeyPart, TrainCounts]] = {}


def _count(
    version_dir: ReadablePath, manifest: Manifest, keys: CountedKeys, config: InputConfig
) -> dict[KeyPart, TrainCounts]:
    scope = config.model_dump(mode="json", include=set(WHICH_ROWS))
    shards = [[shard.path, shard.crc32c] for shard in manifest.split("train").shards]
    own = canonical_json([str(version_dir), asdict(keys), shards, scope])
    if own not in _COUNTED:
        why = "input leaves rows out" if manifest.train_counts else "it was built without counts"
        what = "counting users and items: reading the train split of %s through once (%s)"
        _log.info(what, manifest.dataset_name, why)
        found = dict.fromkeys(keys.features, np.zeros((0, 4), np.int64))
        for rows in _read_rows(version_dir, manifest, keys, config):
            for part, table in found.items():
                found[part] = _add_up(np.concatenate([table, _find_counts(rows, keys, part)]))
        columns = {part: np.ascontiguousarray(table.T) for part, table in found.items()}
        _COUNTED[own] = {part: TrainCounts(*column) for part, column in columns.items()}
    return _COUNTED[own]


def _find_counts(rows: DecodedRows, keys: CountedKeys, part: KeyPart) -> np.ndarray:
    """Ids, and whether each is of a row, an event, a positive; int64 `[n, 4]`."""
    ids = rows.dense[keys.features[part]]
    event, positive = _find_events(rows, keys)
    table = np.column_stack([ids, np.ones_like(ids), event, positive])
    if keys.history is None:
        return table
    values, lengths = keys.cut(*_read_history(rows, keys.history))
    owners = np.repeat(table, lengths, axis=0)
    owners[:, 1] = 0  # The row itself is counted once.
    if part == "item":
        owners[:, 0] = values
    return np.concatenate([table, owners[owners[:, 2:].any(axis=1)]])


def read_train_pairs(
    version_dir: ReadablePath, manifest: Manifest, config: InputConfig, *, positives: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Reads which items users had in events of train, or in those with a label above 0.

    Yields ids of users and of items, int64 `[n]` each; a pair may come several times.
    """
    keys = require_counted_keys(manifest, "user", "item")
    user, item = (keys.features[part] for part in ("user", "item"))
    for rows in _read_rows(version_dir, manifest, keys, config):
        events, positive = _find_events(rows, keys)
        chosen = positive if positives else events
        owners, items = rows.dense[user], rows.dense[item]
        pairs = [(owners[chosen], items[chosen])]
        if keys.history is not None:
            values, lengths = _read_history(rows, keys.history)
            kept = np.repeat(chosen, lengths)
            pairs.append((np.repeat(owners, lengths)[kept], values[kept]))
        yield np.concatenate([one[0] for one in pairs]), np.concatenate([one[1] for one in pairs])


def _read_rows(
    version_dir: ReadablePath, manifest: Manifest, keys: CountedKeys, config: InputConfig
) -> Iterator[DecodedRows]:
    names = [name for name in (*keys.features.values(), keys.label, keys.history) if name]
    lists = () if keys.history is None else (keys.history,)
    return read_train_rows(version_dir, manifest, config, names, lists)


def read_train_rows(
    version_dir: ReadablePath,
    manifest: Manifest,
    config: InputConfig,
    names: Sequence[str],
    lists: Sequence[str] = (),
) -> Iterator[DecodedRows]:
    """Yields the rows of train in their order, in parts; features of `lists` stay lists."""
    source = SplitSource(version_dir, manifest, "train", config).in_order()
    specs = [manifest.schema[name] for name in dict.fromkeys(names)]
    yield from read_epoch(source.plan(plan_columns(manifest, specs, lists)), 0)


def _find_events(rows: DecodedRows, keys: CountedKeys) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are events of the log, and which have a label above 0; bool `[rows]` each."""
    every = np.ones(rows.count, bool)
    positive = every if keys.label is None else rows.dense[keys.label] > 0
    return (positive if keys.has_drawn else every), positive


def _read_history(rows: DecodedRows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Items of all histories one after the other, and the length of each."""
    lists = rows.lists[name]
    lengths = np.asarray(lists.value_lengths(), np.int64)
    return lists.flatten().to_numpy(zero_copy_only=False), lengths


def _add_up(table: np.ndarray) -> np.ndarray:
    """Adds up the rows of one id, int64 `[n, 4]`: ids first, ascending."""
    table = table[np.argsort(table[:, 0], kind="stable")]
    ids, starts = np.unique(table[:, 0], return_index=True)
    if not len(ids):
        return table
    return np.column_stack([ids, np.add.reduceat(table[:, 1:], starts, axis=0)])
