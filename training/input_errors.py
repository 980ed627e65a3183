"""TensorFlow's errors about records, turned into errors that name the shard or the feature."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest
from training.shards import open_shard, shard_paths

# How `tf.io.parse_example` names a feature in its errors.
FEATURE_IN_MESSAGE = re.compile(r"(?:Key|Feature): (\S+?)[.,]? ")


@contextmanager
def input_errors(version_dir: Path, manifest: Manifest, split: str) -> Iterator[None]:
    """Turns TensorFlow's errors about records into errors that name the shard or the feature.

    Iterate datasets of `training.input` inside this context.

    Raises:
        InputDataError: A record is damaged, or lacks a feature that has no pad value.
    """
    try:
        yield
    except (tf.errors.DataLossError, tf.errors.NotFoundError) as error:
        raise InputDataError(
            f"split {split!r} has a damaged or missing shard; nothing was skipped",
            received=locate_damage(version_dir, manifest, split) or error.message,
            fix="restore the shard, roll back to an earlier version, or build again",
        ) from error
    except tf.errors.InvalidArgumentError as error:
        named = FEATURE_IN_MESSAGE.findall(error.message)
        names = [name for name in manifest.schema.names if name in named]
        if not names:
            raise
        raise InputDataError(
            f"a record of split {split!r} does not hold feature {names[0]!r} as the schema says",
            received=error.message.splitlines()[0][:300],
            allowed=f"{manifest.schema[names[0]]}",
            fix="give the feature a pad_value if it may be absent, or build the dataset again",
        ) from error


def locate_damage(version_dir: Path, manifest: Manifest, split: str) -> str | None:
    """Returns which shard of a split cannot be read and after how many records, or None."""
    for path in shard_paths(version_dir, manifest, split):
        intact = 0
        try:
            for _ in open_shard(path, manifest):
                intact += 1
        except tf.errors.OpError as error:
            reason = error.message.partition("[[")[0].strip(" ;")
            return f"{path}: {reason}, after {intact} intact records"
    return None
