"""Summaries of a dataset version, a shard, TFRecord files or a run, as JSON values.

Files that no dataset version lists are read whole, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from conf.artefacts.dataset import (
    VERSIONS_DIR,
    find_version,
    list_unlisted_files,
    published_versions,
    read_manifest,
    resolve_version,
)
from conf.artefacts.run import METRICS_FILE, RUN_CARD_FILE, RUNS_DIR, read_json, resolve_run
from conf.errors import InputDataError, SluiceError, UpstreamNotReadyError
from conf.local_paths import absolute_path, list_visible_files, local_path
from conf.manifest import MANIFEST_FILE, Manifest, ShardInfo
from conf.paths import CURRENT_FILE
from etl.quality.figures import Share, list_figures, read_figures
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.commit.output_directory import read_output_manifest
from etl.tfrecord.types.features import WireFeature
from jobs.inspection.records import Content, describe_lengths, read_first
from jobs.inspection.verify import OnBytes, Problem, Verification, verify_files

TargetKind = Literal["dataset", "shard", "files", "run"]


@dataclass(frozen=True)
class Target:
    """A thing that `sluice inspect` can show.

    Attributes:
        kind: A dataset version, a shard file, a directory of TFRecord files, or a run.
        path: The version's, files' or run's directory, or the file.
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
    if place.is_dir() and list_visible_files(place):
        return Target("files", place)
    raise UpstreamNotReadyError(
        "there is nothing here to inspect",
        received=place if place.exists() else f"{place} (does not exist)",
        allowed="a dataset, one of its versions, a run, TFRecord files or one of them",
        fix="correct the path, or run `sluice build` or `sluice train` first",
    )


_OF_MANIFEST = ("created_at", "code_version", "record_type", "compression")
_OF_SPLIT = ("name", "rows", "bytes")
_OF_COUNTS = ("read", "quarantined", "joined", "kept", "dropped")


def _pick(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def summarize_dataset(version: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns what a dataset version holds."""
    base, rates = version.resolve().parent.parent, manifest.label_rate
    return {
        "kind": "dataset",
        "path": str(version),
        "name": manifest.dataset_name,
        "version": manifest.dataset_version,
        "published_versions": published_versions(base) or [manifest.dataset_version],
        **_pick(manifest, _OF_MANIFEST),
        "schema_fingerprint": manifest.schema.fingerprint,
        "encoders_fingerprint": manifest.encoders_fingerprint,
        **_pick(manifest.source, ("config_sha256", "event_ts_ms_range")),
        "splits": [
            {
                **_pick(s, _OF_SPLIT),
                "shards": len(s.shards),
                "label_rate": rates.get(s.name),
                **_weigh(manifest, s.name),
            }
            for s in manifest.splits
        ],
        "spark": dict(manifest.spark),
        "unlisted": list_unlisted_files(version, manifest),
        "features": manifest.schema.to_json(),
        "packed_columns": _list_packed_features(manifest),
        "keys": asdict(manifest.keys),
        "counts": _pick(manifest.counts, _OF_COUNTS),
        "contract": [dict(rule) for rule in manifest.contract],
        "figures": _list_figures(version, manifest),
    }


def _weigh(manifest: Manifest, split: str) -> dict[str, float | None]:
    """The rate of the label by the rows' weights, where they have some."""
    label = manifest.keys.label
    if label is None or manifest.find_weight() is None:
        return {}
    return {"weighted_label_rate": manifest.find_label_mean(label, split)}


def _list_figures(version: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Shares and sizes, beside those of the version that was current when this one was built.

    Nulls and OOV only where there are any, now or before: of many features most have none.
    """
    before = None
    parent = version.resolve().parent / str(manifest.parent)
    if manifest.parent is not None and (parent / MANIFEST_FILE).is_file():
        # What an earlier version is like must not keep this one from being shown.
        with suppress(SluiceError, OSError):
            before = read_figures(read_manifest(parent))
    return [
        {
            "figure": figure.title,
            **_list_value("", figure.now),
            **_list_value("_before", figure.before),
            "far": figure.is_far or None,
        }
        for figure in list_figures(read_figures(manifest), before)
        if figure.kind not in ("null", "oov") or figure.is_telling
    ]


def _list_value(ending: str, value: Share | int | None) -> dict[str, Any]:
    is_share = isinstance(value, Share)
    return {
        f"share{ending}": value.value if isinstance(value, Share) else None,
        f"tokens{ending}": None if is_share else value,
    }


def _list_packed_features(manifest: Manifest) -> list[dict[str, Any]]:
    """Which scalars share a list, and their place in it, from 0."""
    return [
        {
            "name": slot.feature,
            "feature": slot.packed,
            "place": slot.offset,
            "type": manifest.schema[slot.feature].dtype,
        }
        for slot in manifest.slots
    ]


def summarize_files(
    directory: Path, head: int | None = None, progress: OnBytes = lambda _: None
) -> dict[str, Any]:
    """Returns what the files below a directory hold: reads, and so verifies, every one.

    Args:
        directory: Folder of the files, with partition directories or without.
        head: How many of the first records to show, unless a file is damaged; None for none.
        progress: Called with the number of bytes read.
    """
    committed = read_output_manifest(directory)
    listed = () if committed is None else committed.shards
    files, content, problems = list_visible_files(directory), Content(), []
    names = [str(path.relative_to(directory)) for path in files]
    for name, path in zip(names, files, strict=True):
        if damage := content.read(path):
            problems.append(Problem(name, damage))
        progress(path.stat().st_size)
    problems += verify_files(directory, listed).problems
    summary = {
        "kind": "files",
        "path": str(directory),
        "manifest": committed is not None,
        "not_in_manifest": sorted(set(names) - {s.path for s in listed}) if committed else [],
        "files": len(files),
        "rows": content.rows,
        "bytes": content.bytes,
        "record_type": content.record_type,
        "compressions": sorted(content.compressions),
        "partition_columns": list(committed.partition_columns) if committed else [],
        "record_sizes": describe_lengths(content.lengths),
        "features": _features_to_json(content.features),
    }
    result = Verification(len(files), content.rows, content.bytes, tuple(problems))
    summary["verification"] = result.to_json()
    if head is not None and not problems:
        summary["head"] = read_first(files, head, record_type=content.record_type)
    return summary


def _features_to_json(features: Iterable[WireFeature]) -> list[dict[str, Any]]:
    return [
        {"name": f.name, "dtype": f.kind, "shape": [None] * (2 if f.is_sequence else f.is_list)}
        for f in features
    ]


def summarize_shard(
    target: Target, manifest: Manifest | None, *, verify: bool = False, head: int | None = None
) -> dict[str, Any]:
    """Returns what a shard holds: from its manifest, or by reading it where none lists it.

    Args:
        target: The shard.
        manifest: That of the version that it lies in, or None.
        verify: Whether to read every byte, and to list damage rather than to refuse it.
        head: How many of the first records to show, unless the file is damaged; None for none.

    Raises:
        InputDataError: The file is damaged.
    """
    listed = _find_shard(target, manifest)
    if manifest is None or target.version is None or listed is None:
        manifest, content = None, Content()
        summary, result = _summarize_bare_shard(target.path, content)
        record_type = content.record_type
    else:
        summary = _summarize_listed_shard(target, manifest, *listed)
        result = verify_files(target.version, [listed[1]] if verify else [])
        record_type = "Example"
    if verify:
        summary["verification"] = result.to_json()
    elif result.problems:
        raise InputDataError(f"{target.path} is damaged", received=result.problems[0].what)
    if head is not None and not result.problems:
        summary["head"] = read_first([target.path], head, manifest, record_type)
    return summary


def _summarize_listed_shard(
    target: Target, manifest: Manifest, split: str, shard: ShardInfo
) -> dict[str, Any]:
    return {
        "kind": "shard",
        "path": str(target.path),
        "bytes": target.path.stat().st_size,
        "manifest": str(target.version),
        "listed": True,
        "split": split,
        "rows": shard.rows,
        "crc32c": shard.crc32c,
        "compression": manifest.compression,
        "features": manifest.schema.to_json(),
    }


def _summarize_bare_shard(path: Path, content: Content) -> tuple[dict[str, Any], Verification]:
    damage = content.read(path)
    problems = () if damage is None else (Problem(str(path), damage),)
    summary = {
        "kind": "shard",
        "path": str(path),
        "bytes": content.bytes,
        "manifest": None,
        "listed": False,
        "rows": content.rows,
        "crc32c": describe_file(path.parent, path).crc32c,
        "compression": next(iter(content.compressions - {"none"}), None),
        "features": _features_to_json(content.features),
    }
    return summary, Verification(1, content.rows, content.bytes, problems)


def _find_shard(target: Target, manifest: Manifest | None) -> tuple[str, ShardInfo] | None:
    """The split of a shard and its entry in the manifest, None where it is not listed."""
    if target.version is None or manifest is None:
        return None
    relative = str(absolute_path(target.path).relative_to(absolute_path(target.version)))
    listed = ((split.name, shard) for split in manifest.splits for shard in split.shards)
    return next((found for found in listed if found[1].path == relative), None)


def summarize_run(run: Path) -> dict[str, Any]:
    """Returns a run's card and its evaluation, None where it has not been evaluated.

    Raises:
        InputDataError: The card is damaged.
    """
    card = read_json(run / RUN_CARD_FILE)
    summary = {"kind": "run", "path": str(run), "card": card, "metrics": None}
    if (run / METRICS_FILE).exists():
        try:
            summary["metrics"] = read_json(run / METRICS_FILE)
        except SluiceError as error:
            summary["metrics_problem"] = error.what
    return summary
