"""TFRecord files without a manifest, described as a dataset version that has them as one split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from conf.errors import ConfigError, InputDataError
from conf.local_paths import local_path
from conf.manifest import DatasetKeys, Manifest, RowCounts, ShardInfo, SourceSnapshot, SplitInfo
from conf.paths import ReadablePath
from conf.schema import FeatureSchema, FeatureSpec
from etl.tfrecord.reading import (
    HEADER_BYTES,
    BadRange,
    WireFeature,
    crc32c,
    detect_compression,
    infer_features,
    read_record_blocks,
)
from training.reader.shards import WIRE_COMPRESSIONS

_READ_BYTES = 4 << 20
_NAME = "bare files"


def describe_shards(
    files: Sequence[str | Path],
    split: str,
    schema: Sequence[FeatureSpec] | None = None,
    on_corrupt: str = "fail",
) -> tuple[ReadablePath, Manifest]:
    """Describes files of `tf.train.Example`, which are read through once to count their records.

    Args:
        files: Local TFRecord files, all compressed alike or none.
        split: Name to give the split.
        schema: What the records hold; None finds out by reading them: scalars, and lists without a
            bound.
        on_corrupt: What becomes of damage; unless it is `fail`, damaged records are not counted.

    Returns:
        The folder around all files, and a manifest that lists them.

    Raises:
        ConfigError: There are no files, one is not local, or they are compressed in several ways.
        InputDataError: A file cannot be read, is damaged, or holds a feature in several kinds.
    """
    paths = [local_path(file).absolute() for file in files]
    if not paths:
        raise ConfigError("there is no file to read", received="an empty list of files")
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    try:
        compression = _find_compression(paths)
        is_salvaging = on_corrupt != "fail"
        shards = [_describe_shard(folder, path, is_salvaging) for path in paths]
        if schema is None:
            hook = (lambda _: None) if is_salvaging else None  # What reads them tells of it.
            schema = [_describe_feature(f) for f in infer_features(paths, on_corrupt=hook)]
    except OSError as error:
        raise InputDataError(
            "a file cannot be read",
            received=f"{error.filename}: {error.strerror}",
            fix="correct the list of files",
        ) from error
    return folder, _build_manifest(tuple(shards), split, tuple(schema), compression)


def _find_compression(paths: Sequence[Path]) -> str | None:
    found: dict[str | None, Path] = {}
    for path in paths:
        with path.open("rb") as file:
            found.setdefault(detect_compression(file.read(HEADER_BYTES)), path)
    if len(found) > 1:
        raise ConfigError(
            "files that are read as one split must be compressed alike",
            received=", ".join(f"{path}: {kind or 'plain'}" for kind, path in found.items()),
            fix="open them apart, or write them anew in one way",
        )
    (wire,) = found
    return next(name for name, kind in WIRE_COMPRESSIONS.items() if kind == wire)


def _describe_shard(folder: Path, path: Path, is_salvaging: bool) -> ShardInfo:
    bad_ranges = 0

    def count(bad: BadRange) -> None:
        nonlocal bad_ranges
        bad_ranges += not bad.continues

    hook = count if is_salvaging else None
    blocks = read_record_blocks(path, verify=False, on_corrupt=hook)
    # What reads them counts a range of bad bytes as a record.
    rows = sum(len(block.index) for block in blocks) + bad_ranges
    checksum = size = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return ShardInfo(str(path.relative_to(folder)), rows, size, f"{checksum:08x}")


def _describe_feature(feature: WireFeature) -> FeatureSpec:
    shape = (None,) if feature.is_list else ()
    return FeatureSpec(feature.name, feature.kind, "context", shape)


def _build_manifest(
    shards: tuple[ShardInfo, ...],
    split: str,
    schema: tuple[FeatureSpec, ...],
    compression: str | None,
) -> Manifest:
    return Manifest(
        dataset_name=_NAME, dataset_version="", created_at="", record_type="Example",
        compression=compression, splits=(SplitInfo(split, shards),), schema=FeatureSchema(schema),
        keys=DatasetKeys(None, None), encoder_files=(), encoders_fingerprint="", statistics={},
        label_rate={}, source=SourceSnapshot((), None, {}, ""), counts=RowCounts({}, {}, 0, {}, {}),
        code_version="",
    )  # fmt: skip
