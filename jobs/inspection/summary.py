"""What a dataset version, a shard or a run holds, as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.dataset import list_unlisted, published_versions
from conf.errors import SluiceError
from conf.manifest import Manifest
from conf.run import METRICS_FILE, RUN_CARD_FILE, read_json
from etl.tfrecord.decode import infer_features
from etl.tfrecord.framing import HEADER_BYTES, detect_compression
from jobs.inspection.slots import list_slots
from jobs.inspection.verify import count_records, read_checksum


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
        "unlisted": list_unlisted(version, manifest),
        "features": manifest.schema.to_json(),
        "packed_columns": [column.to_json() for column in list_slots(manifest)],
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
