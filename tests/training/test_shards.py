from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from training.shards import filled_shards, shard_paths


def test_paths_and_records(tiny_version: Path, tiny_manifest: Manifest) -> None:
    paths = shard_paths(tiny_version, tiny_manifest, "train")
    assert [Path(path).name for path in paths] == [f"part-{i:05d}.tfrecord" for i in range(4)]
    assert sum(shard.rows for shard in filled_shards(tiny_manifest, "train")) == 780


@pytest.mark.parametrize("change", [{"record_type": "ByteArray"}, {"compression": "zstd"}])
def test_records_that_training_does_not_read(
    change, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    with pytest.raises(InputDataError, match=next(iter(change.values()))):
        shard_paths(tiny_version, replace(tiny_manifest, **change), "train")
