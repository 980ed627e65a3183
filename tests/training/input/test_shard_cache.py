from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.dataset import read_manifest
from conf.training import InputConfig
from training.input import InputCounts, ReadOptions, build_train_dataset
from training.input.shard_cache import CachedReader, split_runs


def read(version: Path, config: InputConfig, epoch: int = 0) -> list[list[int]]:
    manifest = read_manifest(version)
    dataset = build_train_dataset(version, manifest, config, epoch=epoch, seed=3)
    return [batch["movie_id"].numpy().tolist() for batch in dataset]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_later_epochs_decode_nothing_and_give_the_same(
    kind, tmp_path: Path, tiny_version: Path, monkeypatch
) -> None:
    version = tmp_path / "copy"
    shutil.copytree(tiny_version, version)
    place = {"cache_dir": str(tmp_path / "kept")} if kind == "disk" else {}
    base = {"batch_size": 16, "shuffle_buffer": 300}
    config = InputConfig.model_validate({**base, "cache": kind, **place})
    plain = InputConfig.model_validate(base)
    expected = [read(version, plain, epoch) for epoch in (0, 1)]
    assert read(version, config) == expected[0]
    monkeypatch.setattr("training.input.pool.ShardReader", None)
    assert read(version, config, 1) == expected[1]
    assert read(version, config) == expected[0]


@pytest.mark.parametrize("damage", ["cut", "short", "empty", "flipped"])
def test_a_damaged_file_is_made_again(
    damage: str, tmp_path: Path, tiny_version: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = InputConfig.model_validate(
        {"batch_size": 16, "cache": "disk", "cache_dir": str(tmp_path)}
    )
    expected = read(tiny_version, config)
    files = sorted(tmp_path.glob("*.arrow"))
    sound = [file.read_bytes() for file in files]
    for file in files:
        content = bytearray(file.read_bytes())
        if damage == "flipped":  # In the midst of the columns.
            content[len(content) // 2] ^= 1
        else:
            del content[{"cut": len(content) - 1, "short": 100, "empty": 0}[damage] :]
        file.write_bytes(content)
    assert read(tiny_version, config) == expected
    assert "is damaged and is made again" in caplog.text
    assert [file.read_bytes() for file in files] == sound


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_a_damaged_shard_lacks_is_counted_each_epoch_until_it_is_mended(
    kind, tmp_path: Path, tiny_version: Path
) -> None:
    version = tmp_path / "copy"
    shutil.copytree(tiny_version, version)
    manifest = read_manifest(version)
    shard = version / "train" / "part-00001.tfrecord"
    sound = shard.read_bytes()
    shard.write_bytes(bytes([*sound[:40], sound[40] ^ 1, *sound[41:]]))
    place = {"cache_dir": str(tmp_path / "kept")} if kind == "disk" else {}
    config = InputConfig.model_validate(
        {"batch_size": 16, "cache": kind, "on_corrupt": "skip_record", **place}
    )

    def read_epoch(epoch: int) -> tuple[int, dict[str, int]]:
        counts = InputCounts()
        dataset = build_train_dataset(
            version, manifest, config, epoch=epoch, seed=3, options=ReadOptions(counts=counts)
        )
        return sum(int(batch["movie_id"].shape[0]) for batch in dataset), counts.totals()

    assert [read_epoch(epoch) for epoch in (0, 1)] == [(779 // 16 * 16, {"bad_records": 1})] * 2
    shard.write_bytes(sound)
    assert read_epoch(2) == (780 // 16 * 16, {})


def test_runs_keep_the_numbers_of_their_records() -> None:
    batch = pa.RecordBatch.from_pydict({"v": [10, 12, 13, 15]})
    sound = np.array([True, False, True, True, False, True])
    runs = list(split_runs(10, batch, sound))
    assert [(n, r.column(0).to_pylist()) for n, r in runs] == [
        (10, [10]), (12, [12, 13]), (15, [15])
    ]  # fmt: skip
    reader = CachedReader(runs, 11)
    assert reader.read(13)[0] == 12
    assert reader.read(13) is None
    number, rest = reader.read(99)
    assert (number, rest.column(0).to_pylist()) == (13, [13])
    assert reader.read(99)[0] == 15
    assert reader.read(99) is None
