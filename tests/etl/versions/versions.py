"""Small published versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from conf.dataset import DatasetPaths
from etl.publish import publish_version, read_current, stage_version
from tests.conf.manifests import build_manifest


def publish(paths: DatasetPaths, version_id: str) -> Path:
    """Publishes a version of one shard of ten bytes."""
    manifest = replace(build_manifest(version_id), parent=read_current(paths))
    with stage_version(paths, version_id) as staging:
        (staging / "train").mkdir()
        (staging / "train" / "part-0").write_bytes(b"x" * 10)
        return publish_version(paths, staging, manifest)
