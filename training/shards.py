"""The shard files of a split, as the manifest lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest

READ_BUFFER_BYTES = 1 << 20
COMPRESSION_TYPES = {None: "", "gzip": "GZIP", "zlib": "ZLIB"}
EXAMPLE_RECORDS = "Example"


def shard_paths(version_dir: Path, manifest: Manifest, split: str) -> list[str]:
    """Returns the paths of a split's shards that hold records, in the manifest's order.

    Raises:
        InputDataError: There is no such split, or its records are of a kind that training does
            not read.
    """
    if manifest.record_type != EXAMPLE_RECORDS:
        raise InputDataError(
            "training reads another record type",
            received=manifest.record_type,
            allowed=EXAMPLE_RECORDS,
        )
    if manifest.compression not in COMPRESSION_TYPES:
        raise InputDataError(
            "the manifest names an unknown compression",
            received=manifest.compression,
            allowed=", ".join(str(key) for key in COMPRESSION_TYPES),
        )
    return [str(version_dir / shard.path) for shard in manifest.split(split).shards if shard.rows]


def open_shard(path: Any, manifest: Manifest) -> tf.data.TFRecordDataset:
    """Returns the serialized records of one shard or of several.

    Args:
        path: Path, list of paths, or a string tensor of them.
        manifest: The version's manifest, for its compression.
    """
    return tf.data.TFRecordDataset(
        path,
        compression_type=COMPRESSION_TYPES[manifest.compression],
        buffer_size=READ_BUFFER_BYTES,
    )
