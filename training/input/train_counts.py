"""Train counts: how often users and items occur in the rows that a run trains on.

The version's files have them, unless the input leaves rows out: those are read and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa

from conf.artefacts.train_counts import (
    CountedKeys,
    IdCounts,
    KeyPart,
    TrainCounter,
    TrainRows,
    find_counted,
    find_events,
)
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import canonical_json
from conf.storage.table_files import read_parquet
from conf.training.input import InputConfig
from etl.tfrecord.codec.crc32c import read_described
from training.reader.feature_columns import plan_columns
from training.reader.rows import DecodedRows
from training.reader.shuffle_buffer import read_epoch
from training.reader.training_data import WHICH_ROWS, SplitSource

_log = logging.getLogger("sluice.training.input")


def read_train_counts(
    version_dir: ReadablePath, manifest: Manifest, part: KeyPart, config: InputConfig | None = None
) -> IdCounts:
    """Reads how often the users or items (`part`) occur in the rows that the config leaves."""
    keys = require_counted_keys(manifest, part)
    if config is None or config.is_exact:
        if part in manifest.train_counts:
            content = read_described(version_dir, manifest.train_counts[part])
            return IdCounts.from_table(read_parquet(pa.BufferReader(content)))
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


_COUNTED: dict[str, dict[KeyPart, IdCounts]] = {}


def _count(
    version_dir: ReadablePath, manifest: Manifest, keys: CountedKeys, config: InputConfig
) -> dict[KeyPart, IdCounts]:
    scope = config.model_dump(mode="json", include=set(WHICH_ROWS))
    shards = [[shard.path, shard.crc32c] for shard in manifest.split("train").shards]
    own = canonical_json([str(version_dir), asdict(keys), shards, scope])
    if own not in _COUNTED:
        why = "input leaves rows out" if manifest.train_counts else "it was built without counts"
        what = "counting users and items: reading the train split of %s through once (%s)"
        _log.info(what, manifest.dataset_name, why)
        counter = TrainCounter(keys)
        for rows in _read_rows(version_dir, manifest, keys, config):
            counter.add(rows)
        _COUNTED[own] = counter.result()
    return _COUNTED[own]


def read_train_pairs(
    version_dir: ReadablePath, manifest: Manifest, config: InputConfig, *, positives: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Reads which items users had in events of train, or in those with a label above 0.

    Yields ids of users and of items, int64 `[n]` each; a pair may come several times.
    """
    keys = require_counted_keys(manifest, "user", "item")
    for rows in _read_rows(version_dir, manifest, keys, config):
        event, positive = find_events(keys, rows)
        chosen = positive if positives else event
        owners, items = rows.ids["user"], rows.ids["item"]
        pairs = [(owners[chosen], items[chosen])]
        if rows.history is not None:
            values, lengths = rows.history
            kept = np.repeat(chosen, lengths)
            pairs.append((np.repeat(owners, lengths)[kept], values[kept]))
        yield np.concatenate([one[0] for one in pairs]), np.concatenate([one[1] for one in pairs])


def _read_rows(
    version_dir: ReadablePath, manifest: Manifest, keys: CountedKeys, config: InputConfig
) -> Iterator[TrainRows]:
    names = [name for name in (*keys.features.values(), keys.label, keys.history) if name]
    lists = () if keys.history is None else (keys.history,)
    for rows in read_train_rows(version_dir, manifest, config, names, lists):
        history = None
        if keys.history is not None:
            items = rows.lists[keys.history]
            lengths = np.asarray(items.value_lengths(), np.int64)
            history = items.flatten().to_numpy(zero_copy_only=False), lengths
        ids = {part: rows.dense[name] for part, name in keys.features.items()}
        yield TrainRows(ids, rows.dense[keys.label] if keys.label else None, history)


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
