from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from training import protocols
from training.protocols import BatchReader, headline_protocol, warn_unmasked
from training.ranks import MISSING
from training.retrieval import ItemIndex


def _reader(version: Path, manifest: Manifest, items: int = 40) -> BatchReader:
    index = ItemIndex(np.arange(2, 2 + items), np.zeros((items, 1), np.float32))
    return BatchReader(version, manifest, index, ("user_id",), 1024)


def test_batches_shrink_with_the_catalogue(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = _reader(tiny_version, tiny_manifest).read("test", seen=True)
    monkeypatch.setattr(protocols, "BLOCK_CELLS", 40 * 25)
    parts = list(_reader(tiny_version, tiny_manifest).read("test", seen=True))
    assert [part.rows for part in parts] == [25, 25, 10]
    assert np.concatenate([part.targets for part in parts]).tolist() == whole.targets.tolist()


def test_targets_and_seen_items_outside_the_catalogue_are_missing(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    [batch] = _reader(tiny_version, tiny_manifest, items=3).read("test", seen=True)
    ids = batch.features["movie_id"].numpy()
    assert ((batch.targets == MISSING) == ((ids < 2) | (ids > 4))).all()
    assert protocols.count_missing(batch) == np.sum(batch.targets == MISSING) > 0
    assert batch.seen is not None
    assert set(batch.seen.columns.tolist()) <= {0, 1, 2}
    assert not (batch.seen.columns == batch.targets[batch.seen.rows]).any()


def test_the_headline_follows_the_config_as_far_as_the_data_goes(
    tiny_manifest: Manifest,
) -> None:
    blind = replace(tiny_manifest, keys=replace(tiny_manifest.keys, seen=None))
    assert headline_protocol(tiny_manifest, True, "test") == "full_unseen"
    assert headline_protocol(tiny_manifest, False, "test") == "full_all"
    assert headline_protocol(blind, True, "test") == "full_all"
    assert headline_protocol(tiny_manifest, True, "train") == "full_all"


def test_items_that_cannot_be_masked_are_warned_of(
    tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(protocols._log, "warning", lambda text, *args: told.append(text % args))
    warn_unmasked(tiny_manifest, True, "test")
    warn_unmasked(tiny_manifest, False, "train")
    assert told == []
    warn_unmasked(tiny_manifest, True, "train")
    assert "'train'" in told[0]


def test_a_damaged_shard_is_named(
    tiny_version: Path, tiny_manifest: Manifest, tmp_path: Path
) -> None:
    version = Path(shutil.copytree(tiny_version, tmp_path / "v"))
    shard = version / tiny_manifest.split("test").shards[1].path
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(InputDataError) as caught:
        list(_reader(version, tiny_manifest).read("test", seen=True))
    assert shard.name in str(caught.value)
