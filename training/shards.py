"""The shard files of a split, as the manifest lists them."""

from __future__ import annotations

from conf.errors import InputDataError
from conf.manifest import Manifest, ShardInfo
from conf.place import Place
from etl.tfrecord.framing import Compression

WIRE_COMPRESSIONS: dict[str | None, Compression | None] = {
    None: None,
    "gzip": "GZIP",
    "zlib": "ZLIB",
}
RECORD_TYPES = ("Example", "SequenceExample")


def check_format(manifest: Manifest) -> None:
    """Refuses records that training does not read.

    Raises:
        InputDataError: Records of another kind, or an unknown compression.
    """
    if manifest.record_type not in RECORD_TYPES:
        raise InputDataError(
            "training reads another record type",
            received=manifest.record_type,
            allowed=", ".join(RECORD_TYPES),
        )
    if manifest.compression not in WIRE_COMPRESSIONS:
        raise InputDataError(
            "the manifest names an unknown compression",
            received=manifest.compression,
            allowed=", ".join(str(key) for key in WIRE_COMPRESSIONS),
        )


def filled_shards(manifest: Manifest, split: str) -> tuple[ShardInfo, ...]:
    """Returns a split's shards that hold records, in the manifest's order.

    Raises:
        InputDataError: There is no such split, or training does not read its records.
    """
    check_format(manifest)
    return tuple(shard for shard in manifest.split(split).shards if shard.rows)


def shard_paths(version_dir: Place, manifest: Manifest, split: str) -> list[str]:
    """Returns the paths of a split's shards that hold records, in the manifest's order.

    Raises:
        InputDataError: As for `filled_shards`.
    """
    return [f"{version_dir}/{shard.path}" for shard in filled_shards(manifest, split)]
