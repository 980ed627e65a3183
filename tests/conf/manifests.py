"""A small manifest."""

from __future__ import annotations

from conf.manifest import DatasetKeys, Manifest, ShardInfo, SplitInfo
from conf.provenance import RowCounts, SourceSnapshot
from conf.schema import FeatureSchema, FeatureSpec


def build_manifest(version_id: str) -> Manifest:
    return Manifest(
        dataset_name="d",
        dataset_version=version_id,
        created_at="2026-01-01T00:00:00+00:00",
        record_type="Example",
        compression=None,
        splits=(SplitInfo("train", (ShardInfo("train/part-0", 1, 10, "00000000"),)),),
        schema=FeatureSchema((FeatureSpec("u", "int64", "user", vocabulary_size=5),)),
        keys=DatasetKeys(user="u", item="i"),
        encoder_files=(),
        encoders_fingerprint="0",
        statistics={"train": {"u": {"rows": 1}}},
        label_rate={},
        source=SourceSnapshot((), (1, 2), {"name": "d"}, "0"),
        counts=RowCounts({"log": 1}, {"log": {}}, 1, {"train": 1}, {}),
        code_version="0",
    )
