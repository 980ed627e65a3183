"""What a path names, and what it holds, as JSON values: a dataset version, shard, files, or run.

Files that no dataset version lists are read in one pass over every byte, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conf.errors import InputDataError, SluiceError, UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE, Manifest
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
from etl.tfrecord.commit.output_manifest import OutputManifest, read_output_manifest
from etl.tfrecord.files.framing import (
    HEADER_BYTES,
    RecordBlock,
    detect_compression,
    read_record_blocks,
)
from jobs.inspection.records import list_packed_features
from jobs.inspection.verify import OnBytes, Problem, Verification, count_records, read_checksum

_SIZE_BINS = 33  # record lengths are below 2**31


@dataclass
class RecordSizes:
    """Lengths of records without their framing, as they are met.

    Attributes:
        counts: Records by bit length: bin k holds lengths in [2**(k - 1), 2**k), bin 0 holds 0.
        shortest: Shortest length, None before the first record.
        longest: Longest length.
        total: Sum of the lengths.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_SIZE_BINS, np.int64))
    shortest: int | None = None
    longest: int = 0
    total: int = 0

    def update(self, lengths: np.ndarray) -> None:
        """Adds records.

        Args:
            lengths: Bytes per record, int64 `[records]`, 0 or more.
        """
        if not len(lengths):
            return
        # frexp gives the exponent of the next power of two: the bit length, exact below 2**53.
        bits = np.frexp(lengths.astype(np.float64))[1]
        self.counts += np.bincount(bits, minlength=_SIZE_BINS)
        low, high = int(lengths.min()), int(lengths.max())
        self.shortest = low if self.shortest is None else min(self.shortest, low)
        self.longest = max(self.longest, high)
        self.total += int(lengths.sum())

    @property
    def records(self) -> int:
        """Records added."""
        return int(self.counts.sum())

    def to_json(self) -> dict[str, Any]:
        """Returns the histogram: each bin's bounds, both inclusive, and its count."""
        used = np.flatnonzero(self.counts)
        bins = [
            {
                "from": 1 << (int(k) - 1) if k else 0,
                "to": (1 << int(k)) - 1,
                "records": int(self.counts[k]),
            }
            for k in (range(int(used[0]), int(used[-1]) + 1) if len(used) else ())
        ]
        return {
            "shortest": self.shortest,
            "longest": self.longest if self.records else None,
            "mean": self.total / self.records if self.records else None,
            "bins": bins,
        }


BYTE_ARRAY = "ByteArray"


def list_record_files(directory: Path) -> list[Path]:
    """Lists the data files below a directory; names that begin with `.` or `_` are left out."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(directory).parts)
    )


@dataclass
class _FileTally:
    """What has been seen so far."""

    files: int = 0
    rows: int = 0
    bytes: int = 0
    compressions: set[str] = field(default_factory=set)
    sizes: RecordSizes = field(default_factory=RecordSizes)
    features: FeatureCollector | None = None
    is_raw: bool = False
    problems: list[Problem] = field(default_factory=list)

    def update(self, block: RecordBlock, name: str) -> None:
        """Adds a block; the first one decides whether the payloads are Examples at all."""
        self.rows += len(block.index)
        self.sizes.update(block.index[:, 1])
        if self.is_raw:
            return
        first = self.features is None
        # Every Example reads as a SequenceExample without feature lists.
        survey = self.features or FeatureCollector("SequenceExample")
        try:
            survey.update(block, name)
        except InputDataError:
            if not first:
                raise
            self.is_raw = True
            return
        self.features = survey

    @property
    def record_type(self) -> str:
        """What the payloads look like."""
        if self.is_raw or self.features is None:
            return BYTE_ARRAY
        sequences = any(feature.is_sequence for feature in self.features.features())
        return "SequenceExample" if sequences else "Example"


def summarize_files(
    directory: Path, progress: OnBytes = lambda _: None
) -> tuple[dict[str, Any], Verification]:
    """Reads every file below a directory.

    Args:
        directory: Where the files lie, in partition directories or not.
        progress: Told of the bytes read.

    Returns:
        What the files hold, as JSON values, and what is wrong with them: damage, and differences
        from the directory's own manifest where there is one.
    """
    committed = read_output_manifest(directory)
    survey = _FileTally()
    files = list_record_files(directory)
    for path in files:
        _tally_file(path, directory, survey, progress)
    known: set[str] = set()
    if committed is not None:
        known = {shard.path for shard in committed.shards}
        survey.problems += _compare_with_manifest(directory, committed)
    names = {str(path.relative_to(directory)) for path in files}
    features = [] if survey.features is None or survey.is_raw else survey.features.features()
    summary = {
        "kind": "files",
        "path": str(directory),
        "manifest": committed is not None,
        "not_in_manifest": sorted(names - known) if committed is not None else [],
        "files": survey.files,
        "rows": survey.rows,
        "bytes": survey.bytes,
        "record_type": survey.record_type,
        "compressions": sorted(survey.compressions),
        "partition_columns": [] if committed is None else list(committed.partition_columns),
        "record_sizes": survey.sizes.to_json(),
        "features": [
            {
                "name": feature.name,
                "dtype": feature.kind,
                "shape": [None, None] if feature.is_sequence else [None] if feature.is_list else [],
            }
            for feature in features
        ],
    }
    return summary, Verification(survey.files, survey.rows, survey.bytes, tuple(survey.problems))


def _tally_file(
    path: Path, root: Path, survey: _FileTally, progress: Callable[[int], None]
) -> None:
    relative, size = str(path.relative_to(root)), path.stat().st_size
    with path.open("rb") as file:
        compression = detect_compression(file.read(HEADER_BYTES))
    survey.files += 1
    survey.bytes += size
    survey.compressions.add(compression or "none")
    done = 0
    try:
        for block in read_record_blocks(path, compression=compression):
            survey.update(block, str(path))
            if compression is None:
                progress(block.data.size)
                done += block.data.size
    except InputDataError as error:
        survey.problems.append(Problem(relative, error.what.removeprefix(f"{path}: ")))
    progress(max(0, size - done))


def _compare_with_manifest(directory: Path, committed: OutputManifest) -> list[Problem]:
    """Holds the files against the manifest that lies beside them."""
    problems = []
    for shard in committed.shards:
        path = directory / shard.path
        if not path.is_file():
            problems.append(Problem(shard.path, "is missing"))
        elif path.stat().st_size != shard.bytes:
            size = path.stat().st_size
            problems.append(
                Problem(shard.path, f"is {size:,} bytes long, the manifest says {shard.bytes:,}")
            )
        elif (found := read_checksum(path)) != shard.crc32c:
            problems.append(
                Problem(shard.path, f"CRC-32C is {found}, the manifest says {shard.crc32c}")
            )
    return problems


TargetKind = Literal["dataset", "shard", "files", "run"]


@dataclass(frozen=True)
class Target:
    """What a path names.

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
        "packed_columns": [column.to_json() for column in list_packed_features(manifest)],
        "keys": asdict(manifest.keys),
        "counts": {
            "read": dict(manifest.counts.read),
            "quarantined": {k: dict(v) for k, v in manifest.counts.quarantined.items()},
            "joined": manifest.counts.joined,
            "kept": dict(manifest.counts.kept),
            "dropped": dict(manifest.counts.dropped),
        },
    }


def summarize_shard(path: Path, version: Path | None, manifest: Manifest | None) -> dict[str, Any]:
    """Returns what a shard holds: from its manifest, or by reading it where there is none.

    Raises:
        InputDataError: The file is damaged, or holds other records than `tf.train.Example`.
    """
    summary: dict[str, Any] = {"kind": "shard", "path": str(path), "bytes": path.stat().st_size}
    if version is not None and manifest is not None:
        relative = str(path.resolve().relative_to(version.resolve()))
        for split in manifest.splits:
            for shard in split.shards:
                if shard.path == relative:
                    listed = {"split": split.name, "rows": shard.rows, "crc32c": shard.crc32c}
                    return {**summary, "manifest": str(version), "listed": True, **listed,
                            "compression": manifest.compression,
                            "features": manifest.schema.to_json()}  # fmt: skip
    with path.open("rb") as file:
        compression = detect_compression(file.read(HEADER_BYTES))
    features = infer_features([path])
    rows, _ = count_records(path, compression)
    return {
        **summary,
        "manifest": None,
        "listed": False,
        "rows": rows,
        "crc32c": read_checksum(path),
        "compression": compression,
        "features": [
            {"name": f.name, "dtype": f.kind, "shape": [None] if f.is_list else []}
            for f in features
        ],
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
