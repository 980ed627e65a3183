"""Bad input: what is wrong is named, and nothing is lost in silence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import InputDataError
from conf.manifest import Manifest, SplitInfo
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import InputConfig
from tests.training.tiny_dataset import one_feature, rewrite_label
from training.input.batches import (
    build_eval_dataset,
    build_train_dataset,
    carry,
    input_errors,
    read_batches,
)
from training.reader.feature_columns import plan_columns
from training.reader.shards import InputCounts, compare_begun
from training.reader.shuffle_buffer import read_epoch
from training.reader.training_data import InputOptions, SplitSource, count_rows

BASE = {"batch_size": 8, "shuffle_buffer": 100, "interleave_shards": 2}


def read(version: Path, manifest: Manifest, options: InputOptions | None = None, **config) -> int:
    dataset = build_train_dataset(
        version, manifest, InputConfig.model_validate({**BASE, **config}),
        epoch=0, seed=1, options=options,
    )  # fmt: skip
    return sum(
        int(b["user_id"].shape[0]) for b in read_batches(dataset, version, manifest, "train")
    )


@pytest.fixture
def damaged(tmp_path: Path, tiny_version: Path) -> Path:
    """A copy whose third train shard has a flipped byte in the payload of its second record."""
    version = tmp_path / "damaged"
    shutil.copytree(tiny_version, version)
    shard = version / "train" / "part-00002.tfrecord"
    content = bytearray(shard.read_bytes())
    first = int.from_bytes(content[:8], "little")
    content[first + 16 + 12 + 5] ^= 1
    shard.write_bytes(content)
    return version


def test_damage_fails_with_file_and_offset(damaged: Path) -> None:
    manifest = read_manifest(damaged)
    with pytest.raises(InputDataError, match=r"part-00002.*payload.*at byte offset \d+ \(record 1"):
        read(damaged, manifest)


def test_a_bad_record_alone_is_skipped_and_counted(damaged: Path) -> None:
    manifest, counts = read_manifest(damaged), InputCounts()
    rows = read(damaged, manifest, InputOptions(counts=counts), on_corrupt="skip_record")
    assert rows == 779 // 8 * 8
    assert counts.records == {"checksum of the payload does not match": 1}
    assert "part-00002.tfrecord, byte offset" in (counts.first_bad or "")
    assert "1 bad record(s) skipped" in counts.describe()[0]


def test_a_damaged_shard_is_skipped_whole_and_counted(damaged: Path) -> None:
    manifest, counts = read_manifest(damaged), InputCounts()
    rows = read(damaged, manifest, InputOptions(counts=counts), on_corrupt="skip_shard")
    assert rows == 585 // 8 * 8
    assert list(counts.shards) == [str(damaged / "train" / "part-00002.tfrecord")]
    [told] = counts.describe()
    assert "checksum of the payload" in told
    assert told.count("part-00002") == 1


@pytest.mark.parametrize(("policy", "rows"), [("skip_record", 779), ("skip_shard", 585)])
def test_what_is_left_is_counted_before_training(damaged: Path, policy, rows) -> None:
    config = InputConfig.model_validate({**BASE, "on_corrupt": policy})
    assert count_rows(SplitSource(damaged, read_manifest(damaged), "train", config)) == rows


def test_a_missing_shard_is_named_or_left_out(tmp_path: Path, tiny_version: Path) -> None:
    version = tmp_path / "missing"
    shutil.copytree(tiny_version, version)
    manifest, counts = read_manifest(version), InputCounts()
    (version / "train" / "part-00001.tfrecord").unlink()
    for policy in ("fail", "skip_record"):
        with pytest.raises(InputDataError, match="part-00001"):
            read(version, manifest, on_corrupt=policy)
    rows = read(version, manifest, InputOptions(counts=counts), on_corrupt="skip_shard")
    assert rows == 585 // 8 * 8
    assert len(counts.shards) == 1


def test_a_shard_that_is_shorter_than_the_manifest_says(tmp_path: Path, tiny_version: Path) -> None:
    version = tmp_path / "short"
    shutil.copytree(tiny_version, version)
    manifest = read_manifest(version)
    shard = version / "train" / "part-00001.tfrecord"
    content = shard.read_bytes()
    shard.write_bytes(content[: 16 + int.from_bytes(content[:8], "little")])
    with pytest.raises(InputDataError, match=r"part-00001.* ends early[\s\S]*1 records[\s\S]*195"):
        read(version, manifest)


def test_a_shard_that_is_longer_than_the_manifest_says(tmp_path: Path, tiny_version: Path) -> None:
    version = tmp_path / "long"
    shutil.copytree(tiny_version, version)
    manifest = read_manifest(version)
    shard = version / "train" / "part-00001.tfrecord"
    content = shard.read_bytes()
    shard.write_bytes(content + content[: 16 + int.from_bytes(content[:8], "little")])
    with pytest.raises(InputDataError, match=r"part-00001.* does not end where[\s\S]*than 195"):
        read(version, manifest)


def cut_shard(version: Path, records: int, more_bytes: int) -> int:
    """Cuts a train shard behind so many records; returns how many it had."""
    shard = version / "train" / "part-00001.tfrecord"
    content, offset, starts = shard.read_bytes(), 0, []
    while offset < len(content):
        starts.append(offset)
        offset += 16 + int.from_bytes(content[offset : offset + 8], "little")
    shard.write_bytes(content[: starts[records] + more_bytes])
    return len(starts)


@pytest.mark.parametrize(
    ("more_bytes", "reasons"),
    [(0, []), (7, ["truncated header"]), (40, ["truncated payload"])],
)
def test_what_a_cut_shard_still_holds_is_read_and_the_rest_is_counted(
    more_bytes, reasons, tmp_path: Path, tiny_version: Path
) -> None:
    version = tmp_path / "cut"
    shutil.copytree(tiny_version, version)
    manifest, counts = read_manifest(version), InputCounts()
    had = cut_shard(version, 100, more_bytes)
    assert had == 195
    rows = read(
        version, manifest, InputOptions(counts=counts),
        on_corrupt="skip_record",
    )  # fmt: skip
    assert rows == (780 - had + 100) // 8 * 8
    assert counts.totals() == {"bad_records": had - 100}
    assert all(any(reason in told for told in counts.records) for reason in reasons)
    assert counts.records["not there, though the manifest counts it"] == 95 - len(reasons)
    assert "part-00001.tfrecord" in (counts.first_bad or "")


def test_records_that_go_with_a_damaged_length_are_counted(
    tmp_path: Path, tiny_version: Path
) -> None:
    """Two lengths in a row are flipped: one bad range, in which two records are lost."""
    version = tmp_path / "lengths"
    shutil.copytree(tiny_version, version)
    manifest, counts = read_manifest(version), InputCounts()
    shard = version / "train" / "part-00002.tfrecord"
    content = bytearray(shard.read_bytes())
    second = 16 + int.from_bytes(content[:8], "little")
    third = second + 16 + int.from_bytes(content[second : second + 8], "little")
    content[second] ^= 1
    content[third] ^= 1
    shard.write_bytes(content)
    rows = read(version, manifest, InputOptions(counts=counts), on_corrupt="skip_record")
    assert rows == 778 // 8 * 8
    assert counts.totals() == {"bad_records": 2}


POLICIES = ["fail", "skip_record", "skip_shard"]


@pytest.fixture
def rewritten(tmp_path: Path, tiny_version: Path) -> Path:
    """A copy in which the last record of a train shard has another label."""
    version = tmp_path / "rewritten"
    shutil.copytree(tiny_version, version)
    rewrite_label(version, 194)
    return version


@pytest.mark.parametrize("policy", POLICIES)
def test_a_record_that_was_written_anew_is_refused_whatever_the_policy(
    rewritten: Path, policy: str
) -> None:
    with pytest.raises(InputDataError, match=r"part-00001.tfrecord is not the file that was"):
        read(rewritten, read_manifest(rewritten), on_corrupt=policy)


def test_each_worker_compares_the_files_of_its_ranges(rewritten: Path) -> None:
    """With more workers than files each reads a range of every file."""
    for worker in range(5):
        options = InputOptions(worker=(worker, 5))
        config = InputConfig.model_validate({**BASE, "batch_size": 5})
        source = SplitSource(rewritten, read_manifest(rewritten), "train", config, options)
        plan = source.plan(plan_columns(source.manifest, [source.manifest.schema["user_id"]]), 1)
        with pytest.raises(InputDataError, match=r"part-00001.tfrecord is not the file"):
            list(read_epoch(plan, 0))
        sound = [shard for shard in plan.shards if "part-00001" not in shard.path]
        compare_begun(plan.damage, sound)
        assert not options.checks.select_begun(sound)


def test_an_empty_split_is_refused(tiny_version: Path, tiny_manifest: Manifest) -> None:
    splits = (SplitInfo("train", ()), *tiny_manifest.splits[1:])
    with pytest.raises(InputDataError, match="empty") as refused:
        read(tiny_version, replace(tiny_manifest, splits=splits))
    assert "batch_size" not in (refused.value.fix or "")  # no size of a batch would do


def test_a_value_of_another_type_names_the_feature(tmp_path: Path, tiny_manifest: Manifest) -> None:
    written = FeatureSpec("price", "int64", "user")
    manifest = one_feature(tmp_path, tiny_manifest, written, [{"price": 1}])
    expected = FeatureSpec("price", "float32", "user", pad_value=0.0)
    manifest = replace(manifest, schema=FeatureSchema((expected,)))
    dataset = build_eval_dataset(tmp_path, manifest, "test", 1)
    with pytest.raises(InputDataError, match="'price'"):
        list(read_batches(dataset, tmp_path, manifest, "test"))


def test_an_error_of_the_input_comes_back_as_it_was(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    error = InputDataError("no such thing", received="this")

    def fail() -> None:
        raise carry(error)

    with (
        pytest.raises(InputDataError, match="no such thing") as caught,
        input_errors(tiny_version, tiny_manifest, "train"),
    ):
        tf.py_function(fail, [], [])
    assert caught.value is error
