from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conf.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.training import InputConfig
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.input import Source, build_train_dataset, count_rows, count_steps
from training.input import counting as counting_module

HELD_OUT = {"validation": {"hash_of": "user_id", "share": 0.25}}
CASES = {
    "plain": {},
    "filter": {"filter": [{"feature": "history", "op": ">", "value": 3}]},
    "held out": HELD_OUT,
    "take": {"take": 300},
    "filter of what is taken": {"take": 300, "filter": [{"feature": "label", "value": 1}]},
    "on_corrupt": {"on_corrupt": "skip_record"},
    "balanced": {"class_balance": {"feature": "label", "shares": {0: 0.5, 1: 0.5}}},
    "buckets": {"bucket_boundaries": [2, 5]},
}


def source_of(version: Path, manifest: Manifest, held_out: bool = False, **config) -> Source:
    settings = InputConfig.model_validate({"batch_size": 16, "shuffle_buffer": 200, **config})
    return Source(version, manifest, "train", settings, is_held_out=held_out)


@pytest.mark.parametrize("case", [*CASES, "mix"])
def test_an_epoch_has_as_many_batches_as_are_counted(
    case, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    mix = {"mix": [{"dataset": str(tiny_version), "weight": 0.3}], **HELD_OUT}
    source = source_of(tiny_version, tiny_manifest, **CASES.get(case, mix))
    for epoch in (0, 1):
        dataset = build_train_dataset(
            tiny_version, tiny_manifest, source.config, epoch=epoch, seed=3
        )
        assert sum(1 for _ in dataset) == count_steps(source)


def test_what_is_held_out_and_what_is_not_are_all_rows(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    sides = [source_of(tiny_version, tiny_manifest, side, **HELD_OUT) for side in (False, True)]
    assert sum(count_rows(side) for side in sides) == 780
    assert 100 < count_rows(sides[1]) < 300


def test_nothing_is_read_where_the_manifest_tells(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(counting_module, "build_stream", None)
    file = tmp_path / "counts.json"
    assert count_steps(source_of(tiny_version, tiny_manifest), file) == 780 // 16
    assert not file.exists()


def test_counts_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(users=20))
    manifest, file = read_manifest(version), tmp_path / "counts.json"
    source = source_of(version, manifest, **HELD_OUT)
    rows = count_rows(source)
    assert count_rows(source, file) == rows  # known to the process, and written all the same
    assert list(json.loads(file.read_text()).values()) == [rows]
    monkeypatch.setattr(counting_module, "_COUNTED", {})
    monkeypatch.setattr(counting_module, "_read_through", None)
    moved = source_of(version.rename(tmp_path / "elsewhere"), manifest, **HELD_OUT)
    assert count_rows(moved, file) == rows


@pytest.mark.parametrize("content", ["{", "[]", '{"a": null}', "null"])
def test_a_damaged_file_is_counted_anew(
    content, tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    file = tmp_path / "counts.json"
    file.write_text(content)
    source = source_of(tiny_version, tiny_manifest, **HELD_OUT)
    assert count_rows(source, file) == count_rows(source)
    assert count_rows(source) in json.loads(file.read_text()).values()


def test_two_places_of_one_version_are_counted_apart(tmp_path: Path, tiny_version: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_version, copy)
    manifest = read_manifest(copy)
    (copy / "train" / "part-00001.tfrecord").unlink()
    found = [
        count_rows(source_of(place, manifest, on_corrupt="skip_shard"))
        for place in (tiny_version, copy)
    ]
    assert found == [780, 585]


def test_a_filter_that_leaves_no_batch_is_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    strict = {"filter": [{"feature": "history", "op": ">", "value": 99}]}
    with pytest.raises(InputDataError, match="0 rows that the input leaves of 780"):
        count_steps(source_of(tiny_version, tiny_manifest, **strict))
