"""Summaries of a dataset version, a shard, TFRecord files or a run, as JSON values.

Files that no dataset version lists are read whole, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conf.errors import InputDataError, SluiceError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest, ShardInfo
from conf.paths import (
    CURRENT_FILE,
    VERSIONS_DIR,
    find_version,
    list_unlisted_files,
    local_path,
    published_versions,
    resolve_version,
)
from conf.run import METRICS_FILE, RUN_CARD_FILE, RUNS_DIR, read_json, resolve_run
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.commit.output_manifest import read_output_manifest
from etl.tfrecord.files.framing import (
    HEADER_BYTES,
    RecordBlock,
    detect_compression,
    read_record_blocks,
)
from etl.tfrecord.files.locations import Compression
from etl.tfrecord.types.features import WireFeature
from jobs.inspection.records import list_packed_features
from jobs.inspection.verify import (
    OnBytes,
    Problem,
    Verification,
    check_files,
    count_records,
    read_checksum,
)

_SIZE_BINS = 33  # record lengths are below 2**31
BYTE_ARRAY = "ByteArray"


@dataclass
class RecordSizes:
    """Lengths of records without their framing.

    Attributes:
        counts: Records by bit length: bin k holds lengths in [2**(k - 1), 2**k), bin 0 holds 0.
        shortest: Shortest length, None before the first record.
        longest: Longest length, None before the first record.
        total: Sum of the lengths.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_SIZE_BINS, np.int64))
    shortest: int | None = None
    longest: int | None = None
    total: int = 0

    def update(self, lengths: np.ndarray) -> None:
        """Adds records.

        Args:
            lengths: Bytes per record, int64 `[records]`, 0 or more.
        """
        if len(lengths):
            # frexp gives the exponent of the next power of two: the bit length, exact below 2**53.
            bits = np.frexp(lengths.astype(np.float64))[1]
            self.counts += np.bincount(bits, minlength=_SIZE_BINS)
            low, high = int(lengths.min()), int(lengths.max())
            self.shortest = low if self.shortest is None else min(self.shortest, low)
            self.longest = high if self.longest is None else max(self.longest, high)
            self.total += int(lengths.sum())

    @property
    def records(self) -> int:
        """Records added."""
        return int(self.counts.sum())

    def to_json(self) -> dict[str, Any]:
        """Returns the histogram: each bin's bounds, both inclusive, and its count."""
        used = [int(k) for k in np.flatnonzero(self.counts)]
        mean = self.total / self.records if used else None
        bins = [
            {"from": (1 << k) >> 1, "to": (1 << k) - 1, "records": int(self.counts[k])}
            for k in (range(used[0], used[-1] + 1) if used else ())
        ]
        return {"shortest": self.shortest, "longest": self.longest, "mean": mean, "bins": bins}


def list_record_files(directory: Path) -> list[Path]:
    """Returns the data files below a directory: names that do not begin with `.` or `_`."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(directory).parts)
    )


@dataclass
class _Content:
    """Content of the files read so far; `is_raw` where the payloads are not Examples."""

    rows: int = 0
    bytes: int = 0
    compressions: set[str] = field(default_factory=set)
    sizes: RecordSizes = field(default_factory=RecordSizes)
    collector: FeatureCollector | None = None
    is_raw: bool = False

    def read(self, path: Path, progress: OnBytes) -> str | None:
        """Adds a file; returns its damage, or None."""
        size, done = path.stat().st_size, 0
        compression = _find_compression(path)
        self.bytes += size
        self.compressions.add(compression or "none")
        try:
            for block in read_record_blocks(path, compression=compression):
                self._add(block, str(path))
                if compression is None:
                    progress(block.data.size)
                    done += block.data.size
        except InputDataError as error:
            return error.what.removeprefix(f"{path}: ")
        finally:
            progress(max(0, size - done))
        return None

    def _add(self, block: RecordBlock, name: str) -> None:
        """Adds a block; the first one decides whether the payloads are Examples at all."""
        self.rows += len(block.index)
        self.sizes.update(block.index[:, 1])
        if self.is_raw:
            return
        # Every Example reads as a SequenceExample without feature lists.
        collector = self.collector or FeatureCollector("SequenceExample")
        try:
            collector.update(block, name)
        except InputDataError:
            if self.collector is not None:
                raise
            self.is_raw = True
            return
        self.collector = collector

    @property
    def features(self) -> list[WireFeature]:
        """Features found; none in raw payloads."""
        return [] if self.is_raw or self.collector is None else self.collector.features()

    @property
    def record_type(self) -> str:
        """The record type that the payloads look like."""
        if self.is_raw or self.collector is None:
            return BYTE_ARRAY
        is_sequence = any(feature.is_sequence for feature in self.features)
        return "SequenceExample" if is_sequence else "Example"


def _find_compression(path: Path) -> Compression | None:
    with path.open("rb") as file:
        return detect_compression(file.read(HEADER_BYTES))


def _features_to_json(features: Iterable[WireFeature]) -> list[dict[str, Any]]:
    return [
        {"name": f.name, "dtype": f.kind, "shape": [None] * (2 if f.is_sequence else f.is_list)}
        for f in features
    ]


def summarize_files(
    directory: Path, progress: OnBytes = lambda _: None
) -> tuple[dict[str, Any], Verification]:
    """Reads every file below a directory.

    Args:
        directory: Folder of the files, with partition directories or without.
        progress: Called with the number of bytes read.

    Returns:
        The content of the files as JSON values, and their problems: damage, and differences
        from the directory's own manifest where there is one.
    """
    committed = read_output_manifest(directory)
    listed = () if committed is None else committed.shards
    files, content, problems = list_record_files(directory), _Content(), []
    for path in files:
        if damage := content.read(path, progress):
            problems.append(Problem(str(path.relative_to(directory)), damage))
    problems += check_files(directory, listed)
    names = {str(path.relative_to(directory)) for path in files}
    summary = {
        "kind": "files",
        "path": str(directory),
        "manifest": committed is not None,
        "not_in_manifest": sorted(names - {s.path for s in listed}) if committed else [],
        "files": len(files),
        "rows": content.rows,
        "bytes": content.bytes,
        "record_type": content.record_type,
        "compressions": sorted(content.compressions),
        "partition_columns": list(committed.partition_columns) if committed else [],
        "record_sizes": content.sizes.to_json(),
        "features": _features_to_json(content.features),
    }
    return summary, Verification(len(files), content.rows, content.bytes, tuple(problems))


TargetKind = Literal["dataset", "shard", "files", "run"]


@dataclass(frozen=True)
class Target:
    """A thing that `sluice inspect` can show.

    Attributes:
        kind: A dataset version, a shard file, a directory of TFRecord files, or a run.
        path: The version's, files' or run's directory, or the shard's file.
        version: For a shard, the dataset version that it lies in, or None.
    """

    kind: TargetKind
    path: Path
    version: Path | None = None


def find_target(path: str) -> Target:
    """Finds what a path names; a dataset or a series of runs stands for its current one.

    Raises:
        UpstreamNotReadyError: There is nothing there, or nothing has been published there yet.
        InputDataError: `CURRENT` names something that does not exist.
    """
    place = local_path(path)
    if place.name in (MANIFEST_FILE, RUN_CARD_FILE) and place.is_file():
        place = place.parent
    if place.is_file():
        return Target("shard", place, find_version(place))
    if (place / RUN_CARD_FILE).is_file() or (place / RUNS_DIR).is_dir():
        return Target("run", resolve_run(str(place)))
    is_dataset = (place / MANIFEST_FILE).is_file() or (place / CURRENT_FILE).is_file()
    if is_dataset or (place / VERSIONS_DIR).is_dir():
        return Target("dataset", resolve_version(place))
    if place.is_dir() and list_record_files(place):
        return Target("files", place)
    raise UpstreamNotReadyError(
        "there is nothing here to inspect",
        received=place if place.exists() else f"{place} (does not exist)",
        allowed="a dataset, one of its versions, a run, TFRecord files or one of them",
        fix="correct the path, or run `sluice build` or `sluice train` first",
    )


def summarize_dataset(version: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns what a dataset version holds."""
    base = version.resolve().parent.parent
    return {
        "kind": "dataset",
        "path": str(version),
        "name": manifest.dataset_name,
        "version": manifest.dataset_version,
        "published_versions": published_versions(base) or [manifest.dataset_version],
        "created_at": manifest.created_at,
        "code_version": manifest.code_version,
        "record_type": manifest.record_type,
        "compression": manifest.compression,
        "layout": manifest.layout,
        "schema_fingerprint": manifest.schema.fingerprint,
        "encoders_fingerprint": manifest.encoders_fingerprint,
        "config_sha256": manifest.source.config_sha256,
        "event_ts_ms_range": manifest.source.event_ts_ms_range,
        "splits": [
            {
                "name": split.name,
                "rows": split.rows,
                "bytes": split.bytes,
                "shards": len(split.shards),
                "label_rate": manifest.label_rate.get(split.name),
            }
            for split in manifest.splits
        ],
        "unlisted": list_unlisted_files(version, manifest),
        "features": manifest.schema.to_json(),
        "packed_columns": list_packed_features(manifest),
        "keys": asdict(manifest.keys),
        "counts": {
            key: getattr(manifest.counts, key)
            for key in ("read", "quarantined", "joined", "kept", "dropped")
        },
    }


def find_shard(
    path: Path, version: Path | None, manifest: Manifest | None
) -> tuple[str, ShardInfo] | None:
    """Returns the split of a shard and its entry in the manifest, None where it is not listed."""
    if version is None or manifest is None:
        return None
    relative = str(path.resolve().relative_to(version.resolve()))
    listed = ((split.name, shard) for split in manifest.splits for shard in split.shards)
    return next((found for found in listed if found[1].path == relative), None)


def summarize_shard(path: Path, version: Path | None, manifest: Manifest | None) -> dict[str, Any]:
    """Returns what a shard holds: from its manifest, or by reading it where there is none.

    Raises:
        InputDataError: The file is damaged, or holds other records than `tf.train.Example`.
    """
    summary: dict[str, Any] = {"kind": "shard", "path": str(path), "bytes": path.stat().st_size}
    if manifest is not None and (found := find_shard(path, version, manifest)) is not None:
        split, shard = found
        listed = {"split": split, "rows": shard.rows, "crc32c": shard.crc32c}
        return {**summary, "manifest": str(version), "listed": True, **listed,
                "compression": manifest.compression,
                "features": manifest.schema.to_json()}  # fmt: skip
    compression = _find_compression(path)
    rows, _ = count_records(path, compression)
    return {
        **summary,
        "manifest": None,
        "listed": False,
        "rows": rows,
        "crc32c": read_checksum(path),
        "compression": compression,
        "features": _features_to_json(infer_features([path])),
    }


def summarize_run(run: Path) -> dict[str, Any]:
    """Returns a run's card and its evaluation, None where it has not been evaluated.

    Raises:
        InputDataError: The card is damaged.
    """
    card = read_json(run / RUN_CARD_FILE)
    metrics: dict[str, Any] | None = None
    problem = None
    if (run / METRICS_FILE).exists():
        try:
            metrics = read_json(run / METRICS_FILE)
        except SluiceError as error:
            problem = error.what
    summary = {"kind": "run", "path": str(run), "card": card, "metrics": metrics}
    return summary if problem is None else {**summary, "metrics_problem": problem}
