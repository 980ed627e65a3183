"""Bad input: what is wrong is named, and nothing is lost in silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import InputConfig
from tests.training.tiny_dataset import one_feature, rewrite_label
from training.input.batches import (
    build_train_dataset,
    input_errors,
    read_split,
)
from training.reader.feature_columns import plan_columns
from training.reader.shards import InputCounts, compare_begun
from training.reader.shuffle_buffer import read_epoch
from training.reader.training_data import InputOptions, SplitSource, count_rows

BASE = {"batch_size": 8, "shuffle_buffer": 100, "interleave_shards": 2}
LOST = "not there, though the manifest counts it"


def read(
    version: Path, manifest: Manifest, counts: InputCounts | None = None, **config: object
) -> int:
    dataset = build_train_dataset(
        version, manifest, InputConfig.model_validate({**BASE, **config}),
        epoch=0, seed=1, options=InputOptions(counts=counts or InputCounts()),
    )  # fmt: skip
    with input_errors(version, manifest, "train"):
        return sum(int(batch["user_id"].shape[0]) for batch in dataset)


def find_records(content: bytes) -> list[int]:
    """Where each record begins, and the end."""
    starts = [0]
    while starts[-1] < len(content):
        starts.append(starts[-1] + 16 + int.from_bytes(content[starts[-1] :][:8], "little"))
    return starts


def flip(content: bytes, *places: int) -> bytes:
    changed = bytearray(content)
    for place in places:
        changed[place] ^= 1
    return bytes(changed)


# Each of a shard of 195 records, by its content and where its records begin.
Damage = Callable[[bytes, list[int]], bytes]
DAMAGE: dict[str, tuple[Damage, str, dict[str, int]]] = {
    "payload": (
        lambda content, at: flip(content, at[1] + 12 + 5),
        r"payload.*at byte offset \d+ \(record 1",
        {"checksum of the payload does not match": 1},
    ),
    # Two lengths in a row: one bad range, in which two records are lost.
    "lengths": (lambda content, at: flip(content, at[1], at[2]), r"length", {LOST: 1}),
    "cut": (lambda content, at: content[: at[100]], r" ends early[\s\S]*100 rec", {LOST: 95}),
    "cut in a header": (lambda content, at: content[: at[100] + 7], "truncated header", {LOST: 94}),
    "longer": (lambda content, at: content + content[: at[1]], r"does not end where", {}),
}


@pytest.fixture
def copy(tmp_path: Path, tiny_version: Path) -> Path:
    return Path(shutil.copytree(tiny_version, tmp_path / "copy"))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_or_left_out_and_counted(kind: str, copy: Path) -> None:
    manifest, (damage, told, lost) = read_manifest(copy), DAMAGE[kind]
    shard = copy / "train" / "part-00001.tfrecord"
    content = shard.read_bytes()
    shard.write_bytes(damage(content, find_records(content)))
    with pytest.raises(InputDataError, match=rf"part-00001[\s\S]*{told}"):
        read(copy, manifest)
    counts, rows = InputCounts(), {"skip_shard": 585}
    assert read(copy, manifest, counts, on_corrupt="skip_shard") == 585 // 8 * 8
    assert list(counts.shards) == [str(shard)]
    if kind != "longer":  # What is behind the end is no part of the version.
        counts, left = InputCounts(), {"payload": 779, "lengths": 778}.get(kind, 685)
        assert read(copy, manifest, counts, on_corrupt="skip_record") == left // 8 * 8
        assert counts.totals() == {"bad_records": 780 - left}
        assert {name: counts.records[name] for name in lost} == lost
        assert "part-00001.tfrecord" in (counts.first_bad or "")
        rows["skip_record"] = left
    for policy, count in rows.items():
        config = InputConfig.model_validate({**BASE, "on_corrupt": policy})
        assert count_rows(SplitSource(copy, manifest, "train", config)) == count


def test_a_missing_shard_is_named_or_left_out(copy: Path) -> None:
    manifest, counts = read_manifest(copy), InputCounts()
    (copy / "train" / "part-00001.tfrecord").unlink()
    for policy in ("fail", "skip_record"):
        with pytest.raises(InputDataError, match="part-00001"):
            read(copy, manifest, on_corrupt=policy)
    assert read(copy, manifest, counts, on_corrupt="skip_shard") == 585 // 8 * 8
    assert len(counts.shards) == 1


@pytest.mark.parametrize("policy", ["fail", "skip_record", "skip_shard"])
def test_a_record_that_was_written_anew_is_refused_whatever_the_policy(
    copy: Path, policy: str
) -> None:
    rewrite_label(copy, 194)
    with pytest.raises(InputDataError, match=r"part-00001.tfrecord is not the file that was"):
        read(copy, read_manifest(copy), on_corrupt=policy)


def test_each_worker_compares_the_files_of_its_ranges(copy: Path) -> None:
    """With more workers than files each reads a range of every file."""
    rewrite_label(copy, 194)
    for worker in range(5):
        options = InputOptions(worker=(worker, 5))
        config = InputConfig.model_validate({**BASE, "batch_size": 5})
        source = SplitSource(copy, read_manifest(copy), "train", config, options)
        plan = source.plan(plan_columns(source.manifest, [source.manifest.schema["user_id"]]), 1)
        with pytest.raises(InputDataError, match=r"part-00001.tfrecord is not the file"):
            list(read_epoch(plan, 0))
        sound = [shard for shard in plan.shards if "part-00001" not in shard.path]
        compare_begun(plan.damage, sound)
        assert all(options.checks.get(shard, True) for shard in sound)


def test_a_value_of_another_type_names_the_feature(tmp_path: Path, tiny_manifest: Manifest) -> None:
    written = FeatureSpec("price", "int64", "user")
    manifest = one_feature(tmp_path, tiny_manifest, written, [{"price": 1}])
    expected = FeatureSpec("price", "float32", "user", pad_value=0.0)
    manifest = replace(manifest, schema=FeatureSchema((expected,)))
    with pytest.raises(InputDataError, match="'price'"):
        list(read_split(tmp_path, manifest, "test", 1))
